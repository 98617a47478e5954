// Few rows of activations times tiles of packed weights, and tiles to plain bfloat16 rows.
//
// A row's result does not depend on the rows beside it: each is summed by the same instructions in the same order.
#pragma once
#include <omp.h>

#include "tiles.h"

constexpr int MAX_ROWS = 8;  // of activations in registers at a time
constexpr int AHEAD = 8192;  // bytes that few rows prefetch: the processor alone stops at 30 of 36 GB/s a thread
constexpr int SUM = 32;      // columns whose activations are summed, for minima

inline __attribute__((always_inline)) void prefetch_ahead(const uint8_t* at, int n_bytes) {
  for (int i = 0; i < n_bytes; i += 64) _mm_prefetch((const char*)at + AHEAD + i, _MM_HINT_T0);
}

// Whether two float32 multiply-adds are faster than a `vdpbf16ps`: an Intel Xeon starts one in 2.2 cycles.
// It adds the odd column first and rounds each sum, so both give the same bits, but for denormals: it takes them as 0.
// One row alone keeps it, since to take pairs apart costs as much.
#if defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr bool HAS_FLOAT_PRODUCTS = false;  // compiles in half the time
#else
constexpr bool HAS_FLOAT_PRODUCTS = true;
#endif
inline bool float_products() { return HAS_FLOAT_PRODUCTS && __builtin_cpu_is("intel"); }
#ifdef __AMX_BF16__
constexpr bool HAS_AMX = true;
#else
constexpr bool HAS_AMX = false;
#endif

// Activations bfloat16 [n][columns], and their sums [n][columns / SUM].  ``wide``: the same as float32, or null.
struct Activations {
  const uint16_t* x;
  const float *sums, *wide;
  long n, columns;
};

// R rows from `first` on times one strip of TILE rows of weights.  `vdpbf16ps` takes 6 cycles and starts twice a cycle,
// so 12 sums are to be in progress: both halves of a tile are taken at once, with the same pair of activations.  WIDE:
// by float32 multiply-adds.
template <class T, int R, bool WIDE>
void multiply_strip(const uint8_t* tile, const Activations& a, long first, Floats (*out)[R]) {
  const Decoder<T> decoder;
  const uint16_t* x = a.x + first * a.columns;
  const float* sums = a.sums + first * (a.columns / SUM);
  const float* wide = a.wide + (WIDE ? first * a.columns : 0);
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
      const uint16_t* columns = x + at + g * T::GROUP;
      Floats part[2][R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) part[0][r] = part[1][r] = splat(0.f);
#pragma GCC unroll 16
      for (int p = 0; p < T::GROUP / 2; p++) {
        const __m512bh w[2] = {decoder.pair(half[0], p), decoder.pair(half[1], p)};
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          if constexpr (WIDE) {
            const float* pair = wide + (at + g * T::GROUP + 2 * p) + r * a.columns;
            const Floats even = splat(pair[0]), odd = splat(pair[1]);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
              const __m512i bits = (__m512i)w[h];
              part[h][r] = _mm512_fmadd_ps(upper_half(bits), odd, part[h][r]);
              part[h][r] = _mm512_fmadd_ps(lower_half(bits), even, part[h][r]);
            }
            continue;
          }
          int32_t pair;
          memcpy(&pair, columns + r * a.columns + 2 * p, 4);
          const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
          part[0][r] = _mm512_dpbf16_ps(part[0][r], w[0], both);
          part[1][r] = _mm512_dpbf16_ps(part[1][r], w[1], both);
        }
      }
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const Floats scale = group_scale<T>(tile, g, h, d[h]);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) total[h][r] = _mm512_fmadd_ps(scale, part[h][r], total[h][r]);
        if constexpr (T::MIN != 0) {
          const Floats minimum = group_minimum<T>(tile, g, h, m[h]);
          const float* sum = sums + (at + g * T::GROUP) / SUM;
#pragma GCC unroll 8
          for (int r = 0; r < R; r++)
            total[h][r] = _mm512_fmadd_ps(minimum, splat(sum[r * (a.columns / SUM)]), total[h][r]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) out[0][r] = total[0][r], out[1][r] = total[1][r];
}

// Strips from `begin` to `end` of a matrix times R rows from `first` on.
template <class T, int R, bool WIDE>
void multiply_rows(const uint8_t* tiles, const Activations& a, long first, long n_out, long begin, long end,
                   uint16_t* out, long out_stride) {
  const long strip_bytes = a.columns / T::BLOCK * T::BYTES;
  for (long strip = begin; strip < end; strip++) {
    Floats found[2][R];
    multiply_strip<T, R, WIDE>(tiles + strip * strip_bytes, a, first, found);
    for (long half = 0; half < 2; half++) {
      const long at = TILE * strip + 16 * half;
      if (at >= n_out) break;
      for (long r = 0; r < R; r++)
        _mm256_mask_storeu_epi16(out + (first + r) * out_stride + at, lanes(at, n_out), to_bfloat16(found[half][r]));
    }
  }
}

template <class T, bool WIDE>
void multiply_all_rows(const uint8_t* tiles, const Activations& a, long n_out, long begin, long end, uint16_t* out,
                       long out_stride) {
  for (long first = 0; first < a.n; first += MAX_ROWS) {
    const auto rows = [&](auto run) { run(tiles, a, first, n_out, begin, end, out, out_stride); };
    switch (a.n - first) {
      case 1: rows(multiply_rows<T, 1, false>); break;
      case 2: rows(multiply_rows<T, 2, WIDE>); break;
      case 3: rows(multiply_rows<T, 3, WIDE>); break;
      case 4: rows(multiply_rows<T, 4, WIDE>); break;
      case 5: rows(multiply_rows<T, 5, WIDE>); break;
      case 6: rows(multiply_rows<T, 6, WIDE>); break;
      case 7: rows(multiply_rows<T, 7, WIDE>); break;
      default: rows(multiply_rows<T, 8, WIDE>);
    }
  }
}

template <class T>
void multiply_strips(const uint8_t* tiles, const Activations& a, long n_out, long begin, long end, uint16_t* out,
                     long out_stride) {
  if constexpr (HAS_FLOAT_PRODUCTS)
    if (a.wide) return multiply_all_rows<T, true>(tiles, a, n_out, begin, end, out, out_stride);
  multiply_all_rows<T, false>(tiles, a, n_out, begin, end, out, out_stride);
}

// Sums of SUM neighbouring activations.
inline void sum_columns(const uint16_t* x, long n, float* sums) {
  for (long at = 0; at < n; at += SUM)
    sums[at / SUM] = _mm512_reduce_add_ps(_mm512_add_ps(load_bfloat16(x + at), load_bfloat16(x + at + 16)));
}

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
