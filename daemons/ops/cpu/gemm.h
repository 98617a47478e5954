// Rows of activations times tiles of packed weights, in integers.
//
// Activations are 8-bit integers times a factor for each row and SHARED columns, or fewer, so that `vpdpbusd` adds products
// with codes without rounding.  Where scales are bytes, so are sums of groups times their scales: only what SHARED columns
// make is rounded, by float32.  A row's result does not depend on the rows beside it: each is summed by the same
// instructions in the same order.
#pragma once
#include <array>

#include "tiles.h"

constexpr int MAX_ROWS = WIDE ? 8 : 4;  // of activations, whose sums fit into registers
constexpr int AHEAD = 8192;    // bytes that are prefetched: the processor alone stops at 30 of 36 GB/s a thread
constexpr int SHARED = 256;    // columns that are taken together; of a row's last ones, those that are left
constexpr int GROUP_SUM = 32;  // columns whose activations' sum is known; that of each half, too

// Where in ByteRows::sums, as 16-bit integers, that of a column's GROUP_SUM is for row r of R.
inline long sum_at(long column, int r, int R) {
  const long group = column / GROUP_SUM;
  return group / 2 * 2 * R + 2 * r + group % 2;
}

inline __attribute__((always_inline)) void prefetch_ahead(const uint8_t* at, int n_bytes) {
  for (int i = 0; i < n_bytes; i += 64) _mm_prefetch((const char*)at + AHEAD + i, _MM_HINT_T0);
}

// Four bytes, of a row's next columns, in all lanes.
inline Ints same_in_all(const void* four) {
  int32_t x;
  memcpy(&x, four, 4);
  return splat_int(x);
}

// How products of a type's codes with activations are summed.  Where no instruction adds four products to 32 bits, sums
// of RUN fours fit into 16 bits, which saturate; codes of 8 bits are then multiplied with their sign, without OFFSET.
template <class T>
struct Products {
  static constexpr bool SIGNED = !ADDS_FOURS && (T::LOOKUP || T::HIGH == 4);
  static constexpr int OFFSET = SIGNED ? 0 : T::OFFSET, LARGEST = SIGNED ? 128 : (16 << T::HIGH) - 1;
  static constexpr int RUN = ADDS_FOURS ? T::GROUP / 4 : std::min(T::GROUP / 4, 32767 / (2 * 127 * LARGEST));

  static inline __attribute__((always_inline)) Ints begin(Ints sum) { return ADDS_FOURS ? sum : no_ints(); }
  static inline __attribute__((always_inline)) Ints add(Ints products, Ints w, Ints x) {
    if constexpr (ADDS_FOURS) return add_fours(products, w, x);
    else if constexpr (SIGNED) return signed_twos(w, x);
    else return add_twos(products, w, x);
  }
  static inline __attribute__((always_inline)) Ints end(Ints sum, Ints products) {
    return ADDS_FOURS ? products : add_pairs(sum, products, splat_int(0x00010001));
  }
};

// Activations as bytes, in the order of a tile's columns, their factors, and sums of the bytes.  MAX_ROWS rows are a
// block, the last one may have fewer; numbers of a block's R rows that are used together adjoin, so that one pointer
// reaches all of them: x [columns / 4][R][4], factors [`sharing` columns][R], sums [pairs of GROUP_SUM columns][R][2], and
// negated [GROUP_SUM columns][3][R]: minus the sum of each half and of both, which takes the place of OFFSET.
struct ByteRows {
  int8_t* x;
  float* factors;
  int32_t *negated, *sums;
  long n, columns, sharing, n_factors, groups, pairs;

  static long count(long columns, long sharing) { return (columns + sharing - 1) / sharing; }
  static long count_pairs(long columns) { return (columns / GROUP_SUM + 1) / 2; }
  static long floats(long columns, long sharing) {
    return columns / 4 + count(columns, sharing) + 3 * (columns / GROUP_SUM) + count_pairs(columns);
  }
  ByteRows(float* memory, long n, long columns, long sharing)
      : n(n), columns(columns), sharing(sharing), n_factors(count(columns, sharing)) {
    groups = columns / GROUP_SUM, pairs = count_pairs(columns);
    x = (int8_t*)memory;
    negated = (int32_t*)(x + n * columns);
    factors = (float*)(negated + n * 3 * groups);
    sums = (int32_t*)(factors + n * n_factors);
  }

