// daemons/ops/cuda/gemv.cu on the cpu.
#include "emulated_ptx.h"
#include "gemv.cu"

static struct {
  const u8* tiles;
  const u16* x;
  const long long* experts;
  u16* out;
  int n_out, n_chunks, width, pairs_per_row, round;
} given;

extern "C" void run_gemv(int grid_x, int grid_y, int n_threads, int seed, const u8* tiles, const u16* x,
                         const long long* experts, u16* out, int n_out, int n_chunks, int width, int pairs_per_row, int round) {
  given = {tiles, x, experts, out, n_out, n_chunks, width, pairs_per_row, round};
  run_grid(grid_x, grid_y, n_threads, seed, [] {
    gemv(given.tiles, given.x, given.experts, given.out, given.n_out, given.n_chunks, given.width,
         given.pairs_per_row, given.round);
  });
}
