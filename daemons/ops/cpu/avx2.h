// Pairs of vectors of 256 bits, for cpus with AVX2, FMA and F16C.
#pragma once

struct Floats {
  __m256 a, b;
};
struct Ints {  // 16 integers, 32 of 16 bits or 64 bytes
  __m256i a, b;
};

// One instruction for each half.
#define BOTH(TYPE, call_a, call_b) \
  { return TYPE{call_a, call_b}; }

inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Ints splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

// A number that several vectors are multiplied by: compilers would load it for each of them.
inline Floats in_register(float x) {
  __m256 out = _mm256_set1_ps(x);
  asm("" : "+x"(out));
  return {out, out};
}

// ---- memory

inline __m256i load_half_vector(const void* x) { return _mm256_loadu_si256((const __m256i*)x); }
inline void store_half_vector(void* out, __m256i x) { _mm256_storeu_si256((__m256i*)out, x); }
// The lanes of a mask from `first` on, as vectors' masks.
inline __m256i lane_mask(Mask mask, int first) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask >> first), lane), lane);
}
// Numbers of `SIZE` bytes of which a mask's are read, and the others are 0.
template <int SIZE>
struct Some {
  alignas(32) uint8_t bytes[LANES * SIZE] = {};
  Some() = default;
  Some(const void* x, Mask mask) { memcpy(bytes, x, __builtin_popcount(mask) * SIZE); }
  void copy_to(void* out, Mask mask) const { memcpy(out, bytes, __builtin_popcount(mask) * SIZE); }
};

inline Floats load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
inline Floats load(const float* x, Mask mask) {
  if (__builtin_expect(mask == ALL, true)) return load(x);
  return {_mm256_maskload_ps(x, lane_mask(mask, 0)), _mm256_maskload_ps(x + 8, lane_mask(mask, 8))};
}
inline void store(float* out, Floats x) { _mm256_storeu_ps(out, x.a), _mm256_storeu_ps(out + 8, x.b); }
inline void store(float* out, Mask mask, Floats x) {
  if (__builtin_expect(mask == ALL, true)) return store(out, x);
  _mm256_maskstore_ps(out, lane_mask(mask, 0), x.a), _mm256_maskstore_ps(out + 8, lane_mask(mask, 8), x.b);
}
inline void stream(float* out, Floats x) { _mm256_stream_ps(out, x.a), _mm256_stream_ps(out + 8, x.b); }
inline Ints load_ints(const void* x) { return {load_half_vector(x), load_half_vector((const char*)x + 32)}; }
inline void store_ints(void* out, Ints x) { store_half_vector(out, x.a), store_half_vector((char*)out + 32, x.b); }

inline __m256 from_bfloat16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline Floats from_bfloat16(__m256i x) {
  return {from_bfloat16(_mm256_castsi256_si128(x)), from_bfloat16(_mm256_extracti128_si256(x, 1))};
}
// Rounded to the nearest, of two to the even one, in the lower halves of lanes; of NaN the first bits, quiet.
inline __m256i round_to_bfloat16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), is_odd);
  const __m256 quiet = _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x400000)));
  const __m256 found = _mm256_blendv_ps(_mm256_castsi256_ps(nearest), quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_castps_si256(found), 16);
}
inline __m256i to_bfloat16(Floats x) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(round_to_bfloat16(x.a), round_to_bfloat16(x.b)), 0xd8);
}
inline Floats load_bfloat16(const uint16_t* x) { return from_bfloat16(load_half_vector(x)); }
inline Floats load_some_bfloat16(const uint16_t* x, Mask mask) {
  return from_bfloat16(load_half_vector(Some<2>(x, mask).bytes));
}
inline void store_bfloat16(uint16_t* out, Floats x) { store_half_vector(out, to_bfloat16(x)); }
inline void store_some_bfloat16(uint16_t* out, Mask mask, Floats x) {
  Some<2> some;
  store_half_vector(some.bytes, to_bfloat16(x));
  some.copy_to(out, mask);
}

inline Floats load_half(const void* x) {
  const __m128i* at = (const __m128i*)x;
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline Floats load_half(const void* x, Mask mask) {
  if (__builtin_expect(mask == ALL, true)) return load_half(x);
  return load_half(Some<2>(x, mask).bytes);
}
inline void store_half(void* out, Mask mask, Floats x) {
  Some<2> some;
  _mm_store_si128((__m128i*)some.bytes, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_store_si128((__m128i*)some.bytes + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
  some.copy_to(out, mask);
}

// 16 bytes as integers, and back.
inline Ints load_signed_bytes(const void* x) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)x);
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
}
inline Ints load_signed_bytes(const void* x, Mask mask) {
  if (__builtin_expect(mask == ALL, true)) return load_signed_bytes(x);
  return load_signed_bytes(Some<1>(x, mask).bytes);
}
inline Ints load_unsigned_bytes(const void* x) {
  const __m128i bytes = _mm_loadu_si128((const __m128i*)x);
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
inline void store_bytes(void* out, Ints x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i*)out, bytes);
}
// Pairs of bytes, one from `x` and one from `y`, as 16-bit integers.
inline Ints load_pairs_of_bytes(const void* x, const void* y) {
  const __m128i one = _mm_loadu_si128((const __m128i*)x), next = _mm_loadu_si128((const __m128i*)y);
  return {_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(one, next)), _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(one, next))};
}

