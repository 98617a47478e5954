// daemons/ops/cuda/gemv_rows.cu on the cpu.
#include "emulated_ptx.h"
#include "gemv_rows.cu"

static struct {
  const u8* tiles;
  const u16* x;
  u16* out;
  float* parts;
  int n_rows, n_out, n_chunks, width;
} given;

extern "C" void run_gemv_rows(int n_blocks, int n_splits, int n_threads, int seed, const u8* tiles, const u16* x, u16* out,
                              float* parts, int n_rows, int n_out, int n_chunks, int width) {
  given = {tiles, x, out, parts, n_rows, n_out, n_chunks, width};
  run_grid(n_blocks, n_splits, n_threads, seed, [] {
    gemv_rows(given.tiles, given.x, given.out, given.parts, given.n_rows, given.n_out, given.n_chunks, given.width);
  });
}
