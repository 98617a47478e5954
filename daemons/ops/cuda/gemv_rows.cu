// Up to 8 TILES_OF_ROWS rows of activations times packed weights.
//
// A block keeps a range of the columns of all rows in shared memory, in the order in which the lanes of a warp read them as the
// second factor.  Teams of TEAM warps take tiles of 16 rows of the matrix in turn; in a team the warps take the chunks in
// turn, each from a ring of its own.  When all have left their sums of a tile, one of them adds these in the order of the warps, while
// the others go on.  Where the rows do not fit, the grid's second dimension splits the columns, and sums in float32 are written for
// another kernel to add.  Compiled with KIND, TILE_BYTES, WARPS of a block, TEAM and DEPTH of their rings.  With GATED the matrix has a gate's rows and as many of another factor, as in gemv.cu; its
// columns are not split.

#include "ring.cuh"
#include "rows.cuh"

constexpr int ROWS = 16, N = TILES_OF_ROWS, HALVES = GATED ? 2 : 1, TEAMS = WARPS / TEAM, SLOTS = 2;

static_assert(KIND::BYTES == TILE_BYTES);

// A team's tiles, at equal distances; with GATED each followed by its tile of the other half.
struct Tiles {
  const u8* first;
  int n_units;
  long long distance, other_half;

  DEVICE const u8* start(int i) const { return first + i / HALVES * distance + i % HALVES * other_half; }
  DEVICE int length(int) const { return n_units; }
};

typedef Ring<DEPTH, KIND::BYTES, Tiles> Weights;

// What a block keeps in shared memory, in this order
struct Shared {
  u8* units;
  u64* barriers;
  u64* parts;       // [TEAMS, 2, SLOTS] barriers: all sums of a tile are there; they have been added
  float4* partial;  // [SLOTS, WARPS, N, 32]: a warp's sums of a tile
  u8* factors;      // [chunks, N] of FACTOR_BYTES
  u8* sums;         // [chunks, N] of SUM_BYTES: for each lane the sums over two groups, then their rounding errors
  u8* numbers;      // [chunks, N] of NUMBER_BYTES

  DEVICE Shared(u8* start, int n_chunks) {
    units = start;
    barriers = (u64*)(units + DEPTH * WARPS * KIND::BYTES);
    parts = barriers + WARPS * DEPTH;
    partial = (float4*)(parts + TEAMS * 2 * SLOTS);
    factors = (u8*)(partial + SLOTS * WARPS * N * 32);
    sums = factors + n_chunks * N * FACTOR_BYTES;
    numbers = sums + n_chunks * N * SUM_BYTES;
  }
};

// What follows from the sums of a row of x with a row of the matrix, or of both halves
DEVICE u16 result(float sum, float gate) {
#if GATED
  float rounded = from_activation(to_activation(gate));
  return to_activation(rounded / (1.f + expf(-rounded)) * from_activation(to_activation(sum)));
#else
  return to_activation(sum);
#endif
}

