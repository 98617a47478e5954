// Sixteen numbers at a time, of 32 bits each: one vector with AVX-512 (avx512.h), two with AVX2 (avx2.h), which give the
// same bits but for bfloat16 numbers below the least normal one: AVX-512 takes them as zeros.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

constexpr int LANES = 16;

// Memory of which each vector is one cache line: those across two take twice the time.
struct alignas(64) Line {
  float x[LANES];
};

// The first lanes of a vector, a bit each.
using Mask = uint16_t;
constexpr Mask ALL = 0xffff;
// Those of a row of n numbers that are left from i on.
inline Mask lanes(long i, long n) { return n - i >= LANES ? ALL : Mask((1 << (n - i)) - 1); }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512BF16__)
#define WIDE 1
#include "avx512.h"
#else
#define WIDE 0
#include "avx2.h"
#endif

// Whole vectors are loaded and stored without a mask: a load waits for a masked store until that has reached the cache.
inline Floats load_bfloat16(const uint16_t* x, Mask mask) {
  if (__builtin_expect(mask == ALL, true)) return load_bfloat16(x);
  return load_some_bfloat16(x, mask);
}
inline void store_bfloat16(uint16_t* out, Mask mask, Floats x) {
  if (__builtin_expect(mask == ALL, true)) return store_bfloat16(out, x);
  store_some_bfloat16(out, mask, x);
}

inline float one_bfloat16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// e^x to 2 units in the last place: 2^n times a polynomial of the rest (Cephes' expf); below -104 it is 0.
inline Floats exponential(Floats x) {
  x = maximum(minimum(x, splat(89.f)), splat(-104.f));
  const Floats n = rounded(x * splat(1.44269504f));
  Floats r = subtract_product(n, splat(0.693359375f), x);
  r = subtract_product(n, splat(-2.12194440e-4f), r);
  Floats p = splat(1.9875691500e-4f);
  p = add_product(p, r, splat(1.3981999507e-3f));
  p = add_product(p, r, splat(8.3334519073e-3f));
  p = add_product(p, r, splat(4.1665795894e-2f));
  p = add_product(p, r, splat(1.6666665459e-1f));
  p = add_product(p, r, splat(5.0000001201e-1f));
  p = add_product(r * r, p, r + splat(1.f));
  return times_power_of_two(p, n);
}

inline Floats sigmoid(Floats x) { return splat(1.f) / (splat(1.f) + exponential(splat(0.f) - x)); }
inline Floats silu(Floats x) { return x * sigmoid(x); }
// GELU's tanh form: x sigmoid(2 y)
inline Floats gelu(Floats x) {
  const Floats cube = x * x * x;
  const Floats y = splat(1.5957691216f) * add_product(splat(0.044715f), cube, x);
  return x * sigmoid(y);
}
inline float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }
