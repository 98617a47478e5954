// Tiles of packed weights to plain bfloat16 rows.
#pragma once
#include "tiles.h"

// Half a strip to 16 plain rows, rounded as daemons/weights/dequant.py computes them.
template <class T>
void dequantise_half(const uint8_t* tile, int half, long n_columns, long n_rows, uint16_t* out) {
  const Decoder<T> decoder;
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
  for (long at = 0; at < n_columns; at += T::BLOCK, tile += T::BYTES) {
    const Floats d = load_half(tile + TILE * half), m = tile_minimum<T>(tile, half);
    for (int c = 0; c < T::BLOCK; c += 32) {
      __m512i rows[16];
#pragma GCC unroll 2
      for (int k = 0; k < 32 / T::GROUP; k++) {
        const int g = c / T::GROUP + k;
        const uint8_t* group = half_group<T>(tile, g, half);
        const Floats scale = group_scale<T>(tile, g, half, d);
        const Floats minimum = T::MIN ? group_minimum<T>(tile, g, half, m) : splat(0.f);
#pragma GCC unroll 16
        for (int p = 0; p < T::GROUP / 2; p++) {
          const __m512i w = (__m512i)decoder.pair(group, p);
          Floats a = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), scale);
          Floats b = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(w, upper)), scale);
          if constexpr (T::MIN != 0) a = _mm512_add_ps(a, minimum), b = _mm512_add_ps(b, minimum);
          const __m512i low = _mm512_cvtepu16_epi32(to_bfloat16(a)), high = _mm512_cvtepu16_epi32(to_bfloat16(b));
          rows[k * T::GROUP / 2 + p] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
        }
      }
      transpose(rows);
      if (n_rows == 16) {  // known, so that the rows stay in registers
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) _mm512_storeu_si512(out + r * n_columns + at + c, rows[r]);
      } else {
        for (long r = 0; r < n_rows; r++) _mm512_storeu_si512(out + r * n_columns + at + c, rows[r]);
      }
    }
  }
}

// Both halves of a strip by one thread: their bytes alternate.
template <class T>
void dequantise_strips(const uint8_t* tiles, long n_columns, long begin, long n_rows, uint16_t* out) {
  const long strip_bytes = n_columns / T::BLOCK * T::BYTES;
#pragma omp parallel for
  for (long first = 0; first < n_rows; first += TILE)
    for (long at = first; at < n_rows && at < first + TILE; at += 16)
      dequantise_half<T>(tiles + (begin + at / TILE) * strip_bytes, at / 16 % 2, n_columns,
                         n_rows - at < 16 ? n_rows - at : 16, out + at * n_columns);
}
