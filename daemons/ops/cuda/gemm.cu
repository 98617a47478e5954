// Blocks of 8 TILES_OF_ROWS rows of activations times packed weights, for 33 rows and more (sm_90a).
//
// A first kernel writes the rows as matrix units read them.  In the second one the warps of a block take tiles side by side, a slab,
// chunk after chunk, each tile through the warp's own ring, the rows through a ring that they share.  The chunks of all slabs are one
// line, of which every block gets an equal piece.  A block stores the results of slabs that lie in its piece whole; of those that
// begin before it or end behind it, it leaves parts, which a third kernel adds, in order.  The grid's second dimension are blocks of
// rows: they read the same pieces at the same time, so that the weights come from memory once.
// Compiled with KIND, TILE_BYTES, WARPS of a block, DEPTH of their rings, X_DEPTH of the rows'.

#include "line.cuh"
#include "stream.cuh"
#include "wide.cuh"

constexpr int ROWS = 16, N = TILES_OF_ROWS, BLOCK_ROWS = 8 * N, X_BYTES = N * EIGHT_ROWS_BYTES;
constexpr int PART = WARPS * N * 32;  // its numbers, four each

static_assert(KIND::BYTES == TILE_BYTES);

// Grid (chunks, eights of rows, N of each block) of a warp.  x [n_rows, width], 16-byte aligned rows; stream [blocks of rows, chunks]
// of X_BYTES: numbers [N], sums [N], factors [N].
extern "C" __global__ void __launch_bounds__(32) gemm_rows(const u16* x, u8* stream, int n_rows, int width) {
  launch_dependents();
  wait_for_inputs();
  int lane = threadIdx.x, chunk = blockIdx.x, n = blockIdx.y % N, row = blockIdx.y * 8 + lane / 4;
  u8* to = stream + ((long long)(blockIdx.y / N) * gridDim.x + chunk) * X_BYTES;
  keep_rows<MatrixOrder>(to + n * NUMBER_BYTES, to + N * NUMBER_BYTES + n * SUM_BYTES,
                         to + N * (NUMBER_BYTES + SUM_BYTES) + n * FACTOR_BYTES, x + (long long)row * width, row < n_rows,
                         chunk * COLUMNS, width, lane);
}

// A lane's sums of rows 8 n .. of a block with a tile's 16 rows of the matrix
DEVICE void store(u16* out, const float4& total, int tile, int n, int n_rows, int n_out, int out_stride, int lane) {
  float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
  for (int c = 0; c < 4; c++) {
    int row = blockIdx.y * BLOCK_ROWS + n * 8 + lane % 4 * 2 + c % 2, column = tile * ROWS + lane / 4 + c / 2 * 8;
    if (row < n_rows && column < n_out) out[(long long)row * out_stride + column] = to_activation(values[c]);
  }
}

DEVICE int slabs_of(int n_out) { return ((n_out + ROWS - 1) / ROWS + WARPS - 1) / WARPS; }

