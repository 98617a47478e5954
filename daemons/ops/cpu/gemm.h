// Rows of activations times tiles of packed weights, in integers.
//
// Activations are 8-bit integers times a factor for each row and SHARED columns, so that `vpdpbusd` adds products with
// codes without rounding.  Where scales are bytes, so are sums of groups times their scales: only what SHARED columns
// make is rounded, by float32.  A row's result does not depend on the rows beside it: each is summed by the same
// instructions in the same order.
#pragma once
#include <array>

#include "tiles.h"

constexpr int MAX_ROWS = 8;    // of activations in registers at a time
constexpr int AHEAD = 8192;    // bytes that are prefetched: the processor alone stops at 30 of 36 GB/s a thread
constexpr int SHARED = 256;    // columns whose activations share a factor; of a row's last ones, those that are left
constexpr int GROUP_SUM = 32;  // columns whose activations' sum is known; that of each half, too

// Where in ByteRows::sums, as 16-bit integers, that of a column's GROUP_SUM is for row r of R.
inline long sum_at(long column, int r, int R) {
  const long group = column / GROUP_SUM;
  return group / 2 * 2 * R + 2 * r + group % 2;
}

inline __attribute__((always_inline)) void prefetch_ahead(const uint8_t* at, int n_bytes) {
  for (int i = 0; i < n_bytes; i += 64) _mm_prefetch((const char*)at + AHEAD + i, _MM_HINT_T0);
}

// Sums of products of four bytes, those of `w` without sign.
inline __m512i add_products(__m512i sum, __m512i w, __m512i x) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sum, w, x);
#else  // a hypervisor may hide it from a cpu that has bfloat16 products
  const __m512i even = _mm512_and_si512(w, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(w, 8);
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(even, _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8)));
  return _mm512_add_epi32(sum, _mm512_madd_epi16(odd, _mm512_srai_epi16(x, 8)));
#endif
}

// Sums of products of two 16-bit integers.
inline __m512i add_pairs(__m512i sum, __m512i w, __m512i x) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(sum, w, x);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
#endif
}

// Four bytes, of a row's next columns, in all lanes.
inline __m512i same_in_all(const void* four) {
  int32_t x;
  memcpy(&x, four, 4);
  return _mm512_set1_epi32(x);
}

// Activations as bytes, in the order of a tile's columns, their factors, and sums of the bytes.  MAX_ROWS rows are a
// block, the last one may have fewer; numbers of a block's R rows that are used together adjoin, so that one pointer
// reaches all of them: x [columns / 4][R][4], factors [SHARED columns][R], sums [pairs of GROUP_SUM columns][R][2], and
// negated [GROUP_SUM columns][3][R]: minus the sum of each half and of both, which takes the place of OFFSET.
struct ByteRows {
  int8_t* x;
  float* factors;
  int32_t *negated, *sums;
  long n, columns, shared, groups, pairs;

  static long count_shared(long columns) { return (columns + SHARED - 1) / SHARED; }
  static long count_pairs(long columns) { return (columns / GROUP_SUM + 1) / 2; }
  static long floats(long columns) {
    return columns / 4 + count_shared(columns) + 3 * (columns / GROUP_SUM) + count_pairs(columns);
  }
  ByteRows(float* memory, long n, long columns)
      : n(n), columns(columns), shared(count_shared(columns)) {
    groups = columns / GROUP_SUM, pairs = count_pairs(columns);
    x = (int8_t*)memory;
    negated = (int32_t*)(x + n * columns);
    factors = (float*)(negated + n * 3 * groups);
    sums = (int32_t*)(factors + n * shared);
  }

  long parts() const { return (n + MAX_ROWS - 1) / MAX_ROWS * shared; }

