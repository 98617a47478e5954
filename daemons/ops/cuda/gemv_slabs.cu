// Up to 8 TILES_OF_ROWS rows of activations times packed weights, where much has to be read of the matrix (sm_90).
//
// The warps of a block take tiles side by side, a slab, chunk after chunk, each tile through the warp's own ring.  The chunks of
// all slabs are one line, of which every block gets an equal piece, from the middle of one slab to the middle of another.  A
// block keeps the rows' chunks of its piece in shared memory; where that is too many, the grid's second dimension splits the
// columns, a line each.  Each block leaves its part of a slab's sums for a second kernel, which adds them, in order.  Compiled
// with KIND, TILE_BYTES, WARPS of a block, DEPTH of their rings, TILES_EACH of a block that adds parts; FROM_SHARED: matrix units
// read the rows from shared memory, once for 64 rows of the matrix (sm_90a); GATED: the first half of the matrix's rows is the
// gate of the other one, half of a slab each, and results are silu(gate x) (other x).

#include "line.cuh"
#if FROM_SHARED
#include "wide.cuh"
typedef WideCursor<TILES_OF_ROWS> Kept;
#else
#include "rows.cuh"
typedef Cursor<TILES_OF_ROWS> Kept;
#endif

constexpr int ROWS = 16, N = TILES_OF_ROWS, HALVES = GATED ? 2 : 1, SIDE = WARPS / HALVES;
constexpr int AT_ONCE = 12 / HALVES;  // parts that a thread has on their way
constexpr int PART = WARPS * N * 32;  // its numbers, four each

static_assert(KIND::BYTES == TILE_BYTES);

// Tiles of a half of the matrix, and slabs
struct Slabs {
  int n_tiles, count;

  DEVICE Slabs(int n_out) : n_tiles((n_out + ROWS - 1) / ROWS), count((n_tiles + SIDE - 1) / SIDE) {}
};

// Grid (blocks of a line, splits).  tiles [HALVES, n_tiles, n_chunks] of KIND::BYTES; x [n_rows, width], 16-byte aligned rows;
// parts float32 [splits, slabs + blocks, WARPS, N, 32, 4]: block b's part of slab s is number s + b.  n_out: rows of the matrix,
// of the gate where there is one.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    gemv_slabs(const u8* tiles, const u16* x, float4* parts, int n_rows, int n_out, int n_chunks, int width) {
  extern __shared__ __align__(128) u8 memory[];
  launch_dependents();
  int warp = this_warp(), lane = threadIdx.x % 32;
  Slabs slabs(n_out);
  int first = blockIdx.y * n_chunks / gridDim.y, length = (blockIdx.y + 1) * n_chunks / gridDim.y - first;  // chunks
  Line line = {(u32)(slabs.count * length), gridDim.x};
  int begin = line.begin(blockIdx.x), end = line.begin(blockIdx.x + 1), n_kept = min(length, end - begin);
  u32 barriers = shared_address(memory) + DEPTH * WARPS * KIND::BYTES;
  u8* numbers = memory + DEPTH * WARPS * (KIND::BYTES + 8);  // [n_kept, N] of NUMBER_BYTES
  u8* sums = numbers + n_kept * N * NUMBER_BYTES;            // [n_kept, N] of SUM_BYTES
  u8* factors = sums + n_kept * N * SUM_BYTES;               // [n_kept, N] of FACTOR_BYTES
  long long tile_bytes = (long long)n_chunks * KIND::BYTES;
  int slab = begin / length, tile = slab * SIDE + warp % SIDE, last = slabs.n_tiles - 1;
  const u8* from = tiles + (warp / SIDE * slabs.n_tiles + min(tile, last)) * tile_bytes + (long long)(first + begin % length) * KIND::BYTES;
  // behind the matrix there is nothing to read: its last slab may be narrower
  bool inside = (slabs.count - 1) * SIDE + warp % SIDE <= last;
  int left = inside ? end - begin : min(end, (slabs.count - 1) * length) - begin;
  SlabRing ring(from, SIDE * tile_bytes - (long long)length * KIND::BYTES, length - begin % length, length, left,
            shared_address(memory) + warp * DEPTH * KIND::BYTES, barriers + warp * DEPTH * 8, lane);
  wait_for_inputs();
  uint4 raw[8], next[8];
  auto load = [&](uint4(&to)[8], int at) {
    int row = at % N * 8 + lane / 4, unit = n_kept == length ? at / N : (begin + at / N) % length;
    load_rows(to, x + (long long)row * width, at < n_kept * N && row < n_rows, (first + unit) * COLUMNS, width, lane);
  };
  load(raw, warp);
  for (int at = warp; at < n_kept * N; at += WARPS) {
    load(next, at + WARPS);
    keep_rows<Kept::ORDER>(numbers + at * NUMBER_BYTES, sums + at * SUM_BYTES, factors + at * FACTOR_BYTES, raw, lane);
#pragma unroll
    for (int j = 0; j < 8; j++) raw[j] = next[j];
  }
  publish_writes();
  __syncthreads();
  for (int unit = begin; unit < end; slab++) {
    int behind = min(end, (slab + 1) * length), kept = unit - (n_kept == length ? slab * length : begin);
    Kept rows(shared_address(numbers) + kept * N * NUMBER_BYTES, shared_address(sums) + kept * N * SUM_BYTES,
              shared_address(factors) + kept * N * FACTOR_BYTES, lane);
    bool idle = !inside && slab == slabs.count - 1;  // its products are started, as the other warps of four wait for them
    float sum[N][4] = {};
#pragma unroll 1
    for (; unit < behind; unit++) {
      KIND weights;
      weights.load(idle ? ring.units : ring.wait(), lane);
      if (!idle) ring.release(lane, weights.loaded());
      rows.add(sum, weights);
    }
    long long part = blockIdx.y * (slabs.count + gridDim.x) + slab + blockIdx.x;
    float4* to = parts + part * PART + warp * (N * 32) + lane;
#pragma unroll
    for (int n = 0; n < N; n++) to[n * 32] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
  }
}

