// Tiles of packed weights: 32 rows x one quant block of columns, as two halves of 16 rows that are multiplied together.
// A lane of 32 bits is a row, its bytes are four columns, so that `vpdpbusd` multiplies 16 rows (or 8) by four activations.
// All is read in the order in which it lies: with several streams the processor stops to prefetch.
//
// A tile is: d f16[32] (of MXFP4 bf16, which holds its powers of two) | m f16[32], if the type has minima | nested types: scales [groups][32] and minima [groups][32],
// a byte each | groups of columns that share a scale, of each half: high bits | codes.  Of eight columns, 0 4 1 5 are the
// bytes of one vector, a *four*, and 2 6 3 7 those of the next: so the halves of a lane in both, shifted, are the pairs
// 0 1, 2 3, 4 5 and 6 7.  Codes of 4 bits: a byte has the first four's in its low nibble, the second's in the high one.
// One high bit: with AVX-512 a bit for each byte of a four; else 64 bytes for 32 columns, bit i of a byte is of the i-th
// four.  Two high bits: 64 bytes for 16 columns, bits 2i of a byte are of the i-th
// four.  Codes of 8 bits: a byte each, plus OFFSET.
#pragma once
#include "vectors.h"

constexpr int TILE = 32;  // rows of a tile
constexpr int8_t LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // e2m1, times two

// What a quant type is: columns of a block and of a group with one scale, bits above the low four (4: codes are bytes),
// whether scales are bytes times d, whether those are signed, whether it has minima and their sign, the value of code 0,
// the values of all codes where they are no sequence, whether scales are powers of two.
template <int COLUMNS, int GROUP_, int HIGH_, bool NESTED_, bool SIGNED_, int MIN_, int ZERO_,
          const int8_t* VALUES_ = nullptr, bool POWERS_ = false>
struct Type {
  static constexpr int BLOCK = COLUMNS, GROUP = GROUP_, HIGH = HIGH_, MIN = MIN_, ZERO = ZERO_;
  static constexpr bool NESTED = NESTED_, SIGNED = SIGNED_, LOOKUP = VALUES_ != nullptr, POWERS = POWERS_;
  static constexpr const int8_t* VALUES = VALUES_;
  static constexpr int GROUPS = BLOCK / GROUP;
  static constexpr int OFFSET = LOOKUP || HIGH == 4 ? 128 : -ZERO;  // what is added to values so that none is negative
  static constexpr int M = 64, SCALES = MIN ? 128 : 64, MINIMA = SCALES + (NESTED ? GROUPS * TILE : 0);
  static constexpr int FIRST_GROUP = MINIMA + (NESTED && MIN ? GROUPS * TILE : 0);
  static constexpr int CODES = HIGH == 4 ? 0 : GROUP * HIGH * 2;  // where they begin in half a group
  static constexpr int HALF_BYTES = CODES + GROUP * (HIGH == 4 ? 16 : 8), GROUP_BYTES = 2 * HALF_BYTES;
  static constexpr int BYTES = FIRST_GROUP + GROUPS * GROUP_BYTES;
};
using Q4_0 = Type<32, 32, 0, false, false, 0, -8>;
using Q4_1 = Type<32, 32, 0, false, false, 1, 0>;
using Q5_0 = Type<32, 32, 1, false, false, 0, -16>;
using Q5_1 = Type<32, 32, 1, false, false, 1, 0>;
using Q8_0 = Type<32, 32, 4, false, false, 0, 0>;
using IQ4_NL = Type<32, 32, 0, false, false, 0, 0, LEVELS>;
using IQ4_XS = Type<256, 32, 0, true, true, 0, 0, LEVELS>;
using MXFP4 = Type<32, 32, 0, false, false, 0, 0, DOUBLED, true>;
using Q4_K = Type<256, 32, 0, true, false, -1, 0>;
using Q5_K = Type<256, 32, 1, true, false, -1, 0>;
using Q6_K = Type<256, 16, 2, true, true, 0, -32>;

#if WIDE
// The values of 32 codes as bfloat16, exact; where high bits are no part of the index: of sixteen, twice.
template <class T>
inline __m512i values(int first) {
  alignas(64) uint16_t out[32];
  for (int i = 0; i < 32; i++) {
    const int code = first + (T::HIGH == 2 ? i : i & 15);
    int value = code + T::ZERO;
    if constexpr (T::LOOKUP) value = T::VALUES[code & 15];
    const float real = float(value);
    uint32_t bits;
    memcpy(&bits, &real, 4);
    out[i] = uint16_t(bits >> 16);
  }
  return _mm512_load_si512(out);
}

// Decodes codes to bfloat16, exactly, by a table.
template <class T>
struct Decoder {
  const __m512i low = values<T>(0), high = values<T>(T::HIGH == 2 ? 32 : 16);
  const __m512i nibble = _mm512_set1_epi16(15);

