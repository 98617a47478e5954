// Few rows of activations times tiles of packed weights, and tiles to plain bfloat16 rows.
//
// A row's result does not depend on the rows beside it: each is summed by the same instructions in the same order.
#pragma once
#include <omp.h>

#include "tiles.h"

constexpr int MAX_ROWS = 8;  // of activations in registers at a time
constexpr int AHEAD = 8192;  // bytes that few rows prefetch: the processor alone stops at 30 of 36 GB/s a thread
constexpr int SUM = 16;      // columns whose activations are summed, for minima and biases

// Activations bfloat16 [n][columns], and their sums [n][columns / SUM].
struct Activations {
  const uint16_t* x;
  const float* sums;
  long n, columns;
};

// sum + weights times a pair of activations.  Compilers load the pair by an instruction of its own.
inline __attribute__((always_inline)) Floats multiply_add(Floats sum, __m512bh weights, const uint16_t* x) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*(const uint16_t(*)[2])x));
  return sum;
}

// R rows from `first` on times one strip of 16 rows of weights.
template <class T, int R>
void multiply_strip(const uint8_t* tile, const Activations& a, long first, Floats* out) {
  const Decoder<T> decoder;
  const uint16_t* x = a.x + first * a.columns;
  const float* sums = a.sums + first * (a.columns / SUM);
  Floats total[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) total[r] = splat(0.f);
  for (long at = 0; at < a.columns; at += T::BLOCK, tile += T::BYTES) {
    const Floats d = load_half(tile), m = tile_minimum<T>(tile);
    for (int g = 0; g < T::GROUPS; g++) {
      float sum[R];
      Floats part[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        if constexpr (T::MIN != 0 || T::BIAS != 0) {
          const float* s = sums + r * (a.columns / SUM) + (at + g * T::GROUP) / SUM;
          sum[r] = T::GROUP == SUM ? s[0] : s[0] + s[1];
        }
        part[r] = splat(T::BIAS ? sum[r] * -T::BIAS : 0.f);
      }
      const uint8_t* group = tile + T::FIRST_GROUP + g * T::GROUP_BYTES;
      const uint16_t* columns = x + at + g * T::GROUP;
      if constexpr (R <= 4)
        for (int i = 0; i < T::GROUP_BYTES; i += 64) _mm_prefetch((const char*)group + AHEAD + i, _MM_HINT_T0);
#pragma GCC unroll 16
      for (int p = 0; p < T::GROUP / 2; p++) {
        const __m512bh w = decoder.pair(group, p);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
          part[r] = multiply_add(part[r], w, columns + r * a.columns + 2 * p);
      }
      const Floats scale = group_scale<T>(tile, g, d);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) total[r] = _mm512_fmadd_ps(scale, part[r], total[r]);
      if constexpr (T::MIN != 0) {
        const Floats minimum = group_minimum<T>(tile, g, m);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) total[r] = _mm512_fmadd_ps(minimum, splat(sum[r]), total[r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) out[r] = total[r];
}

template <class T>
void multiply_strips(const uint8_t* tiles, const Activations& a, long n_out, long begin, long end, uint16_t* out,
                     long out_stride) {
  const long strip_bytes = a.columns / T::BLOCK * T::BYTES;
  for (long strip = begin; strip < end; strip++) {
    const uint8_t* tile = tiles + strip * strip_bytes;
    const long left = n_out - 16 * strip;
    const __mmask16 mask = left >= 16 ? 0xffff : (1 << left) - 1;
    for (long first = 0; first < a.n; first += MAX_ROWS) {
      Floats found[MAX_ROWS];
      const long n = a.n - first < MAX_ROWS ? a.n - first : MAX_ROWS;
      switch (n) {
        case 1: multiply_strip<T, 1>(tile, a, first, found); break;
        case 2: multiply_strip<T, 2>(tile, a, first, found); break;
        case 3: multiply_strip<T, 3>(tile, a, first, found); break;
        case 4: multiply_strip<T, 4>(tile, a, first, found); break;
        case 5: multiply_strip<T, 5>(tile, a, first, found); break;
        case 6: multiply_strip<T, 6>(tile, a, first, found); break;
        case 7: multiply_strip<T, 7>(tile, a, first, found); break;
        default: multiply_strip<T, 8>(tile, a, first, found);
      }
      for (long r = 0; r < n; r++)
        _mm256_mask_storeu_epi16(out + (first + r) * out_stride + 16 * strip, mask, to_bfloat16(found[r]));
    }
  }
}

// Sums of SUM neighbouring activations.
inline void sum_columns(const uint16_t* x, long n, float* sums) {
  for (long at = 0; at < n; at += SUM) sums[at / SUM] = _mm512_reduce_add_ps(load_bfloat16(x + at));
}

// 16 x 16 words of 32 bits.
inline void transpose(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
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
        const Floats bias = splat(T::BIAS);
        Floats a = _mm512_mul_ps(_mm512_sub_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), bias), scale);
        Floats b = _mm512_mul_ps(_mm512_sub_ps(_mm512_castsi512_ps(_mm512_and_si512(w, upper)), bias), scale);
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
