// Gated delta net of few tokens per slice: convolution, gates, recurrence, gated norm.  daemons/ops/delta_rule.py has
// the formulas.  State and arithmetic are float32.
//
// Several tokens give the bits of single steps: each token's state is computed from the one before by the same code.
#pragma once
#include "rows.h"

struct DeltaNet {
  const uint16_t* y;  // [slices n] rows of q, k, v (the channels), z, alpha, beta
  float *windows, *states;  // pools [rows][width - 1][channels], [rows][n_value][dim][dim]
  const int64_t *ids, *kept;  // [slices] row to start from; [slices][n] row for the state after each token, or -1
  const float *conv_weight, *decay_rates, *dt_bias, *norm_weight;
  uint16_t* out;  // [slices n][n_value dim]
  float* mixed;   // [slices n][channels], scratch, which the entry point allocates
  long y_stride, slices, n, n_key, n_value, dim, width;
  float norm_eps;

  long channels() const { return (2 * n_key + n_value) * dim; }

  // The convolution of 16 channels of a slice, and its silu.
  void convolve(long slice, long channel) const {
    const long c = channels(), left = width - 1;
    Floats window[8 + 16];
    const float* before = windows + ids[slice] * left * c + channel;
    for (long i = 0; i < left; i++) window[i] = _mm512_loadu_ps(before + i * c);
    for (long token = 0; token < n; token++) {
      const long row = slice * n + token;
      window[left + token] = load_bfloat16(y + row * y_stride + channel);
      Floats sum = splat(0.f);
      for (long j = 0; j < width; j++)
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(conv_weight + j * c + channel), window[token + j], sum);
      _mm512_storeu_ps(mixed + row * c + channel, silu(sum));
      const int64_t target = kept[row];
      if (target < 0) continue;
      for (long i = 0; i < left; i++)
        _mm512_storeu_ps(windows + (target * left + i) * c + channel, window[token + 1 + i]);
    }
  }

  // A query or key times `scale` over its l2 norm.
  void normalise(const float* x, float scale, float* result) const {
    Floats squares = splat(0.f);
    for (long i = 0; i < dim; i += LANES) {
      const Floats a = _mm512_loadu_ps(x + i);
      squares = _mm512_fmadd_ps(a, a, squares);
    }
    const float l2 = 1.f / std::sqrt(float(dim));
    const Floats factor = splat(rms_factor(squares, dim, 1e-6f / float(dim)) * l2 * scale);
    for (long i = 0; i < dim; i += LANES) _mm512_storeu_ps(result + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
  }

  // All tokens of a slice for one value head of 16 V dims.  `scratch`: a state that is not kept.
  template <int V>
  void recur(long slice, long head, float* scratch) const {
    constexpr long D = 16 * V;
    const long c = channels(), key = head % n_key, size = D * D;
    const float* from = states + (ids[slice] * n_value + head) * size;
    alignas(64) float q[D], k[D];
    for (long token = 0; token < n; token++) {
      const long row = slice * n + token;
      const float* m = mixed + row * c;
      normalise(m + key * D, 1.f / std::sqrt(float(D)), q);
      normalise(m + (n_key + key) * D, 1.f, k);
      const uint16_t *z = y + row * y_stride + c + head * D, *gates = y + row * y_stride + c + n_value * D + head;
      const float g = softplus(one_bfloat16(gates[0]) + dt_bias[head]) * decay_rates[head];
      const Floats decay = splat(std::exp(g)), beta = splat(sigmoid(one_bfloat16(gates[n_value])));
      float* to = kept[row] < 0 ? scratch : states + (kept[row] * n_value + head) * size;
      Floats error[V], o[V];
      for (int v = 0; v < V; v++) error[v] = o[v] = splat(0.f);
      for (long i = 0; i < D; i++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
          error[v] = _mm512_fmadd_ps(splat(k[i]), _mm512_loadu_ps(from + i * D + 16 * v), error[v]);
      for (int v = 0; v < V; v++) {
        const Floats value = _mm512_loadu_ps(m + 2 * n_key * D + head * D + 16 * v);
        error[v] = _mm512_mul_ps(_mm512_fnmadd_ps(decay, error[v], value), beta);
      }
      for (long i = 0; i < D; i++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
          const Floats s = _mm512_mul_ps(_mm512_loadu_ps(from + i * D + 16 * v), decay);
          const Floats next = _mm512_fmadd_ps(splat(k[i]), error[v], s);
          _mm512_storeu_ps(to + i * D + 16 * v, next);
          o[v] = _mm512_fmadd_ps(splat(q[i]), next, o[v]);
        }
      Floats squares = splat(0.f);
      for (int v = 0; v < V; v++) squares = _mm512_fmadd_ps(o[v], o[v], squares);
      const Floats factor = splat(rms_factor(squares, D, norm_eps));
      for (int v = 0; v < V; v++) {
        const Floats normed = _mm512_mul_ps(_mm512_mul_ps(o[v], factor), _mm512_loadu_ps(norm_weight + 16 * v));
        const Floats gate = silu(load_bfloat16(z + 16 * v));
        store_bfloat16(out + (row * n_value + head) * D + 16 * v, _mm512_mul_ps(normed, gate));
      }
      from = to;
    }
  }

  void recur(long slice, long head, float* scratch) const {
    switch (dim) {
      case 16: return recur<1>(slice, head, scratch);
      case 32: return recur<2>(slice, head, scratch);
      case 64: return recur<4>(slice, head, scratch);
      case 128: return recur<8>(slice, head, scratch);
    }
  }
};
