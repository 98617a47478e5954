// Rows of activations times packed weights of experts: each (token, expert) pair a row, pairs of an expert together.
//
// A first kernel orders the pairs by expert.  In the second one a block keeps up to 8 EIGHTS rows of an expert in shared memory, in the
// order in which the lanes of a warp read them; its warps take tiles of 16 rows of the matrix in turn, each from a ring of its own,
// and need no other warp.  Compiled with KIND, TILE_BYTES, WARPS of a block, DEPTH of their rings and EIGHTS.

#include "ring.cuh"
#include "rows.cuh"

constexpr int ROWS = 16, ORDER_THREADS = 1024, CHUNK_BYTES = NUMBER_BYTES + SUM_BYTES + FACTOR_BYTES;  // of eight rows

static_assert(KIND::BYTES == TILE_BYTES);
typedef Ring<DEPTH, KIND::BYTES, EvenRuns> Weights;

// One block.  experts [n_pairs]; pairs [n_pairs]: their numbers by expert, in any order within one; offsets [n_experts + 1]: where each expert's
// begin.  Shared memory: 4 (2 ORDER_THREADS) bytes; n_experts <= ORDER_THREADS.
extern "C" __global__ void __launch_bounds__(ORDER_THREADS)
    order_pairs(const long long* experts, int* pairs, int* offsets, int n_pairs, int n_experts) {
  extern __shared__ __align__(128) u8 memory[];
  int* sums = (int*)memory;  // [2, ORDER_THREADS]
  launch_dependents();
  int i = threadIdx.x;
  sums[i] = 0;
  wait_for_inputs();
  __syncthreads();
  for (int p = i; p < n_pairs; p += ORDER_THREADS) add_shared(sums + experts[p], 1);
  __syncthreads();
  int mine = sums[i], from = 0;
  for (int step = 1; step < ORDER_THREADS; step *= 2) {  // sums up to each expert, from one half of the memory to the other
    sums[(from ^ ORDER_THREADS) + i] = sums[from + i] + (i >= step ? sums[from + i - step] : 0);
    from ^= ORDER_THREADS;
    __syncthreads();
  }
  int begin = sums[from + i] - mine;
  if (i <= n_experts) offsets[i] = i < n_experts ? begin : n_pairs;
  sums[(from ^ ORDER_THREADS) + i] = begin;
  __syncthreads();
  for (int p = i; p < n_pairs; p += ORDER_THREADS) pairs[add_shared(sums + (from ^ ORDER_THREADS) + experts[p], 1)] = p;
}

// A block's tiles times N eights of rows that lie in shared memory at `rows`.
template <int N>
DEVICE void multiply(Weights& ring, const u8* rows, const int* pairs, int n_rows, u16* out, int first_tile, int step, int n_tiles, int n_out,
                     int n_chunks, int lane) {
  u32 at = shared_address(rows);
  for (int tile = first_tile; tile < n_tiles; tile += step) {
    float sum[N][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < n_chunks; chunk++) {
      Activations x[N];
#pragma unroll
      for (int n = 0; n < N; n++) {
        u32 here = at + (chunk * N + n) * CHUNK_BYTES;
        uint2 factors = load_shared8(here + NUMBER_BYTES + SUM_BYTES + lane % 4 * 8);
        x[n] = {here + lane * KIND::LANE, here + NUMBER_BYTES + lane * 8, {__uint_as_float(factors.x), __uint_as_float(factors.y)}};
      }
      KIND weights;
      weights.load(ring.wait(), lane);
      weights.template add<Order<512, 4>>(sum, x);
      ring.release();
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        int row = n * 8 + lane % 4 * 2 + c % 2, column = tile * ROWS + lane / 4 + c / 2 * 8;
        if (row < n_rows && column < n_out) out[(long long)pairs[row] * n_out + column] = to_activation(sum[n][c]);
      }
  }
}

// Grid (blocks of an expert, experts).  tiles [experts, n_tiles, n_chunks] of KIND::BYTES; x [rows, width], 16-byte aligned
// rows; pairs and offsets from order_pairs; out [pairs, n_out]: pair p is row p / pairs_per_row of x times its expert's matrix.
extern "C" __global__ void __launch_bounds__(WARPS * 32, EIGHTS == 1 ? 2 : 1)
    gemv_experts(const u8* tiles, const u16* x, const int* pairs, const int* offsets, u16* out, int n_out, int n_chunks, int width,
                 int pairs_per_row) {
  extern __shared__ __align__(128) u8 memory[];
  launch_dependents();
  int warp = this_warp(), lane = threadIdx.x % 32, expert = blockIdx.y, n_tiles = (n_out + ROWS - 1) / ROWS;
  int first_tile = warp * (int)gridDim.x + (int)blockIdx.x, step = WARPS * (int)gridDim.x;
  int n_units = first_tile < n_tiles ? (n_tiles - first_tile + step - 1) / step * n_chunks : 0;
  u8* barriers = memory + WARPS * DEPTH * KIND::BYTES;
  u8* rows = barriers + WARPS * DEPTH * 8;  // [n_chunks, N] of CHUNK_BYTES
  long long matrix_bytes = (long long)n_tiles * n_chunks * KIND::BYTES, tile_bytes = (long long)n_chunks * KIND::BYTES;
  wait_for_inputs();
  int begin = offsets[expert], n_rows = offsets[expert + 1] - begin;
  if (n_rows == 0) return;
  EvenRuns runs = {tiles + expert * matrix_bytes + first_tile * tile_bytes, n_chunks, step * tile_bytes};
  Weights ring(runs, 0, 1, n_units, shared_address(memory) + warp * DEPTH * KIND::BYTES,
               shared_address(barriers) + warp * Weights::BARRIER_BYTES);
  pairs += begin;
  for (int first = 0; first < n_rows; first += 8 * EIGHTS, pairs += 8 * EIGHTS) {
    if (first > 0) {
      __syncthreads();
      ring.restart(n_units);
    }
    int n = min(n_rows - first, 8 * EIGHTS), eights = (n + 7) / 8;
    for (int at = warp; at < n_chunks * eights; at += WARPS) {
      int row = at % eights * 8 + lane / 4;
      bool exists = row < n;
      u8* to = rows + at * CHUNK_BYTES;
      keep_rows(to, to + NUMBER_BYTES, to + NUMBER_BYTES + SUM_BYTES, x + (exists ? (long long)(pairs[row] / pairs_per_row) * width : 0),
                exists, at / eights * COLUMNS, width, lane);
    }
    __syncthreads();
    if (EIGHTS == 1 || eights == 1) multiply<1>(ring, rows, pairs, n, out, first_tile, step, n_tiles, n_out, n_chunks, lane);
    else if (EIGHTS == 2 || eights == 2) multiply<EIGHTS >= 2 ? 2 : 1>(ring, rows, pairs, n, out, first_tile, step, n_tiles, n_out, n_chunks, lane);
    else if (EIGHTS == 3 || eights == 3) multiply<EIGHTS >= 3 ? 3 : 1>(ring, rows, pairs, n, out, first_tile, step, n_tiles, n_out, n_chunks, lane);
    else multiply<EIGHTS >= 4 ? 4 : 1>(ring, rows, pairs, n, out, first_tile, step, n_tiles, n_out, n_chunks, lane);
  }
}