  // The p-th pair of columns of half a group, of 16 rows.
  inline __attribute__((always_inline)) void pair(const uint8_t* group, int p, Floats& a, Floats& b) const {
    const Ints w = (Ints)packed_pair(group, p);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(w, splat_int(int(0xffff0000))));
  }

  inline __attribute__((always_inline)) __m512bh packed_pair(const uint8_t* group, int p) const {
    const int four = p / 4 * 2 + p % 2, byte = p % 4 / 2;  // of a half of a lane
    if constexpr (T::HIGH == 4) {
      const __m512i q = _mm512_loadu_si512(group + T::CODES + 64 * four);
      const __m512i code = byte ? _mm512_srli_epi16(q, 8) : _mm512_and_si512(q, _mm512_set1_epi16(255));
      const __m512i value = _mm512_sub_epi16(code, _mm512_set1_epi16(T::OFFSET));
      const Floats a = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(value)));
      const Floats b = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(value, 1)));
      return _mm512_cvtne2ps_pbh(b, a);
    } else {
      const __m512i q = _mm512_srli_epi16(_mm512_loadu_si512(group + T::CODES + 64 * (p / 4)), 4 * (p % 4));
      if constexpr (T::HIGH == 0) return (__m512bh)_mm512_permutexvar_epi16(q, low);
      if constexpr (T::HIGH == 1) {
        uint64_t bits;
        memcpy(&bits, group + 8 * four, 8);
        const __mmask32 is_high = __mmask32(_pext_u64(bits, byte ? 0xaaaaaaaaaaaaaaaa : 0x5555555555555555));
        const __m512i found = _mm512_permutexvar_epi16(q, low);
        return (__m512bh)_mm512_mask_permutexvar_epi16(found, is_high, q, high);
      }
      const __m512i h = _mm512_loadu_si512(group);
      const int shift = 8 * byte + 2 * four - 4;
      const __m512i bits = shift < 0 ? _mm512_slli_epi16(h, -shift) : _mm512_srli_epi16(h, shift);
      const __m512i code = _mm512_ternarylogic_epi32(nibble, q, bits, 0xCA);  // nibble ? q : bits
      return (__m512bh)_mm512_permutex2var_epi16(low, code, high);
    }
  }
};

#endif

// The i-th four of half a group as bytes, plus OFFSET; SIGNED bytes without it.
template <class T, bool SIGNED = false>
inline __attribute__((always_inline)) Ints bytes_of(const uint8_t* group, int i) {
  if constexpr (T::HIGH == 4) {
    const Ints q = load_ints(group + T::CODES + 64 * i);
    return SIGNED ? flip_bits(q, splat_byte(128)) : q;
  }
  const Ints q = load_ints(group + T::CODES + 64 * (i / 2)), nibble = splat_byte(15);
  const Ints code = i % 2 ? shift_right_16<4>(q) : q;
  if constexpr (T::HIGH == 2) {
    const Ints h = load_ints(group);
    const Ints shifted = i == 0 ? shift_left_16<4>(h) : i == 1 ? shift_left_16<2>(h) : i == 2 ? h : shift_right_16<2>(h);
    return bits_and_or(code, nibble, bits_and(shifted, splat_byte(0x30)));
  }
  const Ints low = bits_and(code, nibble);
  if constexpr (T::LOOKUP) {
    const __m128i levels = _mm_loadu_si128((const __m128i*)T::VALUES);
    return lookup_bytes(SIGNED ? levels : _mm_xor_si128(levels, _mm_set1_epi8(-128)), low);
  }
  if constexpr (T::HIGH == 1) return add_high_bit(low, group, i);
  return low;
}

#if !WIDE
// Decodes codes to floats.
template <class T>
struct Decoder {
  // The p-th pair of columns of half a group, of 16 rows.
  void pair(const uint8_t* group, int p, Floats& a, Floats& b) const {
    const int first = 8 * (p % 4 / 2);  // bit of the lane
    const Ints w = bytes_of<T>(group, p / 4 * 2 + p % 2);
    a = value(w, first), b = value(w, 16 + first);
  }

 private:
  static Floats value(Ints w, int first) {
    const __m128i bits = _mm_cvtsi32_si128(first);
    const Ints code = bits_and({_mm256_srl_epi32(w.a, bits), _mm256_srl_epi32(w.b, bits)}, splat_int(255));
    return to_floats(add_ints(code, splat_int(-T::OFFSET)));
  }
};
#endif

// Scale of a half's 16 rows.
template <class T>
inline Floats tile_scale(const uint8_t* tile, int half) {
  if constexpr (T::POWERS) return load_bfloat16((const uint16_t*)(tile + TILE * half));
  else return load_half(tile + TILE * half);
}

// Scale of a group for a half's 16 rows, times that of the tile.
template <class T>
inline Ints whole_scale(const uint8_t* tile, int group, int half) {
  const uint8_t* at = tile + T::SCALES + TILE * group + 16 * half;
  return T::SIGNED ? load_signed_bytes(at) : load_unsigned_bytes(at);
}

// Minima of a group and the next one for a half's 16 rows, over that of the tile: a pair of 16-bit integers a lane.
template <class T>
inline Ints whole_minima(const uint8_t* tile, int group, int half) {
  const uint8_t* at = tile + T::MINIMA + TILE * group + 16 * half;
  return load_pairs_of_bytes(at, at + TILE);
}

// Scale of a group for a half's 16 rows.  ``d``: that of the tile.
template <class T>
inline Floats group_scale(const uint8_t* tile, int group, int half, Floats d) {
  if constexpr (!T::NESTED) return d;
  return to_floats(whole_scale<T>(tile, group, half)) * d;
}

// What is added to each weight of a group.  ``m``: the tile's factor, with its sign.
template <class T>
inline Floats group_minimum(const uint8_t* tile, int group, int half, Floats m) {
  if constexpr (!T::NESTED) return m;
  return to_floats(load_unsigned_bytes(tile + T::MINIMA + TILE * group + 16 * half)) * m;
}

template <class T>
inline Floats tile_minimum(const uint8_t* tile, int half) {
  if constexpr (T::MIN == 0) return splat(0.f);
  const Floats m = load_half(tile + T::M + TILE * half);
  return T::MIN < 0 ? splat(0.f) - m : m;
}

// Where half a group begins.
template <class T>
inline const uint8_t* half_group(const uint8_t* tile, int group, int half) {
  return tile + T::FIRST_GROUP + group * T::GROUP_BYTES + half * T::HALF_BYTES;
}
