// One row of activations times packed weights, or one row for each (token, expert) pair.
//
// Blocks take tiles of 16 rows in turn and multiply them with the row, which they keep in shared memory.  A block's warps take the
// chunks of 256 columns in turn, each from a ring of its own that fills before the activations are waited for; after a
// round of tiles their partial sums are added, in the order of the warps.  Compiled with KIND (a class of tiles.cuh), its TILE_BYTES,
// WARPS of a block and DEPTH of their rings.  With GATED the matrix has a gate's rows and as many of another factor, and the result is
// silu(gate x) (other x): a block takes tiles of both together.

#include "activations.cuh"
#include "ring.cuh"
#include "tiles.cuh"

constexpr int ROWS = 16, COLUMNS = 256, AT_ONCE = 3, HALVES = GATED ? 2 : 1;

static_assert(KIND::BYTES == TILE_BYTES);

// A block's tiles, each gridDim.x-th; with GATED each followed by its tile of the other half.
struct Tiles {
  const u8* tiles;
  int n_tiles, n_chunks;

  DEVICE int tile(int run) const { return (int)blockIdx.x + run / HALVES * (int)gridDim.x; }
  DEVICE int n_runs() const { return (n_tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x * HALVES; }
  DEVICE int length(int) const { return n_chunks; }
  DEVICE const u8* start(int run) const {
    return tiles + (long long)(tile(run) + run % HALVES * n_tiles) * n_chunks * KIND::BYTES;
  }
};

typedef Ring<DEPTH, KIND::BYTES, Tiles> Weights;

// What a block keeps in shared memory, in this order
struct Shared {
  u8* units;
  u64* barriers;
  float* partial;  // [2, round, WARPS, ROWS]
  float* factors;  // [chunks], rounded up to a multiple of four
  u16* sums;       // [chunks, 16]: of eight groups, then their rounding errors
  u8* numbers;     // [chunks, 256] float16

  DEVICE Shared(u8* start, int round, int n_chunks) {
    units = start;
    barriers = (u64*)(units + DEPTH * WARPS * KIND::BYTES);
    partial = (float*)(barriers + WARPS * DEPTH);
    factors = partial + 2 * round * WARPS * ROWS;
    sums = (u16*)(factors + (n_chunks + 3) / 4 * 4);
    numbers = (u8*)(sums + (KIND::SUMS ? 16 * n_chunks : 0));
  }
};

// A warp scales a chunk, eight neighbouring numbers a lane.
DEVICE void keep_chunk(const Shared& s, int chunk, uint4 raw, int lane) {
  Power power(__reduce_max_sync(~0u, largest_of(raw)));
  float sum;
  *(uint4*)(s.numbers + chunk * 512 + lane * 16) = scaled(raw, power.scale, sum);
  if (KIND::SUMS) {
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (lane % 4 == 0) {
      u32 rounded = pack_half2(sum, 0.f);
      s.sums[chunk * 16 + lane / 4] = (u16)rounded;
      s.sums[chunk * 16 + 8 + lane / 4] = (u16)pack_half2(sum - low_float(rounded), 0.f);
    }
  }
  if (lane == 0) s.factors[chunk] = power.back;
}

DEVICE void keep_row(const Shared& s, const u16* x, int n_chunks, int width, int warp, int lane) {
  for (int first = warp; first < n_chunks; first += AT_ONCE * WARPS) {
    uint4 raw[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) raw[i] = load_activations(x, (first + i * WARPS) * COLUMNS + lane * 8, width);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (first + i * WARPS < n_chunks) keep_chunk(s, first + i * WARPS, raw[i], lane);
  }
}

// The result of a row, from the sums of its halves
DEVICE u16 result(const float (&sums)[HALVES]) {
#if GATED
  float gate = from_activation(to_activation(sums[0])), other = from_activation(to_activation(sums[1]));
  return to_activation(gate / (1.f + expf(-gate)) * other);
#else
  return to_activation(sums[0]);
#endif
}

// Grid (blocks, pairs).  tiles [matrices, HALVES, n_tiles, n_chunks] of KIND::BYTES; x [rows, width], 16-byte aligned; experts
// [pairs] or null; out [pairs, n_out]: pair p is row p / pairs_per_row of x times matrix experts[p].  round: runs of tiles after
// which a block's warps add their sums, up to 2 WARPS HALVES.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
    gemv(const u8* tiles, const u16* x, const long long* experts, u16* out, int n_out, int n_chunks, int width,
         int pairs_per_row, int round) {
  extern __shared__ __align__(128) u8 memory[];
  launch_dependents();
  int warp = this_warp(), lane = threadIdx.x % 32, pair = blockIdx.y;
  int n_tiles = (n_out + ROWS - 1) / ROWS;
  if (experts) {
    wait_for_inputs();
    tiles += experts[pair] * HALVES * n_tiles * n_chunks * KIND::BYTES;
    x += (long long)(pair / pairs_per_row) * width;
    out += (long long)pair * n_out;
  }
  Shared s(memory, round, n_chunks);
  Tiles mine = {tiles, n_tiles, n_chunks};
  int n_runs = mine.n_runs();
  Weights ring(mine, warp, WARPS, (n_runs * n_chunks - warp + WARPS - 1) / WARPS, shared_address(s.units) + warp * DEPTH * KIND::BYTES,
               shared_address(s.barriers) + warp * Weights::BARRIER_BYTES);
  if (!experts) wait_for_inputs();
  keep_row(s, x, n_chunks, width, warp, lane);
  __syncthreads();
  u32 x_at = shared_address(s.numbers) + lane % 4 * KIND::LANE, sums_at = shared_address(s.sums) + lane % 4 * 4;
  int chunk = warp;
  float* partial = s.partial;
  for (int first = 0; first < n_runs; first += round) {
    int n = min(round, n_runs - first);
    for (int i = 0; i < n; i++) {
      float sum[1][4] = {};
#pragma unroll 1
      for (; chunk < n_chunks; chunk += WARPS) {
        KIND weights;
        weights.load(ring.wait(), lane);
        float factor = s.factors[chunk];
        Activations row[1] = {{x_at + chunk * 512, sums_at + chunk * 32, {factor, factor}}};
        weights.template add<Order<64, 16>>(sum, row);
        ring.release();
      }
      chunk -= n_chunks;
      if (lane % 4 == 0) {
        partial[(i * WARPS + warp) * ROWS + lane / 4] = sum[0][0];
        partial[(i * WARPS + warp) * ROWS + lane / 4 + 8] = sum[0][2];
      }
    }
    __syncthreads();
    int i = threadIdx.x / ROWS * HALVES, within = threadIdx.x % ROWS;
    int row = mine.tile(first + i) * ROWS + within;
    if (i < n && row < n_out) {
      float sums[HALVES] = {};
#pragma unroll
      for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int w = 0; w < WARPS; w++) sums[h] += partial[((i + h) * WARPS + w) * ROWS + within];
      out[row] = result(sums);
    }
    partial = s.partial + (partial == s.partial ? round * WARPS * ROWS : 0);  // two, so that one barrier is enough
  }
}