  // The i-th SHARED columns of all blocks one after the other, `from` bfloat16 [n][columns].
  void put(long i, const uint16_t* from) const {
    const long block = i / shared * MAX_ROWS, part = i % shared, first = part * SHARED;
    const long rows = std::min<long>(MAX_ROWS, n - block), width = std::min<long>(SHARED, columns - first);
    alignas(64) int8_t bytes[MAX_ROWS][SHARED];
    from += block * columns + first;
    for (long r = 0; r < rows; r++)
      factors[block * shared + part * rows + r] = round(from + r * columns, width, bytes[r]);
    const __mmask16 few = lanes(0, rows), twice = few | few << 8;
    int32_t* fours = (int32_t*)(x + block * columns) + first / 4 * rows;
    int32_t* minus = negated + (block * groups + first / GROUP_SUM * rows) * 3;
    int32_t* pair = sums + block * pairs + first / (2 * GROUP_SUM) * rows;
    for (long at = 0; at < width; at += 2 * GROUP_SUM, pair += rows) {
      __m512i two[MAX_ROWS];
      interleave(&bytes[0][at], two);
      __m256i of_group[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 2
      for (int g = 0; g < 2; g++) {
        if (at + g * GROUP_SUM >= width) break;
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++, minus += rows) {
          __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 2
          for (int i = 0; i < 2; i++, fours += 2 * rows) {
            const __m512i x = two[4 * g + 2 * h + i];
            sum = add_products(sum, _mm512_set1_epi8(1), x);
            _mm512_mask_storeu_epi32(fours, lanes(0, 2 * rows), _mm512_maskz_compress_epi32(twice, x));
          }
          const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
          of_group[g] = _mm256_add_epi32(of_group[g], half);
          store_negated(minus, few, half);
        }
        store_negated(minus, few, of_group[g]);
        minus += rows;
      }
      const __m256i second = _mm256_slli_epi32(of_group[1], 16);
      _mm256_mask_storeu_epi32(pair, few, _mm256_mask_blend_epi16(0xaaaa, of_group[0], second));
    }
  }

 private:
  // A row as bytes; its factor.
  static float round(const uint16_t* from, long width, int8_t* bytes) {
    __m512i bits = _mm512_setzero_si512();
    for (long at = 0; at < width; at += GROUP_SUM)  // NaN is the largest
      bits = _mm512_max_epu16(bits, _mm512_and_si512(_mm512_loadu_si512(from + at), _mm512_set1_epi16(0x7fff)));
    bits = _mm512_max_epu32(_mm512_slli_epi32(bits, 16), bits);
    const float largest =
        _mm512_cvtss_f32(_mm512_castsi512_ps(_mm512_set1_epi32(_mm512_reduce_max_epu32(bits) & 0xffff0000)));
    const Floats up = splat(largest > 1e-35f ? 127.f / largest : 0.f);
    for (long at = 0; at < width; at += LANES) {
      const __m512i p = _mm512_cvtps_epi32(_mm512_mul_ps(load_bfloat16(from + at), up));
      _mm_store_si128((__m128i*)(bytes + at), _mm512_cvtsepi32_epi8(p));
    }
    // what is not finite has no integer
    return largest <= std::numeric_limits<float>::max() ? largest / 127.f : NAN;
  }

  static void store_negated(int32_t* to, __mmask8 few, __m256i x) {
    _mm256_mask_storeu_epi32(to, few, _mm256_sub_epi32(_mm256_setzero_si256(), x));
  }

