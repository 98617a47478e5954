// Norms, rotary positions, activations and gates of rows of bfloat16; arithmetic is float32.
#pragma once
#include "vectors.h"

constexpr long PARALLEL = 1 << 15;  // numbers from which more than one thread pays

inline float rms_factor(Floats squares, long width, float eps) {
  return 1.f / std::sqrt(sum_of(squares) / float(width) + eps);
}

// RMSNorm of rows of `width` numbers; `heads` of them adjoin, then comes the next after `stride`; `weights` of them have
// weights of their own.  With `delta` the norm is that of x + delta, rounded and kept in `sum`.
struct RmsNorm {
  const uint16_t *x, *delta;
  const float* weight;
  uint16_t *sum, *out;
  float* out_float;
  long stride, heads, weights, width;
  float eps;

  void row(long r) const {
    const uint16_t* in = x + r / heads * stride + r % heads * width;
    const float* w = weight ? weight + r % weights * width : nullptr;
    Floats squares = splat(0.f);
    for (long i = 0; i < width; i += LANES) {
      const Mask m = lanes(i, width);
      Floats a = load_bfloat16(in + i, m);
      if (delta) {
        a = a + load_bfloat16(delta + r * width + i, m);
        store_bfloat16(sum + r * width + i, m, a);
        a = from_bfloat16(to_bfloat16(a));
      }
      squares = add_product(a, a, squares);
    }
    const Floats factor = splat(rms_factor(squares, width, eps));
    if (delta) in = sum + r * width;
    for (long i = 0; i < width; i += LANES) {
      const Mask m = lanes(i, width);
      Floats a = load_bfloat16(in + i, m) * factor;
      if (w) a = a * load(w + i, m);
      if (out_float)
        store(out_float + r * width + i, m, a);
      else
        store_bfloat16(out + r * width + i, m, a);
    }
  }
};

inline void rms_norm_float_row(const float* x, long width, const float* weight, float eps, uint16_t* out) {
  Floats squares = splat(0.f);
  for (long i = 0; i < width; i += LANES) {
    const Floats a = load(x + i, lanes(i, width));
    squares = add_product(a, a, squares);
  }
  const Floats factor = splat(rms_factor(squares, width, eps));
  for (long i = 0; i < width; i += LANES) {
    const Mask m = lanes(i, width);
    const Floats a = load(x + i, m) * factor;
    store_bfloat16(out + i, m, weight ? a * load(weight + i, m) : a);
  }
}

// RMSNorm of a head, then rotation of dims j and j + half by the tables of the row.
inline void norm_and_rotate(const uint16_t* x, const float* w, float eps, const float* cosine, const float* sine,
                            long half, long width, uint16_t* out) {
  Floats squares = splat(0.f);
  for (long i = 0; i < width; i += LANES) {
    const Floats a = load_bfloat16(x + i, lanes(i, width));
    squares = add_product(a, a, squares);
  }
  const Floats factor = splat(rms_factor(squares, width, eps));
  const auto normed = [&](long i, Mask m) {
    const Floats a = load_bfloat16(x + i, m) * factor;
    return w ? a * load(w + i, m) : a;
  };
  for (long i = 0; i < half; i += LANES) {
    const Mask m = lanes(i, half);
    const Floats a = normed(i, m), b = normed(half + i, m);
    const Floats c = load(cosine + i, m), s = load(sine + i, m);
    store_bfloat16(out + i, m, subtract_product(b, s, a * c));
    store_bfloat16(out + half + i, m, add_product(b, c, a * s));
  }
  for (long i = 2 * half; i < width; i += LANES) {
    const Mask m = lanes(i, width);
    store_bfloat16(out + i, m, normed(i, m));
  }
}

// (up + 1) times gate times sigmoid(1.702 gate), both within limits, which leave NaN as it is.
inline Floats clamped_swiglu(Floats gate, Floats up) {
  const Floats zero = splat(0.f), low = splat(-7.f);
  const auto at_most_7 = [=](Floats x) { return zero - maximum(low, zero - x); };
  gate = at_most_7(gate), up = maximum(low, at_most_7(up));
  return (up + splat(1.f)) * gate * sigmoid(gate * splat(1.702f));
}

// `activation`: its place in daemons.ops.basic.ACTIVATIONS.
inline void act_and_mul_row(const uint16_t* x, long width, long activation, uint16_t* out) {
  for (long i = 0; i < width; i += LANES) {
    const Mask m = lanes(i, width);
    const Floats gate = load_bfloat16(x + i, m), up = load_bfloat16(x + width + i, m);
    if (activation == 2) store_bfloat16(out + i, m, clamped_swiglu(gate, up));
    else store_bfloat16(out + i, m, (activation ? gelu(gate) : silu(gate)) * up);
  }
}

// x [heads][dim] times the sigmoid or softplus of `gate`, which has a number for each head or for each of x.
inline void output_gate_row(const uint16_t* x, const uint16_t* gate, long heads, long dim, bool by_head,
                            bool is_softplus, uint16_t* out) {
  for (long h = 0; h < heads; h++)
    for (long i = 0; i < dim; i += LANES) {
      const Mask m = lanes(i, dim);
      const long at = h * dim + i;
      Floats g = by_head ? splat(one_bfloat16(gate[h])) : load_bfloat16(gate + at, m);
      if (is_softplus) {
        alignas(64) float each[LANES];
        store(each, g);
        for (float& one : each) one = softplus(one);
        g = load(each);
      } else {
        g = sigmoid(g);
      }
      store_bfloat16(out + at, m, load_bfloat16(x + at, m) * g);
    }
}

// Convolution along slices of n rows of `width` numbers; `group` neighbours, a multiple of LANES, share a number of
// `delta`.  Tap o of row t is the row o before; before the first row of a slice there are zeros.
struct BlockConvolution {
  const uint16_t *x, *delta;
  const float* base;  // [taps][width]
  uint16_t* out;
  long n, width, taps, group, delta_stride;

  void row(long r) const {
    const long groups = width / group, n_taps = std::min(taps, r % n + 1);
    const uint16_t* own = delta + r * delta_stride;
    for (long first = 0; first < width; first += group, own++)
      for (long i = first; i < first + group; i += LANES) {
        Floats sum = splat(0.f);
        for (long tap = 0; tap < n_taps; tap++) {
          const Floats added = splat(one_bfloat16(own[tap * groups]));
          const Floats kernel = load(base + tap * width + i) + added;
          sum = add_product(kernel, load_bfloat16(x + (r - tap) * width + i), sum);
        }
        store_bfloat16(out + r * width + i, sum);
      }
  }
};
