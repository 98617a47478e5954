// daemons/ops/cuda/gemm.cu on the cpu: its three kernels.
#include "emulated_ptx.h"
#include "gemm.cu"

static struct {
  const u8* tiles;
  const u16* x;
  u8* stream;
  u16* out;
  float4* parts;
  int n_rows, n_out, n_chunks, width, n_blocks, out_stride;
} given;

extern "C" void run_gemm(int n_blocks, int seed, const u8* tiles, const u16* x, u8* stream, u16* out, float4* parts, int n_rows,
                         int n_out, int n_chunks, int width, int out_stride) {
  given = {tiles, x, stream, out, parts, n_rows, n_out, n_chunks, width, n_blocks, out_stride};
  int row_blocks = (n_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  run_grid(n_chunks, row_blocks * N, 32, seed, [] { gemm_rows(given.x, given.stream, given.n_rows, given.width); });
  run_grid(n_blocks, row_blocks, 32 * WARPS, seed, [] {
    gemm(given.tiles, given.stream, given.out, given.parts, given.n_rows, given.n_out, given.n_chunks, given.out_stride);
  });
  run_grid(slabs_of(n_out), row_blocks, 32 * WARPS, seed, [] {
    gemm_sums(given.parts, given.out, given.n_rows, given.n_out, given.n_chunks, given.n_blocks, given.out_stride);
  });
}