  long parts() const { return (n + MAX_ROWS - 1) / MAX_ROWS * count(columns, SHARED); }

  // The i-th SHARED columns of all blocks one after the other, `from` bfloat16 [n][columns].
  void put(long i, const uint16_t* from) const {
    const long parts = count(columns, SHARED), block = i / parts * MAX_ROWS, first = i % parts * SHARED;
    const long rows = std::min<long>(MAX_ROWS, n - block), width = std::min<long>(SHARED, columns - first);
    alignas(64) int8_t bytes[MAX_ROWS][SHARED];
    from += block * columns + first;
    float* factor = factors + block * n_factors + first / sharing * rows;
    for (long at = 0; at < width; at += sharing, factor += rows)
      for (long r = 0; r < rows; r++)
        factor[r] = round(from + r * columns + at, std::min(sharing, width - at), bytes[r] + at);
    int32_t* fours = (int32_t*)(x + block * columns) + first / 4 * rows;
    int32_t* minus = negated + (block * groups + first / GROUP_SUM * rows) * 3;
    int32_t* pair = sums + block * pairs + first / (2 * GROUP_SUM) * rows;
    put_bytes(bytes, rows, width, fours, minus, pair);
  }

 private:
  // A row as bytes; its factor.
  static float round(const uint16_t* from, long width, int8_t* bytes) {
    const float largest = largest_bfloat16(from, width);
    const Floats up = splat(largest > 1e-35f ? 127.f / largest : 0.f);
    for (long at = 0; at < width; at += LANES) store_bytes(bytes + at, to_ints(load_bfloat16(from + at) * up));
    // what is not finite has no integer
    return largest <= std::numeric_limits<float>::max() ? largest / 127.f : NAN;
  }

#if WIDE
  // Bytes of some rows and their sums to where they belong.
  static void put_bytes(const int8_t (*bytes)[SHARED], long rows, long width, int32_t* fours, int32_t* minus,
                        int32_t* pair) {
    const Mask few = lanes(0, rows), twice = few | few << 8;
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
            sum = add_fours(sum, _mm512_set1_epi8(1), x);
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
#else
  // Bytes of some rows and their sums to where they belong.
  static void put_bytes(const int8_t (*bytes)[SHARED], long rows, long width, int32_t* fours, int32_t* minus,
                        int32_t* pair) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    for (long at = 0; at < width; at += GROUP_SUM, fours += 8 * rows, minus += 3 * rows) {
      const bool is_second = at / GROUP_SUM % 2;
      for (long r = 0; r < rows; r++) {
        const __m256i x = _mm256_load_si256((const __m256i*)(bytes[r] + at));
        alignas(32) int32_t four[8];
        _mm256_store_si256((__m256i*)four, _mm256_shuffle_epi8(x, order));
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) fours[i * rows + r] = four[i];
        const __m256i twos = _mm256_maddubs_epi16(_mm256_set1_epi8(1), x), one = _mm256_set1_epi16(1);
        const __m256i sum = _mm256_madd_epi16(twos, one);  // of fours, whose order within a half does not matter
        const int low = sum_of_four(_mm256_castsi256_si128(sum)), high = sum_of_four(_mm256_extracti128_si256(sum, 1));
        minus[r] = -low, minus[rows + r] = -high, minus[2 * rows + r] = -low - high;
        int16_t* of_pair = (int16_t*)(pair + r);
        of_pair[is_second] = int16_t(low + high);
        if (!is_second) of_pair[1] = 0;
      }
      if (is_second) pair += rows;
    }
  }

  static int sum_of_four(__m128i x) {
    x = _mm_add_epi32(x, _mm_unpackhi_epi64(x, x));
    return _mm_cvtsi128_si32(x) + _mm_extract_epi32(x, 1);
  }
#endif
};

// Columns whose activations share a factor: those of a block.  One factor for SHARED columns of types with small blocks
// would save a product for each group, and costs 3 % of the perplexity of a model of 135 million parameters.
template <class T>
constexpr int SHARING = T::BLOCK;

