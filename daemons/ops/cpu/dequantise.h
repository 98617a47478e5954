// Tiles of packed weights to plain bfloat16 rows.
#pragma once
#include "tiles.h"

// With AVX2, where plain rows are for tests alone, unrolled loops would take a tenth of the time of all compilation.
constexpr int UNROLLED = WIDE ? 16 : 1, PAIRS_OF_GROUPS = WIDE ? 2 : 1;

// Half a strip to 16 plain rows, rounded as daemons/weights/dequant.py computes them.
template <class T>
void dequantise_half(const uint8_t* tile, int half, long n_columns, long n_rows, uint16_t* out) {
  const Decoder<T> decoder;
  for (long at = 0; at < n_columns; at += T::BLOCK, tile += T::BYTES) {
    const Floats d = tile_scale<T>(tile, half), m = tile_minimum<T>(tile, half);
    for (int c = 0; c < T::BLOCK; c += 32) {
      Ints rows[16];
#pragma GCC unroll PAIRS_OF_GROUPS
      for (int k = 0; k < 32 / T::GROUP; k++) {
        const int g = c / T::GROUP + k;
        const uint8_t* group = half_group<T>(tile, g, half);
        const Floats scale = group_scale<T>(tile, g, half, d);
        const Floats minimum = T::MIN ? group_minimum<T>(tile, g, half, m) : splat(0.f);
#pragma GCC unroll UNROLLED
        for (int p = 0; p < T::GROUP / 2; p++) {
          Floats a, b;
          decoder.pair(group, p, a, b);
          a = a * scale, b = b * scale;
          if constexpr (T::MIN != 0) a = a + minimum, b = b + minimum;
          rows[k * T::GROUP / 2 + p] = to_bfloat16_pairs(a, b);
        }
      }
      transpose(rows);
      if (n_rows == 16) {  // known, so that the rows stay in registers
#pragma GCC unroll UNROLLED
        for (int r = 0; r < 16; r++) store_ints(out + r * n_columns + at + c, rows[r]);
      } else {
        for (long r = 0; r < n_rows; r++) store_ints(out + r * n_columns + at + c, rows[r]);
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
