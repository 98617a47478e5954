// Attention of short slices over pages of 64 positions in place.  Arithmetic is float32.
//
// Positions are taken in spans of SPAN from 0 on, pages one by one: a row's bits depend on what it sees, neither on the
// rows beside it nor on the number of threads.
#pragma once
#include <vector>

#include "avx512.h"

constexpr long PAGE = 64, SPAN = 1024, MAX_DIM = 1024, BLOCK_ROWS = 4, PARALLEL_NUMBERS = 1 << 16;

// Numbers of pages [position][head][width], as bfloat16, float32, float16 or q8_0 (codes and a half scale for 32).
struct Pages {
  const uint8_t* numbers;
  const uint16_t* scales;
  long kind, heads, width, stored;  // stored: numbers a head takes in memory

  template <int KIND>
  Floats load(long slot, long head, long i, __mmask16 mask) const {
    const long at = (slot * heads + head) * stored + i;
    if constexpr (KIND == 0) return load_bfloat16((const uint16_t*)numbers + at, mask);
    if constexpr (KIND == 1) return _mm512_maskz_loadu_ps(mask, (const float*)numbers + at);
    if constexpr (KIND == 2) return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, (const uint16_t*)numbers + at));
    const __m512i codes = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, numbers + at));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(codes), splat(_cvtsh_ss(scales[at / 32])));
  }
};

struct PagedAttention {
  const uint16_t* q;  // [slices n][heads][dim], rows `stride` apart
  Pages keys, values;
  const int32_t* tables;                 // [..][table_stride]
  const int64_t *rows, *starts, *lows;   // [slices]; lows may be null
  uint16_t* out;  // [slices n][heads][value dim]
  long stride, slices, n, heads, table_stride, window, causal;  // window 0: none
  float scale, softcap;

  long group() const { return heads / keys.heads; }
  long query_rows() const { return group() * n; }
  // Positions that a slice sees, and those that the row of a token sees.
  long end(long slice) const { return starts[slice] + n; }
  long first(long slice, long token) const {
    const long low = lows ? lows[slice] : 0, far = window ? starts[slice] + token + 1 - window : 0;
    return low > far ? low : far > 0 ? far : 0;
  }
  long last(long slice, long token) const { return starts[slice] + (causal ? token : n - 1); }

  // Numbers of a row of partial sums: those of the values, then the largest score and the sum of weights.
  long padded() const { return (values.width + LANES - 1) / LANES * LANES; }
  long partial_size() const { return padded() + 2; }

  // One span for BLOCK_ROWS query rows from `row` on of a kv head: their sums and, over `partial`, largest score and
  // weight.  partial [query rows][partial_size()].
  template <int KIND>
  void span(long slice, long head, long at, long row, float* partial) const {
    const long count = query_rows() - row < BLOCK_ROWS ? query_rows() - row : BLOCK_ROWS;
    const long dim = keys.width, dv = padded(), size = partial_size();
    alignas(64) float query[BLOCK_ROWS][MAX_DIM], score[BLOCK_ROWS][PAGE];
    for (long r = 0; r < count; r++) {
      const long token = (row + r) % n, h = head * group() + (row + r) / n;
      const uint16_t* from = q + (slice * n + token) * stride + h * dim;
      for (long i = 0; i < dim; i += LANES) _mm512_store_ps(query[r] + i, load_bfloat16(from + i, lanes(i, dim)));
      float* p = partial + (row + r) * size;
      memset(p, 0, dv * 4), p[dv] = -std::numeric_limits<float>::infinity(), p[dv + 1] = 0.f;
    }
    long from = first(slice, row % n), to = end(slice);
    if (at >= to) return;
    for (long r = 1; r < count; r++) from = std::min(from, first(slice, (row + r) % n));
    from = from > at ? from : at, to = to < at + SPAN ? to : at + SPAN;
    for (long page = from / PAGE; page * PAGE < to; page++) {
      const long low = page * PAGE > from ? 0 : from - page * PAGE;
      const long high = to - page * PAGE < PAGE ? to - page * PAGE : PAGE;
      const long slot = tables[rows[slice] * table_stride + page] * PAGE;
      score_page<KIND>(slice, head, row, count, page * PAGE, slot, low, high, query, score);
      for (long r = 0; r < count; r++) soften(score[r], low, high, dv, partial + (row + r) * size);
      for (long i = 0; i < dv; i += LANES) {
        Floats sum[BLOCK_ROWS];
        for (long r = 0; r < count; r++) sum[r] = _mm512_loadu_ps(partial + (row + r) * size + i);
        for (long j = low; j < high; j++) {
          const Floats v = values.load<KIND>(slot + j, head, i, lanes(i, values.width));
          for (long r = 0; r < count; r++) sum[r] = _mm512_fmadd_ps(splat(score[r][j]), v, sum[r]);
        }
        for (long r = 0; r < count; r++) _mm512_storeu_ps(partial + (row + r) * size + i, sum[r]);
      }
    }
  }

