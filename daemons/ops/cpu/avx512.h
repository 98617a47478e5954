// Sixteen floats at a time, for cpus with AVX-512 and its bfloat16 products.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

using Floats = __m512;
constexpr int LANES = 16;

// Memory of which each vector is one cache line: those across two take twice the time.
struct alignas(64) Line {
  float x[LANES];
};

inline Floats splat(float x) { return _mm512_set1_ps(x); }

// A number that several vectors are multiplied by: compilers would load it for each of them.
inline Floats in_register(float x) {
  Floats out = splat(x);
  asm("" : "+v"(out));
  return out;
}

inline Floats from_bfloat16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
// Of pairs of bfloat16 in lanes of 32 bits.
inline Floats lower_half(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline Floats upper_half(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
}
inline Floats load_bfloat16(const uint16_t* x) { return from_bfloat16(_mm256_loadu_si256((const __m256i*)x)); }
inline __m256i to_bfloat16(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline void store_bfloat16(uint16_t* out, Floats x) { _mm256_storeu_si256((__m256i*)out, to_bfloat16(x)); }

inline Floats load_half(const void* x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x)); }

// Lanes of a row of n numbers that are left from i on, and these numbers.  Whole vectors are stored without a mask: a
// load waits for a masked store until that has reached the cache.
constexpr __mmask16 ALL = 0xffff;
inline __mmask16 lanes(long i, long n) { return n - i >= LANES ? ALL : __mmask16((1 << (n - i)) - 1); }
inline Floats load_bfloat16(const uint16_t* x, __mmask16 mask) {
  if (__builtin_expect(mask == ALL, true)) return load_bfloat16(x);
  return from_bfloat16(_mm256_maskz_loadu_epi16(mask, x));
}
inline void store_bfloat16(uint16_t* out, __mmask16 mask, Floats x) {
  if (__builtin_expect(mask == ALL, true)) return store_bfloat16(out, x);
  _mm256_mask_storeu_epi16(out, mask, to_bfloat16(x));
}

inline float one_bfloat16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// sum + x times a pair of numbers.  Compilers load the pair by an instruction of its own.
inline __attribute__((always_inline)) Floats multiply_add(Floats sum, __m512bh x, const uint16_t* pair) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(*(const uint16_t(*)[2])pair));
  return sum;
}

// e^x to 2 units in the last place: 2^n times a polynomial of the rest (Cephes' expf); below -104 it is 0.
inline Floats exponential(Floats x) {
  x = _mm512_max_ps(_mm512_min_ps(x, splat(89.f)), splat(-104.f));
  const Floats n = _mm512_roundscale_ps(_mm512_mul_ps(x, splat(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  Floats r = _mm512_fnmadd_ps(n, splat(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, splat(-2.12194440e-4f), r);
  Floats p = splat(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, splat(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, splat(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, splat(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, splat(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, splat(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, splat(1.f)));
  return _mm512_scalef_ps(p, n);
}

inline Floats sigmoid(Floats x) {
  return _mm512_div_ps(splat(1.f), _mm512_add_ps(splat(1.f), exponential(_mm512_sub_ps(splat(0.f), x))));
}
inline Floats silu(Floats x) { return _mm512_mul_ps(x, sigmoid(x)); }
// GELU's tanh form: x sigmoid(2 y)
inline Floats gelu(Floats x) {
  const Floats cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  const Floats y = _mm512_mul_ps(splat(1.5957691216f), _mm512_fmadd_ps(splat(0.044715f), cube, x));
  return _mm512_mul_ps(x, sigmoid(y));
}
inline float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

// Transposes 16 x 16 words of 32 bits.
inline void transpose(__m512i* r) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 16
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 8)
#pragma GCC unroll 16
    for (int j = 0; j < 4; j++) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
    }
#pragma GCC unroll 16
  for (int j = 0; j < 8; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}