  // 64 columns of MAX_ROWS rows: the i-th vector has columns 8i to 8i + 8, as a four of each row and the next four.  What
  // is beyond the rows and columns that there are may be anything, and is not stored.
  static void interleave(const int8_t* bytes, __m512i* two) {
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    __m512i x[MAX_ROWS], pairs[MAX_ROWS], quads[MAX_ROWS];  // quads [half of the rows][four of a lane]
#pragma GCC unroll 8
    for (int r = 0; r < MAX_ROWS; r++) x[r] = _mm512_shuffle_epi8(_mm512_load_si512(bytes + r * SHARED), order);
#pragma GCC unroll 8
    for (int r = 0; r < MAX_ROWS; r += 2) {
      pairs[r] = _mm512_unpacklo_epi32(x[r], x[r + 1]);
      pairs[r + 1] = _mm512_unpackhi_epi32(x[r], x[r + 1]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < MAX_ROWS; r += 4)
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
        quads[r + 2 * i] = _mm512_unpacklo_epi64(pairs[r + i], pairs[r + 2 + i]);
        quads[r + 2 * i + 1] = _mm512_unpackhi_epi64(pairs[r + i], pairs[r + 2 + i]);
      }
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
      const __m512i low = _mm512_shuffle_i32x4(quads[i], quads[4 + i], 0x44);  // lanes 0 and 1 of both
      const __m512i next_low = _mm512_shuffle_i32x4(quads[i + 1], quads[5 + i], 0x44);
      const __m512i high = _mm512_shuffle_i32x4(quads[i], quads[4 + i], 0xee);
      const __m512i next_high = _mm512_shuffle_i32x4(quads[i + 1], quads[5 + i], 0xee);
      two[i / 2] = _mm512_shuffle_i32x4(low, next_low, 0x88);
      two[2 + i / 2] = _mm512_shuffle_i32x4(low, next_low, 0xdd);
      two[4 + i / 2] = _mm512_shuffle_i32x4(high, next_high, 0x88);
      two[6 + i / 2] = _mm512_shuffle_i32x4(high, next_high, 0xdd);
    }
  }
};

// What SHARED columns make, before anything is added: whole numbers where scales are bytes.
template <class T>
inline auto nothing() {
  if constexpr (T::NESTED) return _mm512_setzero_si512();
  else return splat(0.f);
}

// R rows from `first` on times one strip of TILE rows of weights.  Products take 4 or 5 cycles and start up to twice a
// cycle, so ten sums are to be in progress: both halves of a tile are taken at once, with the same activations.
// All in one function: in parts, gcc keeps sums in memory.  A block of types whose scales are bytes has SHARED columns.
template <class T, int R>
void multiply_strip(const uint8_t* strip, const ByteRows& a, long first, Floats (*out)[R]) {
  static_assert(!T::NESTED || T::BLOCK == SHARED);
  const int8_t* x = a.x + first * a.columns;
  const float* factors = a.factors + first * a.shared;
  const int32_t* negated = a.negated + first * 3 * a.groups;
  const int16_t* sums = (const int16_t*)(a.sums + first * a.pairs);
  Floats total[2][R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) total[0][r] = total[1][r] = splat(0.f);
  for (long from = 0; from < a.columns; from += SHARED) {
    const long stop = from + SHARED < a.columns ? from + SHARED : a.columns;
    const uint8_t* tile = strip + from / T::BLOCK * T::BYTES;
    decltype(nothing<T>()) part[2][R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) part[0][r] = part[1][r] = nothing<T>();
    if (T::NESTED) prefetch_ahead(tile, T::FIRST_GROUP);  // 10 lines left out halve what a Zen 4 reads
    const int n = T::NESTED ? T::GROUPS : (stop - from) / T::GROUP;  // known, or few rows wait for memory
    for (int i = 0; i < n; i++) {
      const int g = T::NESTED ? i : 0;
      const long column = from + i * T::GROUP;
      if (!T::NESTED) {
        if (i) tile += T::BYTES;
        prefetch_ahead(tile, T::FIRST_GROUP);
      }
      const uint8_t* half[2] = {half_group<T>(tile, g, 0), half_group<T>(tile, g, 1)};
      prefetch_ahead(half[0], T::GROUP_BYTES);
      __m512i sum[2][R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        sum[0][r] = sum[1][r] = _mm512_setzero_si512();
        if constexpr (T::OFFSET != 0) {
          const long of = column / GROUP_SUM * 3 + (T::GROUP == GROUP_SUM ? 2 : column / T::GROUP % 2);
          sum[0][r] = sum[1][r] = _mm512_slli_epi32(_mm512_set1_epi32(negated[of * R + r]), __builtin_ctz(T::OFFSET));
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < T::GROUP / 4; i++) {
        const __m512i w[2] = {bytes_of<T>(half[0], i), bytes_of<T>(half[1], i)};
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const __m512i same = same_in_all(x + column * R + 4 * (R * i + r));
          sum[0][r] = add_products(sum[0][r], w[0], same);
          sum[1][r] = add_products(sum[1][r], w[1], same);
        }
      }
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        if constexpr (T::NESTED) {
          const __m512i scale = whole_scale<T>(tile, g, h);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) part[h][r] = _mm512_add_epi32(part[h][r], _mm512_mullo_epi32(sum[h][r], scale));
        } else {
          const Floats d = load_half(tile + TILE * h), m = tile_minimum<T>(tile, h);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            part[h][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[h][r]), d, part[h][r]);
            if constexpr (T::MIN != 0)
              part[h][r] = _mm512_fmadd_ps(m, splat(sums[sum_at(column, r, R)]), part[h][r]);
          }
        }
      }
    }
    if constexpr (T::NESTED) {
      __m512i least[2][R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) least[0][r] = least[1][r] = _mm512_setzero_si512();
      if constexpr (T::MIN != 0)
        for (int g = 0; g < T::GROUPS; g += 2) {
          const __m512i pair[2] = {whole_minima<T>(tile, g, 0), whole_minima<T>(tile, g, 1)};
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            const __m512i same = same_in_all(sums + sum_at(from + g * T::GROUP, r, R));
            least[0][r] = add_pairs(least[0][r], pair[0], same);
            least[1][r] = add_pairs(least[1][r], pair[1], same);
          }
        }
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const Floats d = load_half(tile + TILE * h), m = tile_minimum<T>(tile, h);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const Floats factor = splat(factors[from / SHARED * R + r]);
          total[h][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[h][r]), _mm512_mul_ps(d, factor), total[h][r]);
          if constexpr (T::MIN != 0)
            total[h][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(least[h][r]), _mm512_mul_ps(m, factor), total[h][r]);
        }
      }
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Floats factor = splat(factors[from / SHARED * R + r]);
        total[0][r] = _mm512_fmadd_ps(part[0][r], factor, total[0][r]);
        total[1][r] = _mm512_fmadd_ps(part[1][r], factor, total[1][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) out[0][r] = total[0][r], out[1][r] = total[1][r];
}