// ---- floats

inline Floats operator+(Floats x, Floats y) BOTH(Floats, _mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b))
inline Floats operator-(Floats x, Floats y) BOTH(Floats, _mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b))
inline Floats operator*(Floats x, Floats y) BOTH(Floats, _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b))
inline Floats operator/(Floats x, Floats y) BOTH(Floats, _mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b))
inline Floats add_product(Floats x, Floats y, Floats sum)
    BOTH(Floats, _mm256_fmadd_ps(x.a, y.a, sum.a), _mm256_fmadd_ps(x.b, y.b, sum.b))
inline Floats subtract_product(Floats x, Floats y, Floats sum)
    BOTH(Floats, _mm256_fnmadd_ps(x.a, y.a, sum.a), _mm256_fnmadd_ps(x.b, y.b, sum.b))
inline Floats maximum(Floats x, Floats y) BOTH(Floats, _mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b))
inline Floats minimum(Floats x, Floats y) BOTH(Floats, _mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b))
inline Floats absolute(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline Floats rounded(Floats x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// In two steps, of which only the second rounds: no float has an exponent of -150 or 128.
inline __m256 times_power_of_two(__m256 x, __m256 n) {
  const __m256i all = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(all, 1), bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(all, half), bias), 23);
  return _mm256_mul_ps(_mm256_mul_ps(x, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}
inline Floats times_power_of_two(Floats x, Floats n)
    BOTH(Floats, times_power_of_two(x.a, n.a), times_power_of_two(x.b, n.b))
// In the order of _mm512_reduce_add_ps.
inline float sum_of(Floats x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest_of(Floats x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline Mask where_larger(Floats x, Floats y) {
  return Mask(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)) |
              _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)) << 8);
}
// x in the lanes of the mask, else y.
inline Floats select(Mask mask, Floats x, Floats y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(lane_mask(mask, 0))),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(lane_mask(mask, 8)))};
}
// x where first <= at <= last, else y.
inline __m256 select_between(__m256i at, int32_t first, int32_t last, __m256 x, __m256 y) {
  const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), at);
  const __m256i outside = _mm256_or_si256(before, _mm256_cmpgt_epi32(at, _mm256_set1_epi32(last)));
  return _mm256_blendv_ps(x, y, _mm256_castsi256_ps(outside));
}
inline Floats select_between(Ints at, int32_t first, int32_t last, Floats x, Floats y)
    BOTH(Floats, select_between(at.a, first, last, x.a, y.a), select_between(at.b, first, last, x.b, y.b))

// ---- integers

inline Ints as_ints(Floats x) BOTH(Ints, _mm256_castps_si256(x.a), _mm256_castps_si256(x.b))
inline Floats as_floats(Ints x) BOTH(Floats, _mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b))
inline Floats to_floats(Ints x) BOTH(Floats, _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b))
inline Ints to_ints(Floats x) BOTH(Ints, _mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b))
inline Ints add_ints(Ints x, Ints y) BOTH(Ints, _mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b))
inline Ints multiply_ints(Ints x, Ints y) BOTH(Ints, _mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b))
inline __m256i limited_ints(__m256i x, int32_t most) {
  return _mm256_max_epi32(_mm256_min_epi32(x, _mm256_set1_epi32(most)), _mm256_set1_epi32(-most));
}
inline Ints limited_ints(Ints x, int32_t most) BOTH(Ints, limited_ints(x.a, most), limited_ints(x.b, most))
inline Ints lane_numbers() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
template <int BITS>
inline Ints shift_left(Ints x) BOTH(Ints, _mm256_slli_epi32(x.a, BITS), _mm256_slli_epi32(x.b, BITS))

// A sum that is computed before the next is begun: gcc would add many at the end, and keep all products in memory.
inline __m256i now(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

// Sums of products of two 16-bit integers.
inline __m256i add_pairs(__m256i sum, __m256i w, __m256i x) {
  return now(_mm256_add_epi32(sum, _mm256_madd_epi16(w, x)));
}
inline Ints add_pairs(Ints sum, Ints w, Ints x) BOTH(Ints, add_pairs(sum.a, w.a, x.a), add_pairs(sum.b, w.b, x.b))

#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
inline __m256i add_fours(__m256i sum, __m256i w, __m256i x) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sum, w, x);
#else
  return _mm256_dpbusd_epi32(sum, w, x);
#endif
}
// Sums of products of four bytes, those of `w` without sign.
inline Ints add_fours(Ints sum, Ints w, Ints x) BOTH(Ints, add_fours(sum.a, w.a, x.a), add_fours(sum.b, w.b, x.b))
constexpr bool ADDS_FOURS = true;
#else
Ints add_fours(Ints sum, Ints w, Ints x);  // not here
constexpr bool ADDS_FOURS = false;
#endif