// What SHARED columns make, before anything is added: whole numbers where scales are bytes.
template <class T>
inline auto nothing() {
  if constexpr (T::NESTED) return no_ints();
  else return splat(0.f);
}

// R rows from `first` on times one strip of TILE rows of weights.  Products take 4 or 5 cycles and start up to twice a
// cycle, so ten sums are to be in progress: both halves of a tile are taken at once, with the same activations, where
// registers allow.  All in one function: in parts, gcc keeps sums in memory.  A block of types whose scales are bytes has
// SHARED columns.
template <class T, int R>
void multiply_strip(const uint8_t* strip, const ByteRows& a, long first, Floats (*out)[R]) {
  static_assert(!T::NESTED || T::BLOCK == SHARED);
  constexpr int HALVES = WIDE || R <= 2 ? 2 : 1;  // of a tile at a time
  constexpr bool OWN_FACTOR = SHARING<T> < SHARED;  // each group has one
  const int8_t* x = a.x + first * a.columns;
  const float* factors = a.factors + first * a.n_factors;
  const int32_t* negated = a.negated + first * 3 * a.groups;
  const int16_t* sums = (const int16_t*)(a.sums + first * a.pairs);
  Floats total[2][R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) total[0][r] = total[1][r] = splat(0.f);
  for (long from = 0; from < a.columns; from += SHARED) {
    const long stop = from + SHARED < a.columns ? from + SHARED : a.columns;
    const uint8_t* tile = strip + from / T::BLOCK * T::BYTES;
    const uint8_t* first_tile = tile;
#pragma GCC unroll 2
    for (int begin = 0; begin < 2; begin += HALVES) {
      tile = first_tile;
      decltype(nothing<T>()) part[HALVES][R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) part[h][r] = nothing<T>();
      if (T::NESTED && !begin) prefetch_ahead(tile, T::FIRST_GROUP);  // 10 lines left out halve what a Zen 4 reads
      const int n = T::NESTED ? T::GROUPS : (stop - from) / T::GROUP;  // known, or few rows wait for memory
      for (int i = 0; i < n; i++) {
        const int g = T::NESTED ? i : 0;
        const long column = from + i * T::GROUP;
        if (!T::NESTED) {
          if (i) tile += T::BYTES;
          if (!begin) prefetch_ahead(tile, T::FIRST_GROUP);
        }
        const uint8_t* half[2] = {half_group<T>(tile, g, begin), half_group<T>(tile, g, 1)};
        prefetch_ahead(half[0], HALVES * T::HALF_BYTES);
        Ints sum[HALVES][R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int h = 0; h < HALVES; h++) {
            sum[h][r] = no_ints();
            if constexpr (Products<T>::OFFSET != 0) {
              const long of = column / GROUP_SUM * 3 + (T::GROUP == GROUP_SUM ? 2 : column / T::GROUP % 2);
              sum[h][r] = shift_left<__builtin_ctz(Products<T>::OFFSET)>(splat_int(negated[of * R + r]));
            }
          }
#pragma GCC unroll 8
        for (int run = 0; run < T::GROUP / 4; run += Products<T>::RUN) {
          Ints products[HALVES][R];
#pragma GCC unroll 2
          for (int h = 0; h < HALVES; h++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) products[h][r] = Products<T>::begin(sum[h][r]);
#pragma GCC unroll 8
          for (int i = run; i < run + Products<T>::RUN; i++) {
            Ints w[HALVES];
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) w[h] = bytes_of<T, Products<T>::SIGNED>(half[h], i);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
              const Ints same = same_in_all(x + column * R + 4 * (R * i + r));
#pragma GCC unroll 2
              for (int h = 0; h < HALVES; h++) products[h][r] = Products<T>::add(products[h][r], w[h], same);
            }
          }
#pragma GCC unroll 2
          for (int h = 0; h < HALVES; h++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[h][r] = Products<T>::end(sum[h][r], products[h][r]);
        }
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
          if constexpr (T::NESTED) {
            const Ints scale = whole_scale<T>(tile, g, begin + h);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) part[h][r] = add_ints(part[h][r], multiply_ints(sum[h][r], scale));
          } else {
            const Floats d = tile_scale<T>(tile, begin + h), m = tile_minimum<T>(tile, begin + h);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
              const float factor = OWN_FACTOR ? factors[column / T::BLOCK * R + r] : 1.f;
              const Floats scale = OWN_FACTOR ? d * splat(factor) : d;
              part[h][r] = add_product(to_floats(sum[h][r]), scale, part[h][r]);
              if constexpr (T::MIN != 0) {
                const float least = sums[sum_at(column, r, R)];
                part[h][r] = add_product(m, splat(OWN_FACTOR ? least * factor : least), part[h][r]);
              }
            }
          }
        }
      }
      if constexpr (T::NESTED) {
        Ints least[HALVES][R];
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++)
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) least[h][r] = no_ints();
        if constexpr (T::MIN != 0)
          for (int g = 0; g < T::GROUPS; g += 2) {
            Ints pair[HALVES];
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) pair[h] = whole_minima<T>(tile, g, begin + h);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
              const Ints same = same_in_all(sums + sum_at(from + g * T::GROUP, r, R));
