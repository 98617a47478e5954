// Vectors of 512 bits, for cpus with AVX-512 and its bfloat16 products.
#pragma once

using Floats = __m512;  // of which + - * / are the compiler's
using Ints = __m512i;   // 16 integers, 32 of 16 bits or 64 bytes

inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints no_ints() { return _mm512_setzero_si512(); }

// A number that several vectors are multiplied by: compilers would load it for each of them.
inline Floats in_register(float x) {
  Floats out = splat(x);
  asm("" : "+v"(out));
  return out;
}

// ---- memory

inline Floats load(const float* x) { return _mm512_loadu_ps(x); }
inline Floats load(const float* x, Mask mask) { return _mm512_maskz_loadu_ps(mask, x); }
inline void store(float* out, Floats x) { _mm512_storeu_ps(out, x); }
inline void store(float* out, Mask mask, Floats x) { _mm512_mask_storeu_ps(out, mask, x); }
inline void stream(float* out, Floats x) { _mm512_stream_ps(out, x); }  // past the cache
inline Ints load_ints(const void* x) { return _mm512_loadu_si512(x); }
inline void store_ints(void* out, Ints x) { _mm512_storeu_si512(out, x); }

inline Floats from_bfloat16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline __m256i to_bfloat16(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline Floats load_bfloat16(const uint16_t* x) { return from_bfloat16(_mm256_loadu_si256((const __m256i*)x)); }
inline Floats load_some_bfloat16(const uint16_t* x, Mask mask) {
  return from_bfloat16(_mm256_maskz_loadu_epi16(mask, x));
}
inline void store_bfloat16(uint16_t* out, Floats x) { _mm256_storeu_si256((__m256i*)out, to_bfloat16(x)); }
inline void store_some_bfloat16(uint16_t* out, Mask mask, Floats x) {
  _mm256_mask_storeu_epi16(out, mask, to_bfloat16(x));
}

inline Floats load_half(const void* x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x)); }
inline Floats load_half(const void* x, Mask mask) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, x)); }
inline void store_half(void* out, Mask mask, Floats x) {
  _mm256_mask_storeu_epi16(out, mask, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// 16 bytes as integers, and back.
inline Ints load_signed_bytes(const void* x) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x)); }
inline Ints load_signed_bytes(const void* x, Mask mask) {
  return _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, x));
}
inline Ints load_unsigned_bytes(const void* x) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)x)); }
inline void store_bytes(void* out, Ints x) { _mm_storeu_si128((__m128i*)out, _mm512_cvtsepi32_epi8(x)); }
// Pairs of bytes, one from `x` and one from `y`, as 16-bit integers.
inline Ints load_pairs_of_bytes(const void* x, const void* y) {
  const __m128i one = _mm_loadu_si128((const __m128i*)x), next = _mm_loadu_si128((const __m128i*)y);
  return _mm512_cvtepu8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(one, next), _mm_unpacklo_epi8(one, next)));
}

// ---- floats

inline Floats add_product(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
inline Floats subtract_product(Floats a, Floats b, Floats sum) { return _mm512_fnmadd_ps(a, b, sum); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b if one is NaN
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats absolute(Floats x) { return _mm512_abs_ps(x); }
inline Floats rounded(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
inline Floats times_power_of_two(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }
inline Mask where_larger(Floats x, Floats y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ); }
// x in the lanes of the mask, else y.
inline Floats select(Mask mask, Floats x, Floats y) { return _mm512_mask_mov_ps(y, mask, x); }
// x where first <= at <= last, else y.
inline Floats select_between(Ints at, int32_t first, int32_t last, Floats x, Floats y) {
  return select(_mm512_cmpge_epi32_mask(at, splat_int(first)) & _mm512_cmple_epi32_mask(at, splat_int(last)), x, y);
}

// ---- integers

inline Ints as_ints(Floats x) { return _mm512_castps_si512(x); }
inline Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
inline Ints add_ints(Ints x, Ints y) { return _mm512_add_epi32(x, y); }
inline Ints multiply_ints(Ints x, Ints y) { return _mm512_mullo_epi32(x, y); }
inline Ints limited_ints(Ints x, int32_t most) {
  return _mm512_max_epi32(_mm512_min_epi32(x, splat_int(most)), splat_int(-most));
}
inline Ints lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
template <int BITS>
inline Ints shift_left(Ints x) {
  return _mm512_slli_epi32(x, BITS);
}

// Sums of products of two 16-bit integers.
inline Ints add_pairs(Ints sum, Ints w, Ints x) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(sum, w, x);
#else  // a hypervisor may hide it from a cpu that has bfloat16 products
  return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
#endif
}

// Sums of products of four bytes, those of `w` without sign.
inline Ints add_fours(Ints sum, Ints w, Ints x) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sum, w, x);
#else
  const Ints even = _mm512_and_si512(w, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(w, 8);
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(even, _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8)));
  return _mm512_add_epi32(sum, _mm512_madd_epi16(odd, _mm512_srai_epi16(x, 8)));
