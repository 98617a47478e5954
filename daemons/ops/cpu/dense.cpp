// The entry points for batch-invariant operations that daemons/ops/cpu/library.py calls.
#include "dense.h"
#include "recorded.h"

extern "C" {

// x [n][columns] times a matrix [n_out][columns], both float32, or both bfloat16 with a result of either.
long multiply_dense(const void* x, const void* weight, long is_float, long n, long columns, long n_out, void* out,
                    long out_is_float, long out_stride) {
  using Half = uint16_t;
  if (is_float)
    DenseProduct<float, float>{(const float*)x, (const float*)weight, (float*)out, n, columns, n_out, out_stride}.run();
  else if (out_is_float)
    DenseProduct<Half, float>{(const Half*)x, (const Half*)weight, (float*)out, n, columns, n_out, out_stride}.run();
  else
    DenseProduct<Half, Half>{(const Half*)x, (const Half*)weight, (Half*)out, n, columns, n_out, out_stride}.run();
  return 0;
}

// Scores [n_rows][stride] of a router, of which the first `n` of each row count, to probabilities [n_rows][n].
long gate_rows(const float* scores, long n_rows, long stride, long n, long is_sigmoid, float* out) {
  for (long r = 0; r < n_rows; r++) gate_row(scores + r * stride, n, is_sigmoid, out + r * n);
  return 0;
}

// Logits with a soft cap, in place of torch's tanh.
long softcap(const float* x, long n, float cap, float* out) {
  parallel_for(n > PARALLEL, (n + LANES - 1) / LANES, [=](long vector) {
    const long i = vector * LANES;
    const Mask m = lanes(i, n);
    store(out + i, m, soft_capped(load_numbers(x + i, m), cap));
  });
  return 0;
}

long log1p_of(const float* x, long n, float* out) {
  for (long i = 0; i < n; i++) out[i] = std::log1p(x[i]);
  return 0;
}

RECORDED(multiply_dense)
}