// Grid (blocks, blocks of rows).  tiles [n_tiles, n_chunks] of KIND::BYTES; stream: what gemm_rows wrote; out [n_rows, n_out] with
// out_stride from row to row; parts float32 [blocks of rows, blocks, 2, WARPS, N, 32, 4]: a block's first slab, and its last one.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    gemm(const u8* tiles, const u8* stream, u16* out, float4* parts, int n_rows, int n_out, int n_chunks, int out_stride) {
  extern __shared__ __align__(128) u8 memory[];
  launch_dependents();
  int warp = this_warp(), lane = threadIdx.x % 32, n_tiles = (n_out + ROWS - 1) / ROWS, n_slabs = slabs_of(n_out);
  Line line = {(u32)(n_slabs * n_chunks), gridDim.x};
  int begin = line.begin(blockIdx.x), end = line.begin(blockIdx.x + 1), slab = begin / n_chunks, tile = slab * WARPS + warp;
  u32 x_units = shared_address(memory), weight_units = x_units + X_DEPTH * X_BYTES;
  u32 x_barriers = weight_units + WARPS * DEPTH * KIND::BYTES, weight_barriers = x_barriers + X_DEPTH * 16;
  const u8* x_first = stream + (long long)blockIdx.y * n_chunks * X_BYTES;
  Stream<X_BYTES, X_DEPTH> rows(x_first + (long long)(begin % n_chunks) * X_BYTES, x_first, x_first + (long long)n_chunks * X_BYTES, 1,
                                end - begin, x_units, x_barriers);
  if (warp == 0 && lane == 0) rows.init(WARPS);
  // behind the matrix there is nothing to read: its last slab may be narrower
  bool inside = (n_slabs - 1) * WARPS + warp < n_tiles;
  int left = inside ? end - begin : min(end, (n_slabs - 1) * n_chunks) - begin;
  long long tile_bytes = (long long)n_chunks * KIND::BYTES;
  const u8* from = tiles + min(tile, n_tiles - 1) * tile_bytes + (long long)(begin % n_chunks) * KIND::BYTES;
  SlabRing ring(from, (WARPS - 1) * tile_bytes, n_chunks - begin % n_chunks, n_chunks, left,
                weight_units + warp * DEPTH * KIND::BYTES, weight_barriers + warp * DEPTH * 8, lane);
  wait_for_inputs();
  if (warp == 0 && lane == 0) rows.fill();
  __syncthreads();
  for (int unit = begin; unit < end; slab++) {
    int from = slab * n_chunks, behind = min(end, from + n_chunks), first = unit;
    bool idle = !inside && slab == n_slabs - 1;  // its products are started, as the other warps of four wait for them
    float sum[N][4] = {};
#pragma unroll 1
    for (; unit < behind; unit++) {
      KIND weights;
      weights.load(idle ? ring.units : ring.wait(), lane);
      if (!idle) ring.release(lane, weights.loaded());
      u32 at = rows.wait();
      WideCursor<N> chunk(at, at + N * NUMBER_BYTES, at + N * (NUMBER_BYTES + SUM_BYTES), lane);
      chunk.add(sum, weights);
      __syncwarp();
      if (lane == 0) rows.release(warp == 0, unit > begin);
      rows.advance();
    }
    bool whole = first == from && behind == from + n_chunks;
    float4* to = parts + (((long long)blockIdx.y * gridDim.x + blockIdx.x) * 2 + (first > begin)) * PART + warp * (N * 32) + lane;
#pragma unroll
    for (int n = 0; n < N; n++) {
      float4 total = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
      if (whole) store(out, total, slab * WARPS + warp, n, n_rows, n_out, out_stride, lane);
      else to[n * 32] = total;
    }
  }
}

// Grid (slabs, blocks of rows) of the same warps, but for those slabs that a block stored: results from parts.  n_blocks: of the kernel
// above.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    gemm_sums(const float4* parts, u16* out, int n_rows, int n_out, int n_chunks, int n_blocks, int out_stride) {
  launch_dependents();
  int warp = this_warp(), lane = threadIdx.x % 32, slab = blockIdx.x;
  Line line = {(u32)(slabs_of(n_out) * n_chunks), (u32)n_blocks};
  int first = line.block_of(slab * n_chunks), last = line.block_of((slab + 1) * n_chunks - 1);
  wait_for_inputs();
  if (first == last) return;
  const float4* mine = parts + (long long)blockIdx.y * n_blocks * 2 * PART + warp * (N * 32) + lane;
  float4 total[N] = {};
#pragma unroll 1
  for (int block = first; block <= last; block++) {
    // the slab is the first one of its piece if that begins in it
    const float4* part = mine + (block * 2LL + (line.begin(block) < slab * n_chunks)) * PART;
#pragma unroll
    for (int n = 0; n < N; n++) {
      float4 more = part[n * 32];
      total[n].x += more.x, total[n].y += more.y, total[n].z += more.z, total[n].w += more.w;
    }
  }
#pragma unroll
  for (int n = 0; n < N; n++) store(out, total[n], slab * WARPS + warp, n, n_rows, n_out, out_stride, lane);
}
