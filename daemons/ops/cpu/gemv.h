// Few rows of activations times tiles of packed weights, and tiles to plain bfloat16 rows.
//
// A row's result does not depend on the rows beside it: each is summed by the same instructions in the same order.
#pragma once
#include <omp.h>

#include "tiles.h"

constexpr int MAX_ROWS = 8;  // of activations in registers at a time
constexpr int AHEAD = 8192;  // bytes that few rows prefetch: the processor alone stops at 30 of 36 GB/s a thread
constexpr int SUM = 32;      // columns whose activations are summed, for minima

// Strips of 16 rows of weights that are multiplied together: `vdpbf16ps` takes 6 cycles and starts twice a cycle, so 12
// sums are to be in progress, and a pair of activations is loaded for all of them at once.
constexpr int strips_together(int rows) { return rows <= 3 ? 4 : rows <= 5 ? 3 : 2; }

// Activations bfloat16 [n][columns], and their sums [n][columns / SUM].
struct Activations {
  const uint16_t* x;
  const float* sums;
  long n, columns;
};

// R rows from `first` on times S strips, `strip_bytes` apart; beyond `strips` the last is taken again.
template <class T, int R, int S>
void multiply_strip(const uint8_t* tiles, long strip_bytes, long strips, const Activations& a, long first,
                    Floats (*out)[MAX_ROWS]) {
  const Decoder<T> decoder;
  const uint16_t* x = a.x + first * a.columns;
  const float* sums = a.sums + first * (a.columns / SUM);
  const uint8_t* tile[S];
  Floats total[S][R];
#pragma GCC unroll 4
  for (int s = 0; s < S; s++) {
    tile[s] = tiles + (s < strips ? s : strips - 1) * strip_bytes;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[s][r] = splat(0.f);
  }
  const long ahead = S * strip_bytes < AHEAD ? S * strip_bytes : AHEAD;
  for (long at = 0; at < a.columns; at += T::BLOCK) {
    Floats d[S], m[S];
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) d[s] = load_half(tile[s]), m[s] = tile_minimum<T>(tile[s]);
    for (int g = 0; g < T::GROUPS; g++) {
      const uint8_t* group[S];
      Floats part[S][R];
#pragma GCC unroll 4
      for (int s = 0; s < S; s++) {
        group[s] = tile[s] + T::FIRST_GROUP + g * T::GROUP_BYTES;
        if constexpr (R <= 4)
          for (int i = 0; i < T::GROUP_BYTES; i += 64) _mm_prefetch((const char*)group[s] + ahead + i, _MM_HINT_T0);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) part[s][r] = splat(0.f);
      }
      const uint16_t* columns = x + at + g * T::GROUP;
#pragma GCC unroll 16
      for (int p = 0; p < T::GROUP / 2; p++) {
        __m512bh w[S];
#pragma GCC unroll 4
        for (int s = 0; s < S; s++) w[s] = decoder.pair(group[s], p);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          int32_t pair;
          memcpy(&pair, columns + r * a.columns + 2 * p, 4);
          const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
          for (int s = 0; s < S; s++) part[s][r] = _mm512_dpbf16_ps(part[s][r], w[s], both);
        }
      }
#pragma GCC unroll 4
      for (int s = 0; s < S; s++) {
        const Floats scale = group_scale<T>(tile[s], g, d[s]);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) total[s][r] = _mm512_fmadd_ps(scale, part[s][r], total[s][r]);
        if constexpr (T::MIN != 0) {
          const Floats minimum = group_minimum<T>(tile[s], g, m[s]);
          const float* sum = sums + (at + g * T::GROUP) / SUM;
#pragma GCC unroll 8
          for (int r = 0; r < R; r++)
            total[s][r] = _mm512_fmadd_ps(minimum, splat(sum[r * (a.columns / SUM)]), total[s][r]);
        }
      }
    }
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) tile[s] += T::BYTES;
  }