// Products of two bytes and the next two, those of `w` without sign, are summed as 16-bit integers; those saturate.
inline __m256i add_twos(__m256i sum, __m256i w, __m256i x) {
  return now(_mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x)));
}
inline Ints add_twos(Ints sum, Ints w, Ints x) BOTH(Ints, add_twos(sum.a, w.a, x.a), add_twos(sum.b, w.b, x.b))
// The same of two bytes with sign, of which x is above -128.
inline __m256i signed_twos(__m256i w, __m256i x) {
  return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}
inline Ints signed_twos(Ints w, Ints x) BOTH(Ints, signed_twos(w.a, x.a), signed_twos(w.b, x.b))

// The largest absolute of some bfloat16 numbers, a multiple of 32; NaN is the largest.
inline float largest_bfloat16(const uint16_t* x, long n) {
  __m256i most = _mm256_setzero_si256();
  for (long at = 0; at < n; at += LANES)
    most = _mm256_max_epu16(most, _mm256_and_si256(load_half_vector(x + at), _mm256_set1_epi16(0x7fff)));
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));  // of their complements
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(int(uint32_t(~_mm_cvtsi128_si32(least) & 0xffff) << 16))));
}

// ---- bits and bytes

inline Ints splat_byte(uint8_t x) BOTH(Ints, _mm256_set1_epi8(char(x)), _mm256_set1_epi8(char(x)))
template <int BITS>  // of 16-bit integers
inline Ints shift_right_16(Ints x) BOTH(Ints, _mm256_srli_epi16(x.a, BITS), _mm256_srli_epi16(x.b, BITS))
template <int BITS>
inline Ints shift_left_16(Ints x) BOTH(Ints, _mm256_slli_epi16(x.a, BITS), _mm256_slli_epi16(x.b, BITS))
inline Ints shifted_right_16(Ints x, int n) BOTH(Ints, _mm256_srli_epi16(x.a, n), _mm256_srli_epi16(x.b, n))
inline Ints shifted_left_16(Ints x, int n) BOTH(Ints, _mm256_slli_epi16(x.a, n), _mm256_slli_epi16(x.b, n))
inline Ints bits_and(Ints x, Ints y) BOTH(Ints, _mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b))
inline Ints bits_and_or(Ints x, Ints y, Ints z)
    BOTH(Ints, _mm256_or_si256(_mm256_and_si256(x.a, y.a), z.a), _mm256_or_si256(_mm256_and_si256(x.b, y.b), z.b))
inline Ints flip_bits(Ints x, Ints y) BOTH(Ints, _mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b))
inline Ints lookup_bytes(__m128i table, Ints index) {
  const __m256i both = _mm256_broadcastsi128_si256(table);
  return {_mm256_shuffle_epi8(both, index.a), _mm256_shuffle_epi8(both, index.b)};
}
// The fours of a group of 32 columns with a high bit: the i-th one plus 16 where its bit of the 64 bytes is set.
inline Ints add_high_bit(Ints low, const uint8_t* bits, int i) {
  const Ints all = load_ints(bits), moved = i < 4 ? shifted_left_16(all, 4 - i) : shifted_right_16(all, i - 4);
  return bits_and_or(moved, splat_byte(16), low);
}
// Where that of a byte, `lane`, is.
inline void set_high_bit(uint8_t* bits, int i, int lane) { bits[lane] |= 1 << i; }

// ---- pairs of bfloat16 in lanes of 32 bits

constexpr bool PAIRS = false;  // whether these are multiplied as they are
Floats add_pair_product(Floats sum, Ints x, const uint16_t* pair);  // not here
Ints load_bfloat16_pairs(const uint16_t* x, long left);             // not here
// Two vectors as pairs.
inline Ints to_bfloat16_pairs(Floats x, Floats y) {
  return {_mm256_or_si256(round_to_bfloat16(x.a), _mm256_slli_epi32(round_to_bfloat16(y.a), 16)),
          _mm256_or_si256(round_to_bfloat16(x.b), _mm256_slli_epi32(round_to_bfloat16(y.b), 16))};
}

// Transposes 8 x 8 words of 32 bits.
inline void transpose(__m256i* r) {
  __m256i t[8], u[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 8
    for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
      u[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
#pragma GCC unroll 8
  for (int j = 0; j < 4; j++) {
    r[j] = _mm256_permute2x128_si256(u[j], u[j + 4], 0x20);
    r[j + 4] = _mm256_permute2x128_si256(u[j], u[j + 4], 0x31);
  }
}

// Transposes 16 x 16 words of 32 bits, in four squares.
inline void transpose(Ints* r) {
  __m256i left[2][8], right[2][8];  // columns of the first and the last rows
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) left[i / 8][i % 8] = r[i].a, right[i / 8][i % 8] = r[i].b;
  transpose(left[0]), transpose(left[1]), transpose(right[0]), transpose(right[1]);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = {left[0][i], left[1][i]}, r[i + 8] = {right[0][i], right[1][i]};
}
#undef BOTH
