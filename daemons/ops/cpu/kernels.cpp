// The entry points that daemons/ops/cpu/library.py calls.
#include <vector>

#include "gemv.h"
#include "repack.h"

#define FOR_KIND(kind, call)                                                       \
  switch (kind) {                                                                  \
    case 2: { using T = Q4_0; call; break; }                                       \
    case 3: { using T = Q4_1; call; break; }                                       \
    case 6: { using T = Q5_0; call; break; }                                       \
    case 7: { using T = Q5_1; call; break; }                                       \
    case 8: { using T = Q8_0; call; break; }                                       \
    case 12: { using T = Q4_K; call; break; }                                      \
    case 13: { using T = Q5_K; call; break; }                                      \
    case 14: { using T = Q6_K; call; break; }                                      \
    case 20: { using T = IQ4_NL; call; break; }                                    \
    case 23: { using T = IQ4_XS; call; break; }                                    \
    default: return -1;                                                            \
  }

// Rows of a matrix whose results are columns of one output.
struct Matrix {
  long kind, n_rows;  // GGML's number of the type
  const uint8_t* tiles;
};

extern "C" {

long tile_bytes(long kind) {
  FOR_KIND(kind, return T::BYTES)
  return -1;
}

long pack(long kind, const uint8_t* raw, long n_rows, long n_blocks, long row_bytes, uint8_t* tiles) {
  FOR_KIND(kind, repack<T>(raw, n_rows, n_blocks, row_bytes, tiles))
  return 0;
}

long dequantise(long kind, const uint8_t* tiles, long n_columns, long first, long n_rows, uint16_t* out) {
  FOR_KIND(kind, dequantise_strips<T>(tiles, n_columns, first / 16, n_rows, out))
  return 0;
}

// x bfloat16 [n][n_columns] times the matrices -> out [n][sum of their rows].
long multiply(const Matrix* matrices, long n_matrices, const uint16_t* x, long n, long n_columns, uint16_t* out,
          long out_stride) {
  static thread_local std::vector<float> memory;
  memory.resize(n * (n_columns / SUM));
  float* sums = memory.data();
  long n_strips = 0;
  for (long i = 0; i < n_matrices; i++) n_strips += (matrices[i].n_rows + 15) / 16;
  sum_columns(x, n * n_columns, sums);
  const Activations a{x, sums, n, n_columns};
#pragma omp parallel if (n_strips > 8)
  {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
    long begin = n_strips * thread / threads, end = n_strips * (thread + 1) / threads, column = 0;
    for (long i = 0; i < n_matrices; i++) {
      const Matrix& w = matrices[i];
      const long strips = (w.n_rows + 15) / 16, stop = end < strips ? end : strips;
      const auto run = [&]() -> long {
        FOR_KIND(w.kind, multiply_strips<T>(w.tiles, a, w.n_rows, begin, stop, out + column, out_stride))
        return 0;
      };
      if (begin < stop) run();
      begin = begin > strips ? begin - strips : 0, end -= strips, column += w.n_rows;
    }
  }
  return 0;
}
}
