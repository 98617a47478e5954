// Rows of activations times tiles of packed weights, in integers.
//
// Activations are 8-bit integers times a factor for each row and SHARED columns, so that `vpdpbusd` adds products with
// codes without rounding.  A group's sum is multiplied by its scale in float32.  A row's result does not depend on the
// rows beside it: each is summed by the same instructions in the same order.
#pragma once
#include "tiles.h"

constexpr int MAX_ROWS = 8;  // of activations in registers at a time
constexpr int AHEAD = 8192;  // bytes that are prefetched: the processor alone stops at 30 of 36 GB/s a thread
constexpr int SHARED = 32;   // columns whose activations share a factor
constexpr int SHORT = 16;    // columns of the smallest group

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

// Activations as bytes [n][columns], in the order of a tile's columns; factors and `sums`, those of the activations,
// [n][columns / SHARED]; `totals`, those of the bytes, [n][columns / SHORT].
struct ByteRows {
  int8_t* x;
  float *factors, *sums;
  int32_t* totals;
  long n, columns;

  static long floats(long columns) { return columns / 4 + 2 * (columns / SHARED) + columns / SHORT; }
  ByteRows(float* memory, long n, long columns) : n(n), columns(columns) {
    factors = memory, sums = factors + n * (columns / SHARED);
    totals = (int32_t*)(sums + n * (columns / SHARED));
    x = (int8_t*)(totals + n * (columns / SHORT));
  }

  // SHARED columns from `at` on of all rows one after the other.
  void put(long at, const uint16_t* from) const {
    const Floats a = load_bfloat16(from + at), b = load_bfloat16(from + at + 16);
    const __m512i bits = _mm512_castps_si512(_mm512_abs_ps(a)), others = _mm512_castps_si512(_mm512_abs_ps(b));
    const float largest = _mm512_cvtss_f32(_mm512_castsi512_ps(
        _mm512_set1_epi32(_mm512_reduce_max_epi32(_mm512_max_epi32(bits, others)))));  // NaN is the largest
    const float up = largest > 1e-35f ? 127.f / largest : 0.f;
    const __m512i p = _mm512_cvtps_epi32(_mm512_mul_ps(a, splat(up)));
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(b, splat(up)));
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    _mm_storeu_si128((__m128i*)(x + at), _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(p), order));
    _mm_storeu_si128((__m128i*)(x + at + 16), _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(q), order));
    const int first = _mm512_reduce_add_epi32(p), second = _mm512_reduce_add_epi32(q);
    totals[at / SHORT] = first, totals[at / SHORT + 1] = second;
    // what is not finite has no integer
    const float factor = largest <= std::numeric_limits<float>::max() ? largest / 127.f : NAN;
    factors[at / SHARED] = factor, sums[at / SHARED] = factor * float(first + second);
  }
};

// R rows from `first` on times one strip of TILE rows of weights.  Products take 4 or 5 cycles and start up to twice a
// cycle, so ten sums are to be in progress: both halves of a tile are taken at once, with the same activations.
template <class T, int R>
void multiply_strip(const uint8_t* tile, const ByteRows& a, long first, Floats (*out)[R]) {
  const int8_t* x = a.x + first * a.columns;
  const long shared = a.columns / SHARED;
  const float *factors = a.factors + first * shared, *sums = a.sums + first * shared;
  const int32_t* totals = a.totals + first * (a.columns / SHORT);
  Floats total[2][R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) total[0][r] = total[1][r] = splat(0.f);
  for (long at = 0; at < a.columns; at += T::BLOCK, tile += T::BYTES) {
    prefetch_ahead(tile, T::FIRST_GROUP);  // 10 lines left out halve what a Zen 4 reads
    const Floats d[2] = {load_half(tile), load_half(tile + TILE)};
    const Floats m[2] = {tile_minimum<T>(tile, 0), tile_minimum<T>(tile, 1)};
    for (int g = 0; g < T::GROUPS; g++) {
      const uint8_t* half[2] = {half_group<T>(tile, g, 0), half_group<T>(tile, g, 1)};
      prefetch_ahead(half[0], T::GROUP_BYTES);
      const long column = at + g * T::GROUP;
      __m512i sum[2][R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        sum[0][r] = sum[1][r] = _mm512_setzero_si512();
        if constexpr (T::OFFSET != 0) {
          const int32_t* of = totals + r * (a.columns / SHORT) + column / SHORT;
          sum[0][r] = sum[1][r] = _mm512_set1_epi32(-T::OFFSET * (T::GROUP == SHORT ? of[0] : of[0] + of[1]));
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < T::GROUP / 4; i++) {
        const __m512i w[2] = {bytes_of<T>(half[0], i), bytes_of<T>(half[1], i)};
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          int32_t four;
          memcpy(&four, x + r * a.columns + column + 4 * i, 4);
          const __m512i same = _mm512_set1_epi32(four);
          sum[0][r] = add_products(sum[0][r], w[0], same);
          sum[1][r] = add_products(sum[1][r], w[1], same);
        }
      }
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const Floats scale = group_scale<T>(tile, g, h, d[h]);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const Floats factor = _mm512_mul_ps(scale, splat(factors[r * shared + column / SHARED]));
          total[h][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[h][r]), factor, total[h][r]);
        }
        if constexpr (T::MIN != 0) {
          const Floats minimum = group_minimum<T>(tile, g, h, m[h]);
#pragma GCC unroll 8
          for (int r = 0; r < R; r++)
            total[h][r] = _mm512_fmadd_ps(minimum, splat(sums[r * shared + column / SHARED]), total[h][r]);
        }
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