#endif
}
constexpr bool ADDS_FOURS = true;
Ints add_twos(Ints sum, Ints w, Ints x);  // not here
Ints signed_twos(Ints w, Ints x);         // not here

// The largest absolute of some bfloat16 numbers, a multiple of 32; NaN is the largest.
inline float largest_bfloat16(const uint16_t* x, long n) {
  Ints bits = no_ints();
  for (long at = 0; at < n; at += 2 * LANES)
    bits = _mm512_max_epu16(bits, _mm512_and_si512(load_ints(x + at), _mm512_set1_epi16(0x7fff)));
  bits = _mm512_max_epu32(_mm512_slli_epi32(bits, 16), bits);
  return _mm512_cvtss_f32(_mm512_castsi512_ps(splat_int(_mm512_reduce_max_epu32(bits) & 0xffff0000)));
}

// ---- bits and bytes

inline Ints splat_byte(uint8_t x) { return _mm512_set1_epi8(char(x)); }
template <int BITS>  // of 16-bit integers
inline Ints shift_right_16(Ints x) {
  return _mm512_srli_epi16(x, BITS);
}
template <int BITS>
inline Ints shift_left_16(Ints x) {
  return _mm512_slli_epi16(x, BITS);
}
inline Ints bits_and(Ints x, Ints y) { return _mm512_and_si512(x, y); }
inline Ints bits_and_or(Ints x, Ints y, Ints z) { return _mm512_ternarylogic_epi32(x, y, z, 0xEA); }  // x & y | z
inline Ints flip_bits(Ints x, Ints y) { return _mm512_xor_si512(x, y); }
inline Ints lookup_bytes(__m128i table, Ints index) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), index);
}
// The fours of a group of 32 columns with a high bit: the i-th one plus 16 where its bit of the 64 bytes is set.
inline Ints add_high_bit(Ints low, const uint8_t* bits, int i) {
  uint64_t mask;
  memcpy(&mask, bits + 8 * i, 8);
  return _mm512_mask_add_epi8(low, __mmask64(mask), low, splat_byte(16));
}
// Where that of a byte, `lane`, is.
inline void set_high_bit(uint8_t* bits, int i, int lane) { bits[8 * i + lane / 8] |= 1 << lane % 8; }

// ---- pairs of bfloat16 in lanes of 32 bits

constexpr bool PAIRS = true;  // whether these are multiplied as they are

// sum + x times a pair of numbers.  Compilers load the pair by an instruction of its own.
inline __attribute__((always_inline)) Floats add_pair_product(Floats sum, Ints x, const uint16_t* pair) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(*(const uint16_t(*)[2])pair));
  return sum;
}
// The first numbers of a row, of which `left` are left, as pairs.
inline Ints load_bfloat16_pairs(const uint16_t* x, long left) {
  return _mm512_maskz_loadu_epi16(left >= 2 * LANES ? ~0u : (1u << left) - 1, x);
}
// Two vectors as pairs.
inline Ints to_bfloat16_pairs(Floats x, Floats y) {
  const Ints low = _mm512_cvtepu16_epi32(to_bfloat16(x)), high = _mm512_cvtepu16_epi32(to_bfloat16(y));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Transposes 16 x 16 words of 32 bits.
inline void transpose(Ints* r) {
  Ints t[16];
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