  template <int KIND>
  void score_page(long slice, long head, long row, long count, long position, long slot, long low, long high,
                  const float (*query)[MAX_DIM], float (*score)[PAGE]) const {
    for (long j = low; j < high; j++) {
      Floats sum[BLOCK_ROWS] = {splat(0.f), splat(0.f), splat(0.f), splat(0.f)};
      for (long i = 0; i < keys.width; i += LANES) {
        const Floats k = keys.load<KIND>(slot + j, head, i, lanes(i, keys.width));
        for (long r = 0; r < count; r++) sum[r] = _mm512_fmadd_ps(_mm512_load_ps(query[r] + i), k, sum[r]);
      }
      for (long r = 0; r < count; r++) {
        const long token = (row + r) % n;
        const bool seen = position + j >= first(slice, token) && position + j <= last(slice, token);
        float s = _mm512_reduce_add_ps(sum[r]) * scale;
        if (softcap > 0.f) s = std::tanh(s / softcap) * softcap;
        score[r][j] = seen ? s : -std::numeric_limits<float>::infinity();
      }
    }
  }

  // Scores of a page to weights; what was summed before shrinks to the largest score so far.
  static void soften(float* score, long low, long high, long dv, float* p) {
    float largest = p[dv];
    for (long j = low; j < high; j++) largest = std::max(largest, score[j]);
    if (largest == -std::numeric_limits<float>::infinity()) {
      for (long j = low; j < high; j++) score[j] = 0.f;
      return;
    }
    const float shrink = std::exp(p[dv] - largest);
    float total = p[dv + 1] * shrink;
    for (long j = 0; j < PAGE; j += LANES) {
      alignas(64) float weight[LANES];
      _mm512_store_ps(weight, exponential(_mm512_sub_ps(_mm512_loadu_ps(score + j), splat(largest))));
      for (long i = 0; i < LANES; i++)
        if (j + i >= low && j + i < high) total += score[j + i] = weight[i];
    }
    if (shrink != 1.f)
      for (long i = 0; i < dv; i += LANES)
        _mm512_storeu_ps(p + i, _mm512_mul_ps(_mm512_loadu_ps(p + i), splat(shrink)));
    p[dv] = largest, p[dv + 1] = total;
  }

  // Spans of a query row, in order, to its result.  They lie `apart` numbers from each other.
  void merge(long slice, long head, long row, const float* partial, long spans, long apart) const {
    const long dv = padded();
    float largest = -std::numeric_limits<float>::infinity(), total = 0.f;
    for (long s = 0; s < spans; s++) largest = std::max(largest, partial[s * apart + dv]);
    alignas(64) float sum[MAX_DIM] = {};
    for (long s = 0; s < spans; s++) {
      const float* p = partial + s * apart;
      if (p[dv + 1] == 0.f) continue;
      const float factor = std::exp(p[dv] - largest);
      total += factor * p[dv + 1];
      for (long i = 0; i < dv; i += LANES)
        _mm512_store_ps(sum + i, _mm512_fmadd_ps(splat(factor), _mm512_loadu_ps(p + i), _mm512_load_ps(sum + i)));
    }
    const long token = row % n, h = head * group() + row / n;
    uint16_t* to = out + ((slice * n + token) * heads + h) * values.width;
    for (long i = 0; i < values.width; i += LANES)
      store_bfloat16(to + i, lanes(i, values.width), _mm512_mul_ps(_mm512_load_ps(sum + i), splat(1.f / total)));
  }

  template <int KIND>
  void run(std::vector<float>& memory) const {
    long spans = 1;
    for (long b = 0; b < slices; b++) spans = std::max(spans, (end(b) + SPAN - 1) / SPAN);
    const long count = query_rows(), size = partial_size(), tasks = slices * keys.heads * spans;
    memory.resize(tasks * count * size);
    float* partial = memory.data();
#pragma omp parallel if (tasks > 1 && tasks * count * SPAN * values.width > PARALLEL_NUMBERS)
    {
#pragma omp for schedule(dynamic)
      for (long task = 0; task < tasks; task++)
        for (long row = 0; row < count; row += BLOCK_ROWS)
          span<KIND>(task / spans / keys.heads, task / spans % keys.heads, task % spans * SPAN, row,
                     partial + task * count * size);
#pragma omp for
      for (long all = 0; all < slices * keys.heads * count; all++) {
        const long row = all % count, which = all / count;
        merge(which / keys.heads, which % keys.heads, row, partial + (which * spans * count + row) * size, spans,
              count * size);
      }
    }
  }
};
