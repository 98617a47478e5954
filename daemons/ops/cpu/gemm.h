// Many rows of activations times tiles of packed weights, in integers.
//
// Activations are 16-bit integers times a power of two for each row and CHUNK columns.  Numbers down to 2^-7 of a
// chunk's largest are exact, smaller ones are rounded to 2^-15 of it.  Codes are integers; `vpdpwssd` adds their
// products without rounding, and a group's sum is multiplied by its scale in float32.  A row's result does not depend
// on the rows beside it.
#pragma once
#include <vector>

#include "gemv.h"

constexpr int CHUNK = 256;      // columns whose activations share an exponent
constexpr int BLOCK_ROWS = 12;  // of activations: 24 sums, two vectors of weights and a pair fill the registers
constexpr long MAX_BLOCKS = 86;  // at a time: 1,024 rows fit, and activations take some 35 MB at most

// Sums of products of pairs.  A hypervisor may hide `vpdpwssd` from a cpu that has bfloat16 products.
inline __m512i add_products(__m512i sum, __m512i w, __m512i x) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(sum, w, x);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
#endif
}

// Whether many rows are faster this way than by oneDNN's bfloat16 products: `vpdpwssd` starts twice a cycle everywhere.
#ifdef __AVX512VNNI__
inline bool integer_products() { return float_products() && !HAS_AMX; }
#else
inline bool integer_products() { return false; }
#endif

// Rows of activations in blocks of BLOCK_ROWS, which adjoin: pairs of columns, of each SUM columns the sum, of each
// CHUNK the factor.
struct IntegerRows {
  int32_t* pairs;
  float *sums, *factors;
  long columns;

  long chunks() const { return (columns + CHUNK - 1) / CHUNK; }
  int32_t* pairs_of(long block) const { return pairs + block * BLOCK_ROWS * (columns / 2); }
  float* sums_of(long block) const { return sums + block * BLOCK_ROWS * (columns / SUM); }
  float* factors_of(long block) const { return factors + block * BLOCK_ROWS * chunks(); }

  // Row `r` of a block.
  void put(long block, long r, const uint16_t* x) const {
    int32_t* pairs = pairs_of(block) + r;
    float *sums = sums_of(block) + r, *factors = factors_of(block) + r;
    for (long at = 0; at < columns; at += CHUNK) {
      const long end = at + CHUNK < columns ? at + CHUNK : columns;
      __m512i largest = _mm512_setzero_si512();
      for (long c = at; c < end; c += SUM)
        largest = _mm512_max_epu16(largest, _mm512_and_si512(_mm512_loadu_si512(x + c), _mm512_set1_epi16(0x7fff)));
      alignas(64) uint16_t found[SUM];
      _mm512_store_si512(found, largest);
      const int exponent = std::max(14, *std::max_element(found, found + SUM) >> 7);
      const Floats up = splat(std::ldexp(1.f, 141 - exponent));  // the largest to 2^14 or more
      // what is not finite has no integer
      factors[at / CHUNK * BLOCK_ROWS] = exponent == 255 ? NAN : std::ldexp(1.f, exponent - 141);
      for (long c = at; c < end; c += SUM) {
        alignas(64) int32_t both[SUM / 2];
        __m512i total = _mm512_setzero_si512();
        for (int half = 0; half < 2; half++) {
          const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(load_bfloat16(x + c + 16 * half), up));
          total = _mm512_add_epi32(total, q);
          _mm256_store_si256((__m256i*)both + half, _mm512_cvtsepi32_epi16(q));
        }
        sums[c / SUM * BLOCK_ROWS] = float(_mm512_reduce_add_epi32(total));
        for (int p = 0; p < SUM / 2; p++) pairs[(c / 2 + p) * BLOCK_ROWS] = both[p];
      }
    }
  }

  void clear(long block, long r) const {
    for (long i = 0; i < columns / 2; i++) pairs_of(block)[i * BLOCK_ROWS + r] = 0;
    for (long i = 0; i < columns / SUM; i++) sums_of(block)[i * BLOCK_ROWS + r] = 0.f;
    for (long i = 0; i < chunks(); i++) factors_of(block)[i * BLOCK_ROWS + r] = 0.f;
  }
};

// A strip of weights as integers: of each pair of columns both halves; of each group the scales of both, then minima.
struct Panel {
  __m512i* codes;
  Floats* scales;
};

