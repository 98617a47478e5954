// Up to 8 TILES_OF_ROWS rows of activations times packed weights.
//
// A block keeps a range of the columns of all rows in shared memory, in the order in which the lanes of a warp read them as the
// second factor.  Groups of TEAM warps take tiles of 16 rows of the matrix in turn; in a group the warps take the chunks in
// turn, each from a ring of its own, and add a tile's sums in their order.  Where the rows do not fit, the grid's second
// dimension splits the columns, and sums in float32 are written for another kernel to add.  Compiled with KIND, TILE_BYTES,
// WARPS of a block and DEPTH of their rings.

#include "ring.cuh"
#include "rows.cuh"

constexpr int ROWS = 16, TEAM = 4, N = TILES_OF_ROWS;

static_assert(KIND::BYTES == TILE_BYTES);
typedef Ring<DEPTH, KIND::BYTES, EvenRuns> Weights;

// What a block keeps in shared memory, in this order
struct Shared {
  u8* units;
  u64* barriers;
  float4* partial;  // [2, WARPS, N, 32]: a warp's sums of a tile
  u8* factors;      // [chunks, N] of FACTOR_BYTES
  u8* sums;         // [chunks, N] of SUM_BYTES: for each lane the sums over two groups, then their rounding errors
  u8* numbers;      // [chunks, N] of NUMBER_BYTES

  DEVICE Shared(u8* start, int n_chunks) {
    units = start;
    barriers = (u64*)(units + DEPTH * WARPS * KIND::BYTES);
    partial = (float4*)(barriers + WARPS * DEPTH);
    factors = (u8*)(partial + 2 * WARPS * N * 32);
    sums = factors + n_chunks * N * FACTOR_BYTES;
    numbers = sums + n_chunks * N * SUM_BYTES;
  }
};

// Grid (blocks, splits).  tiles [n_tiles, n_chunks] of KIND::BYTES; x [n_rows, width], 16-byte aligned rows; out [n_rows,
// n_out], or with several splits parts float32 [splits, n_rows, n_out].
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    gemv_rows(const u8* tiles, const u16* x, u16* out, float* parts, int n_rows, int n_out, int n_chunks, int width) {
  extern __shared__ __align__(128) u8 memory[];
  launch_dependents();
  int warp = this_warp(), lane = threadIdx.x % 32, team = warp / TEAM, member = warp % TEAM;
  int n_tiles = (n_out + ROWS - 1) / ROWS, first = blockIdx.y * n_chunks / gridDim.y;
  int n_mine = (blockIdx.y + 1) * n_chunks / gridDim.y - first;  // chunks
  Shared s(memory, n_mine);
  int teams = gridDim.x * (WARPS / TEAM), mine = team * gridDim.x + blockIdx.x;
  int count = mine < n_tiles ? (n_tiles - mine + teams - 1) / teams : 0;
  long long tile_bytes = (long long)n_chunks * KIND::BYTES;
  EvenRuns runs = {tiles + mine * tile_bytes + (long long)first * KIND::BYTES, n_mine, teams * tile_bytes};
  Weights ring(runs, member, TEAM, (count * n_mine - member + TEAM - 1) / TEAM, shared_address(s.units) + warp * DEPTH * KIND::BYTES,
               shared_address(s.barriers) + warp * Weights::BARRIER_BYTES);
  wait_for_inputs();
  for (int at = warp; at < n_mine * N; at += WARPS) {
    int row = at % N * 8 + lane / 4;
    keep_rows(s.numbers + at * NUMBER_BYTES, s.sums + at * SUM_BYTES, s.factors + at * FACTOR_BYTES,
              x + (long long)row * width, row < n_rows, (first + at / N) * COLUMNS, width, lane);
  }
  __syncthreads();
  u32 x_at = shared_address(s.numbers) + lane * KIND::LANE, sums_at = shared_address(s.sums) + lane * 8;
  const u8* factors_at = s.factors + lane % 4 * 8;
  int chunk = member;
  for (int i = 0; i < count; i++) {
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
    float4* partial = s.partial + (i % 2 * WARPS + team * TEAM) * (N * 32) + lane;  // two, so that one barrier is enough
#pragma unroll
    for (int n = 0; n < N; n++)
      partial[(member * N + n) * 32] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
    wait_for_team<TEAM * 32>(team);
#pragma unroll
    for (int n = 0; n < N; n++) {
      if (member != (i + n) % TEAM) continue;
      float total[4] = {};
#pragma unroll
      for (int m = 0; m < TEAM; m++) {
        float4 p = partial[(m * N + n) * 32];
        total[0] += p.x, total[1] += p.y, total[2] += p.z, total[3] += p.w;
      }
#pragma unroll
      for (int c = 0; c < 4; c++) {
        int row = n * 8 + lane % 4 * 2 + c % 2, column = (mine + i * teams) * ROWS + lane / 4 + c / 2 * 8;
        if (row >= n_rows || column >= n_out) continue;
        long long at = (long long)row * n_out + column;
        if (gridDim.y == 1) out[at] = to_activation(total[c]);
        else parts[(long long)blockIdx.y * n_rows * n_out + at] = total[c];
      }
    }
  }
}