// A strip of a matrix times R rows.
template <class T, int R>
void multiply_rows(const uint8_t* tile, const ByteRows& a, long first, long width, uint16_t* out, long out_stride) {
  Floats found[2][R];
  multiply_strip<T, R>(tile, a, first, found);
  for (long at = 0; at < width; at += 16)
    for (long r = 0; r < R; r++)
      _mm256_mask_storeu_epi16(out + (first + r) * out_stride + at, lanes(at, width), to_bfloat16(found[at / 16][r]));
}

// Strips from `begin` to `end` of a matrix with `n_out` rows times rows of activations from `row` to `stop`.
template <class T>
void multiply_strips(const uint8_t* tiles, const ByteRows& a, long row, long stop, long n_out, long begin, long end,
                     uint16_t* out, long out_stride) {
  const long strip_bytes = a.columns / T::BLOCK * T::BYTES;
  for (long strip = begin; strip < end; strip++) {
    const long at = TILE * strip, width = n_out - at < TILE ? n_out - at : TILE;
    for (long first = row; first < stop; first += MAX_ROWS) {
      const auto rows = [&](auto run) { run(tiles + strip * strip_bytes, a, first, width, out + at, out_stride); };
      switch (stop - first) {
        case 1: rows(multiply_rows<T, 1>); break;
        case 2: rows(multiply_rows<T, 2>); break;
        case 3: rows(multiply_rows<T, 3>); break;
        case 4: rows(multiply_rows<T, 4>); break;
        case 5: rows(multiply_rows<T, 5>); break;
        case 6: rows(multiply_rows<T, 6>); break;
        case 7: rows(multiply_rows<T, 7>); break;
        default: rows(multiply_rows<T, 8>);
      }
    }
  }
}