// A slab's parts in the order of columns, those of each split neighbours: the number of part `at`, and how many there are
struct Parts {
  int number, count;

  DEVICE Parts(int at, int slab, int n_slabs, int n_chunks, int n_blocks, int n_splits) : number(0), count(0) {
#pragma unroll 1
    for (int split = 0; split < n_splits; split++) {
      int length = (split + 1) * n_chunks / n_splits - split * n_chunks / n_splits;
      Line line = {(u32)(n_slabs * length), (u32)n_blocks};
      int block = line.block_of(slab * length), n = line.block_of((slab + 1) * length - 1) - block + 1;
      if (count <= at && at < count + n) number = split * (n_slabs + n_blocks) + slab + block + at - count;
      count += n;
    }
  }
};

// Grid (tiles of a half over TILES_EACH) of TILES_EACH N warps: results from parts.  All parts are on their way before the first
// one is added: each would take a microsecond otherwise.  out [n_rows, n_out] with out_stride from row to row; n_blocks, n_splits: the
// grid of the kernel above.
extern "C" __global__ void __launch_bounds__(TILES_EACH * N * 32, 2)
    gemv_slabs_sums(const float4* parts, u16* out, int n_rows, int n_out, int n_chunks, int n_blocks, int n_splits, int out_stride) {
  launch_dependents();
  int warp = this_warp(), n = warp % N, lane = threadIdx.x % 32, tile = blockIdx.x * TILES_EACH + warp / N;
  Slabs slabs(n_out);
  if (tile >= slabs.n_tiles) return;
  const float4* mine = parts + (tile % SIDE * N + n) * 32 + lane;
  float total[HALVES][4] = {};
  int count = 1;
  for (int behind = 0; behind < count; behind += 32) {
    Parts of_lane(behind + lane, tile / SIDE, slabs.count, n_chunks, n_blocks, n_splits);
    int number = in_register(of_lane.number);  // before the wait
    count = of_lane.count;
    wait_for_inputs();
    int end = min(count, behind + 32);
    for (int from = behind; from < end; from += AT_ONCE) {
      float4 part[AT_ONCE][HALVES];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        long long at = (long long)__shfl_sync(~0u, number, (from + i) % 32) * PART;
#pragma unroll
        for (int h = 0; h < HALVES; h++) part[i][h] = from + i < end ? mine[at + h * SIDE * N * 32] : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
          total[h][0] += part[i][h].x, total[h][1] += part[i][h].y, total[h][2] += part[i][h].z, total[h][3] += part[i][h].w;
        }
    }
  }
#pragma unroll
  for (int c = 0; c < 4; c++) {
    int row = n * 8 + lane % 4 * 2 + c % 2, column = tile * ROWS + lane / 4 + c / 2 * 8;
    if (row >= n_rows || column >= n_out) continue;
    float result = total[0][c];
    if (GATED) {
      float gate = from_activation(to_activation(result)), other = from_activation(to_activation(total[HALVES - 1][c]));
      result = gate / (1.f + expf(-gate)) * other;
    }
    out[(long long)row * out_stride + column] = to_activation(result);
  }
}