// Grid (blocks, splits).  tiles [HALVES, n_tiles, n_chunks] of KIND::BYTES; x [n_rows, width], 16-byte aligned rows; out [n_rows,
// n_out], or with several splits parts float32 [splits, n_rows, n_out].
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    gemv_rows(const u8* tiles, const u16* x, u16* out, float* parts, int n_rows, int n_out, int n_chunks, int width) {
  extern __shared__ __align__(128) u8 memory[];
  launch_dependents();
  int warp = this_warp(), lane = threadIdx.x % 32, team = warp / TEAM, member = warp % TEAM;
  int n_tiles = (n_out + ROWS - 1) / ROWS, first = blockIdx.y * n_chunks / gridDim.y;
  int n_mine = (blockIdx.y + 1) * n_chunks / gridDim.y - first;  // chunks
  Shared s(memory, n_mine);
  int teams = gridDim.x * TEAMS, mine = team * gridDim.x + blockIdx.x;
  int count = mine < n_tiles ? (n_tiles - mine + teams - 1) / teams : 0;
  long long tile_bytes = (long long)n_chunks * KIND::BYTES;
  Tiles runs = {tiles + mine * tile_bytes + (long long)first * KIND::BYTES, n_mine, teams * tile_bytes, n_tiles * tile_bytes};
  Weights ring(runs, member, TEAM, (count * HALVES * n_mine - member + TEAM - 1) / TEAM, shared_address(s.units) + warp * DEPTH * KIND::BYTES,
               shared_address(s.barriers) + warp * Weights::BARRIER_BYTES);
  u32 there = shared_address(s.parts) + team * (2 * SLOTS * 8), added = there + SLOTS * 8;
  if (member == 0 && lane == 0) {
    for (int i = 0; i < SLOTS; i++) {
      init_barrier(there + 8 * i, TEAM);
      init_barrier(added + 8 * i, N);
    }
  }
  wait_for_inputs();
  for (int at = warp; at < n_mine * N; at += 2 * WARPS) {
    RowChunk chunks[2];  // both are loaded before one of them is waited for
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int mine = at + i * WARPS, row = mine % N * 8 + lane / 4;
      chunks[i].load(x + (long long)row * width, row < n_rows && mine < n_mine * N, (first + mine / N) * COLUMNS, width, lane);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int mine = at + i * WARPS;
      if (mine < n_mine * N) chunks[i].keep(s.numbers + mine * NUMBER_BYTES, s.sums + mine * SUM_BYTES, s.factors + mine * FACTOR_BYTES, lane);
    }
  }
  __syncthreads();
  u32 x_at = shared_address(s.numbers) + lane * KIND::LANE, sums_at = shared_address(s.sums) + lane * 8;
  const u8* factors_at = s.factors + lane % 4 * 8;
  int chunk = member;
  float gates[N][4];
  for (int i = 0; i < count * HALVES; i++) {
    float sum[N][4] = {};
#pragma unroll 1
    for (; chunk < n_mine; chunk += TEAM) {
      Activations rows[N];
#pragma unroll
      for (int n = 0; n < N; n++) {
        int at = chunk * N + n;
        float2 factors = *(const float2*)(factors_at + at * FACTOR_BYTES);
        rows[n] = {x_at + at * NUMBER_BYTES, sums_at + at * SUM_BYTES, {factors.x, factors.y}};
      }
      KIND weights;
      weights.load(ring.wait(), lane);
      weights.template add<Order<512, 4>>(sum, rows);
      ring.release();
    }
    chunk -= n_mine;
    int slot = i % SLOTS;
    float4* partial = s.partial + (slot * WARPS + team * TEAM) * (N * 32) + lane;
    if (i >= SLOTS) wait_for_barrier(added + 8 * slot, (i / SLOTS - 1) % 2);
#pragma unroll
    for (int n = 0; n < N; n++)
      partial[(member * N + n) * 32] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
    __syncwarp();
    if (lane == 0) arrive(there + 8 * slot);
#pragma unroll
    for (int n = 0; n < N; n++) {
      if (member != (i / HALVES + n) % TEAM) continue;
      wait_for_barrier(there + 8 * slot, i / SLOTS % 2);
      float total[4] = {};
#pragma unroll
      for (int m = 0; m < TEAM; m++) {
        float4 p = partial[(m * N + n) * 32];
        total[0] += p.x, total[1] += p.y, total[2] += p.z, total[3] += p.w;
      }
      __syncwarp();
      if (lane == 0) arrive(added + 8 * slot);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        if (i % HALVES < HALVES - 1) {
          gates[n][c] = total[c];
          continue;
        }
        int row = n * 8 + lane % 4 * 2 + c % 2, column = (mine + i / HALVES * teams) * ROWS + lane / 4 + c / 2 * 8;
        if (row >= n_rows || column >= n_out) continue;
        long long at = (long long)row * n_out + column;
        if (GATED || gridDim.y == 1) out[at] = result(total[c], gates[n][c]);
        else parts[(long long)blockIdx.y * n_rows * n_out + at] = total[c];
      }
    }
  }
}