template <class T>
void unpack_strip(const uint8_t* tile, long columns, const Panel& panel) {
  const Decoder<T, true> decoder;
  constexpr int STEP = T::MIN ? 4 : 2;
  __m512i* codes = panel.codes;
  Floats* scales = panel.scales;
  for (long at = 0; at < columns; at += T::BLOCK, tile += T::BYTES)
    for (int g = 0; g < T::GROUPS; g++, codes += T::GROUP, scales += STEP)
      for (int h = 0; h < 2; h++) {
        const uint8_t* group = half_group<T>(tile, g, h);
        scales[h] = group_scale<T>(tile, g, h, load_half(tile + TILE * h));
        if constexpr (T::MIN != 0) scales[2 + h] = group_minimum<T>(tile, g, h, tile_minimum<T>(tile, h));
#pragma GCC unroll 16
        for (int p = 0; p < T::GROUP / 2; p++) codes[2 * p + h] = decoder.integers(group, p);
      }
}

// A block of rows times a strip.
template <class T>
void multiply_panel(const Panel& panel, const IntegerRows& rows, long block, Floats (*total)[BLOCK_ROWS]) {
  constexpr int STEP = T::MIN ? 4 : 2;
  const int32_t* pair = rows.pairs_of(block);
  const float *sums = rows.sums_of(block), *factors = rows.factors_of(block);
  const __m512i* codes = panel.codes;
  const Floats* scales = panel.scales;
  for (int r = 0; r < BLOCK_ROWS; r++) total[0][r] = total[1][r] = splat(0.f);
  for (long at = 0; at < rows.columns; at += CHUNK, factors += BLOCK_ROWS) {
    const long end = at + CHUNK < rows.columns ? at + CHUNK : rows.columns;
    Floats part[2][BLOCK_ROWS];
    for (int r = 0; r < BLOCK_ROWS; r++) part[0][r] = part[1][r] = splat(0.f);
    for (long c = at; c < end; c += T::GROUP, scales += STEP) {
      __m512i sum[2][BLOCK_ROWS];
#pragma GCC unroll 12
      for (int r = 0; r < BLOCK_ROWS; r++) sum[0][r] = sum[1][r] = _mm512_setzero_si512();
#pragma GCC unroll 16
      for (int p = 0; p < T::GROUP / 2; p++) {  // unrolled, so that the sums stay in registers
        const __m512i w[2] = {codes[2 * p], codes[2 * p + 1]};
#pragma GCC unroll 12
        for (int r = 0; r < BLOCK_ROWS; r++) {
          const __m512i x = _mm512_set1_epi32(pair[p * BLOCK_ROWS + r]);
          sum[0][r] = add_products(sum[0][r], w[0], x);
          sum[1][r] = add_products(sum[1][r], w[1], x);
        }
      }
      codes += T::GROUP, pair += T::GROUP / 2 * BLOCK_ROWS;
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const Floats scale = scales[h];
#pragma GCC unroll 12
        for (int r = 0; r < BLOCK_ROWS; r++)
          part[h][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[h][r]), scale, part[h][r]);
        if constexpr (T::MIN != 0) {
          const Floats minimum = scales[2 + h];
#pragma GCC unroll 12
          for (int r = 0; r < BLOCK_ROWS; r++)
            part[h][r] = _mm512_fmadd_ps(minimum, splat(sums[c / SUM * BLOCK_ROWS + r]), part[h][r]);
        }
      }
    }
    for (int h = 0; h < 2; h++)
      for (int r = 0; r < BLOCK_ROWS; r++) total[h][r] = _mm512_fmadd_ps(part[h][r], splat(factors[r]), total[h][r]);
  }
}

// Strips from `begin` to `end` of a matrix times n rows.
template <class T>
void multiply_many_rows(const uint8_t* tiles, const IntegerRows& rows, long n, long n_out, long begin, long end,
                        uint16_t* out, long out_stride) {
  static thread_local std::vector<Floats> memory;
  memory.resize(rows.columns * (1 + (T::MIN ? 4 : 2) / double(T::GROUP)) + 1);
  const Panel panel{(__m512i*)memory.data(), memory.data() + rows.columns};
  const long strip_bytes = rows.columns / T::BLOCK * T::BYTES;
  for (long strip = begin; strip < end; strip++) {
    unpack_strip<T>(tiles + strip * strip_bytes, rows.columns, panel);
    for (long first = 0; first < n; first += BLOCK_ROWS) {
      Floats found[2][BLOCK_ROWS];
      multiply_panel<T>(panel, rows, first / BLOCK_ROWS, found);
      for (long half = 0; half < 2; half++) {
        const long at = TILE * strip + 16 * half;
        if (at >= n_out) break;
        for (long r = 0; r < BLOCK_ROWS && first + r < n; r++)
          _mm256_mask_storeu_epi16(out + (first + r) * out_stride + at, lanes(at, n_out), to_bfloat16(found[half][r]));
      }
    }
  }
}
