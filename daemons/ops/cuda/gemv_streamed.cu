// Up to 8 TILES_OF_ROWS rows of activations times packed weights, for rows that do not fit beside the rings.
//
// A first kernel writes the rows as the lanes of a warp read them.  In the second one a warp keeps the sums of a tile of 16 rows of the
// matrix in registers while chunks of 256 columns pass: its weights through a ring of its own, the rows through a ring
// that it shares with the warps that take the same chunks of other tiles (a team).  A block has n_teams of them, which take the
// chunks in turn, and a cluster of CLUSTER blocks splits the columns.  Sums are added in the order of teams and blocks.
// Compiled with KIND, TILE_BYTES, WARPS of a block (at most), DEPTH of their rings, X_DEPTH of the teams' and CLUSTER.

#include "ring.cuh"
#include "rows.cuh"
#include "stream.cuh"

constexpr int ROWS = 16, N = TILES_OF_ROWS, X_BYTES = N * EIGHT_ROWS_BYTES, PART_BYTES = 512;

static_assert(KIND::BYTES == TILE_BYTES);
typedef Ring<DEPTH, KIND::BYTES, EvenRuns> Weights;

// Grid (chunks, N) of a warp.  x [n_rows, width], 16-byte aligned rows; stream [chunks] of X_BYTES: numbers [N], sums [N], factors [N].
extern "C" __global__ void __launch_bounds__(32) stream_rows(const u16* x, u8* stream, int n_rows, int width) {
  launch_dependents();
  wait_for_inputs();
  int lane = threadIdx.x, chunk = blockIdx.x, n = blockIdx.y, row = n * 8 + lane / 4;
  u8* to = stream + (long long)chunk * X_BYTES;
  keep_rows(to + n * NUMBER_BYTES, to + N * NUMBER_BYTES + n * SUM_BYTES, to + N * (NUMBER_BYTES + SUM_BYTES) + n * FACTOR_BYTES,
            x + (long long)row * width, row < n_rows, chunk * COLUMNS, width, lane);
}

DEVICE void add(float4& a, const float4& b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }

// A lane's sums of rows 8 n .. of x with a tile's 16 rows of the matrix
DEVICE void store(u16* out, const float4& total, int tile, int n, int n_rows, int n_out, int lane) {
  float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
  for (int c = 0; c < 4; c++) {
    int row = n * 8 + lane % 4 * 2 + c % 2, column = tile * ROWS + lane / 4 + c / 2 * 8;
    if (row < n_rows && column < n_out) out[(long long)row * n_out + column] = to_activation(values[c]);
  }
}

// Grid (blocks): of each CLUSTER the same tiles.  Blocks of n_teams n_side warps.  tiles [n_tiles, n_chunks] of KIND::BYTES;
// stream: what stream_rows wrote; out [n_rows, n_out].
extern "C" __global__ void
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        __launch_bounds__(WARPS * 32, 1)
            gemv_streamed(const u8* tiles, const u8* stream, u16* out, int n_rows, int n_out, int n_chunks, int n_side,
                          int n_teams) {
  extern __shared__ __align__(128) u8 memory[];
  launch_dependents();
  int warp = this_warp(), lane = threadIdx.x % 32, side = warp % n_side, team = warp / n_side;
  int rank = (int)blockIdx.x % CLUSTER, n_tiles = (n_out + ROWS - 1) / ROWS;
  int first = rank * n_chunks / CLUSTER, n_mine = ((rank + 1) * n_chunks / CLUSTER - first - team + n_teams - 1) / n_teams;
  int tile = (int)blockIdx.x / CLUSTER * n_side + side;
  u32 x_units = shared_address(memory), weight_units = x_units + n_teams * X_DEPTH * X_BYTES;
  u32 parts_at = weight_units + n_side * n_teams * DEPTH * KIND::BYTES;
  float4* parts = (float4*)(memory + (parts_at - x_units));  // [n_teams - 1, n_side, N, 32], then the cluster's
  float4* inbox = parts + (n_teams - 1) * n_side * N * 32;
  int n_pieces = n_side * N, n_kept = CLUSTER == 1 ? 0 : (n_pieces + CLUSTER - 1) / CLUSTER * CLUSTER;
  u32 weight_barriers = shared_address(inbox + n_kept * 32), x_barriers = weight_barriers + n_side * n_teams * DEPTH * 8;
  const u8 *x_first = stream + (long long)(first + team) * X_BYTES, *x_end = stream + (long long)(n_chunks + n_teams) * X_BYTES;
  Stream<X_BYTES, X_DEPTH> rows(x_first, x_first, x_end, n_teams, n_mine, x_units + team * X_DEPTH * X_BYTES,
                                x_barriers + team * X_DEPTH * 16);
  if (side == 0 && lane == 0) rows.init(n_side);
  EvenRuns run = {tiles + ((long long)min(tile, n_tiles - 1) * n_chunks + first) * KIND::BYTES, n_chunks, 0};
  Weights ring(run, team, n_teams, n_mine, weight_units + warp * DEPTH * KIND::BYTES, weight_barriers + warp * Weights::BARRIER_BYTES);
#if CLUSTER > 1
  arrive_in_cluster();
#endif
  wait_for_inputs();
  if (side == 0 && lane == 0) rows.fill();
  __syncthreads();
  float sum[N][4] = {};
#pragma unroll 1
  for (int i = 0; i < n_mine; i++) {
    KIND weights;
    weights.load(ring.wait(), lane);
    u32 at = rows.wait();
    Activations x[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
      uint2 factors = load_shared8(at + N * (NUMBER_BYTES + SUM_BYTES) + n * FACTOR_BYTES + lane % 4 * 8);
      x[n] = {at + n * NUMBER_BYTES + lane * KIND::LANE, at + N * NUMBER_BYTES + n * SUM_BYTES + lane * 8,
              {__uint_as_float(factors.x), __uint_as_float(factors.y)}};
    }
    weights.template add<Order<512, 4>>(sum, x);
    ring.release();
    if (lane == 0) rows.release(side == 0, i > 0);
    rows.advance();
  }
  if (n_teams > 1) {
    if (team > 0)
      for (int n = 0; n < N; n++)
        parts[(((team - 1) * n_side + side) * N + n) * 32 + lane] = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
    __syncthreads();
  }
#if CLUSTER > 1
  wait_for_cluster();
#endif
  if (team == 0) {
#pragma unroll
    for (int n = 0; n < N; n++) {
      int piece = side * N + n;
      float4 total = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
      for (int other = 1; other < n_teams; other++) add(total, parts[((other - 1) * n_pieces + piece) * 32 + lane]);
#if CLUSTER > 1
      store_in_cluster(shared_address(inbox + (piece / CLUSTER * CLUSTER + rank) * 32 + lane), piece % CLUSTER, total);
#else
      store(out, total, tile, n, n_rows, n_out, lane);
#endif
    }
  }
#if CLUSTER > 1
  arrive_in_cluster();
  wait_for_cluster();
  for (int piece = rank + warp * CLUSTER; piece < n_pieces; piece += n_side * n_teams * CLUSTER) {
    float4 total = inbox[piece / CLUSTER * CLUSTER * 32 + lane];
    for (int r = 1; r < CLUSTER; r++) add(total, inbox[(piece / CLUSTER * CLUSTER + r) * 32 + lane]);
    store(out, total, (int)blockIdx.x / CLUSTER * n_side + piece / N, piece % N, n_rows, n_out, lane);
  }
#endif
}