#pragma GCC unroll 4
  for (int s = 0; s < S; s++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) out[s][r] = total[s][r];
}

// Strips from `begin` to `end` of a matrix times R rows from `first` on.
template <class T, int R>
void multiply_rows(const uint8_t* tiles, const Activations& a, long first, long n_out, long begin, long end,
                   uint16_t* out, long out_stride) {
  constexpr int S = strips_together(R);
  const long strip_bytes = a.columns / T::BLOCK * T::BYTES;
  for (long strip = begin; strip < end; strip += S) {
    Floats found[S][MAX_ROWS];
    multiply_strip<T, R, S>(tiles + strip * strip_bytes, strip_bytes, end - strip, a, first, found);
    for (long s = 0; s < S && strip + s < end; s++) {
      const long left = n_out - 16 * (strip + s);
      const __mmask16 mask = left >= 16 ? 0xffff : (1 << left) - 1;
      for (long r = 0; r < R; r++)
        _mm256_mask_storeu_epi16(out + (first + r) * out_stride + 16 * (strip + s), mask, to_bfloat16(found[s][r]));
    }
  }
}

template <class T>
void multiply_strips(const uint8_t* tiles, const Activations& a, long n_out, long begin, long end, uint16_t* out,
                     long out_stride) {
  for (long first = 0; first < a.n; first += MAX_ROWS) {
    const auto rows = [&](auto run) { run(tiles, a, first, n_out, begin, end, out, out_stride); };
    switch (a.n - first) {
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

// Sums of SUM neighbouring activations.
inline void sum_columns(const uint16_t* x, long n, float* sums) {
  for (long at = 0; at < n; at += SUM)
    sums[at / SUM] = _mm512_reduce_add_ps(_mm512_add_ps(load_bfloat16(x + at), load_bfloat16(x + at + 16)));
}

// One strip to 16 plain rows, rounded as daemons/weights/dequant.py computes them.
template <class T>
void dequantise_strip(const uint8_t* tile, long n_columns, long n_rows, uint16_t* out) {
  const Decoder<T> decoder;
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
  for (long at = 0; at < n_columns; at += T::BLOCK, tile += T::BYTES) {
    const Floats d = load_half(tile), m = tile_minimum<T>(tile);
    for (int c = 0; c < T::BLOCK; c += 32) {
      __m512i rows[16];
#pragma GCC unroll 16
      for (int p = 0; p < 16; p++) {
        const int g = (c + 2 * p) / T::GROUP;
        const uint8_t* group = tile + T::FIRST_GROUP + g * T::GROUP_BYTES;
        const __m512i w = (__m512i)decoder.pair(group, p % (T::GROUP / 2));
        const Floats scale = group_scale<T>(tile, g, d);
        Floats a = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), scale);
        Floats b = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(w, upper)), scale);
        if constexpr (T::MIN != 0) {
          const Floats minimum = group_minimum<T>(tile, g, m);
          a = _mm512_add_ps(a, minimum), b = _mm512_add_ps(b, minimum);
        }
        const __m512i low = _mm512_cvtepu16_epi32(to_bfloat16(a)), high = _mm512_cvtepu16_epi32(to_bfloat16(b));
        rows[p] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
      }
      transpose(rows);
      for (long r = 0; r < n_rows; r++) _mm512_storeu_si512(out + r * n_columns + at + c, rows[r]);
    }
  }
}

template <class T>
void dequantise_strips(const uint8_t* tiles, long n_columns, long begin, long n_rows, uint16_t* out) {
  const long strip_bytes = n_columns / T::BLOCK * T::BYTES;
#pragma omp parallel for
  for (long at = 0; at < n_rows; at += 16)
    dequantise_strip<T>(tiles + (begin + at / 16) * strip_bytes, n_columns, n_rows - at < 16 ? n_rows - at : 16,
                        out + at * n_columns);
}
