// daemons/ops/cuda/gemv_slabs.cu on the cpu: both kernels.
#include "emulated_ptx.h"
#include "gemv_slabs.cu"

static struct {
  const u8* tiles;
  const u16* x;
  u16* out;
  float4* parts;
  int n_rows, n_out, n_chunks, width, n_blocks, n_splits, out_stride;
} given;

extern "C" void run_gemv_slabs(int n_blocks, int n_splits, int seed, const u8* tiles, const u16* x, u16* out,
                              float4* parts, int n_rows, int n_out, int n_chunks, int width, int out_stride) {
  given = {tiles, x, out, parts, n_rows, n_out, n_chunks, width, n_blocks, n_splits, out_stride};
  run_grid(n_blocks, n_splits, 32 * WARPS, seed, [] {
    gemv_slabs(given.tiles, given.x, given.parts, given.n_rows, given.n_out, given.n_chunks, given.width);
  });
  run_grid((n_out + TILES_EACH * ROWS - 1) / (TILES_EACH * ROWS), 1, 32 * TILES_EACH * N, seed, [] {
    gemv_slabs_sums(given.parts, given.out, given.n_rows, given.n_out, given.n_chunks, given.n_blocks, given.n_splits,
                    given.out_stride);
  });
}