#pragma GCC unroll 2
              for (int h = 0; h < HALVES; h++) least[h][r] = add_pairs(least[h][r], pair[h], same);
            }
          }
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
          const Floats d = tile_scale<T>(tile, begin + h), m = tile_minimum<T>(tile, begin + h);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
            const Floats factor = splat(factors[from / SHARED * R + r]);
            Floats& all = total[begin + h][r];
            all = add_product(to_floats(part[h][r]), d * factor, all);
            if constexpr (T::MIN != 0) all = add_product(to_floats(least[h][r]), m * factor, all);
          }
        }
      } else {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
          for (int h = 0; h < HALVES; h++) {
            Floats& all = total[begin + h][r];
            if constexpr (OWN_FACTOR) all = all + part[h][r];
            else all = add_product(part[h][r], splat(factors[from / SHARED * R + r]), all);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) out[0][r] = total[0][r], out[1][r] = total[1][r];
}

// Where products go: [n][stride] of float32 or bfloat16.
struct Output {
  void* numbers;
  long stride, is_float;

  void put(long row, long column, Mask lanes, Floats x) const {
    const long at = row * stride + column;
    if (is_float) store((float*)numbers + at, lanes, x);
    else store_bfloat16((uint16_t*)numbers + at, lanes, x);
  }
};

// A strip of a matrix times R rows, to columns from `column` on.
template <class T, int R>
void multiply_rows(const uint8_t* tile, const ByteRows& a, long first, long width, const Output& out, long row,
                   long column) {
  Floats found[2][R];
  multiply_strip<T, R>(tile, a, first, found);
  for (long at = 0; at < width; at += 16)
    for (long r = 0; r < R; r++) out.put(row + first + r, column + at, lanes(at, width), found[at / 16][r]);
}

// Strips from `begin` to `end` of a matrix with `n_out` rows times rows of activations from `row` to `stop`, to rows of
// `out` from `out_row` and to columns from `column` on.
template <class T>
void multiply_strips(const uint8_t* tiles, const ByteRows& a, long row, long stop, long n_out, long begin, long end,
                     const Output& out, long out_row, long column) {
  const long strip_bytes = a.columns / T::BLOCK * T::BYTES;
  for (long strip = begin; strip < end; strip++) {
    const long at = TILE * strip, width = n_out - at < TILE ? n_out - at : TILE;
    for (long first = row; first < stop; first += MAX_ROWS) {
      const auto rows = [&](auto run) { run(tiles + strip * strip_bytes, a, first, width, out, out_row, column + at); };
      const long left = stop - first < MAX_ROWS ? stop - first : MAX_ROWS;
      if constexpr (WIDE) switch (left) {
        case 5: rows(multiply_rows<T, 5>); continue;
        case 6: rows(multiply_rows<T, 6>); continue;
        case 7: rows(multiply_rows<T, 7>); continue;
        case 8: rows(multiply_rows<T, 8>); continue;
      }
      switch (left) {
        case 1: rows(multiply_rows<T, 1>); break;
        case 2: rows(multiply_rows<T, 2>); break;
        case 3: rows(multiply_rows<T, 3>); break;
        case 4: rows(multiply_rows<T, 4>); break;
      }
    }
  }
}
