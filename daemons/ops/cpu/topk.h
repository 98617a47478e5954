// The best of many logits, and the path of a drafter along candidates.  Logits are float32; of equal ones the first wins.
#pragma once
#include "vectors.h"

// The k best of a row, best first.
inline void top_k_row(const float* x, long n, long k, float* best, int64_t* ids) {
  long filled = 0;
  const auto insert = [&](float value, long id) {
    long at = filled < k ? filled++ : k - 1;
    for (; at > 0 && best[at - 1] < value; at--) best[at] = best[at - 1], ids[at] = ids[at - 1];
    best[at] = value, ids[at] = id;
  };
  long i = 0;
  for (; i < k; i++) insert(x[i], i);
  Floats worst = splat(best[k - 1]);
  const auto insert_larger = [&](long i) {
    const Mask m = lanes(i, n);
    const Floats row = load(x + i, m);
    for (unsigned larger = where_larger(row, worst) & m; larger; larger &= larger - 1) {
      const long at = i + __builtin_ctz(larger);
      if (x[at] > best[k - 1]) insert(x[at], at);
    }
    worst = splat(best[k - 1]);
  };
  for (; i + 4 * LANES <= n; i += 4 * LANES) {  // most have none
    const Floats a = maximum(load(x + i), load(x + i + LANES));
    const Floats b = maximum(load(x + i + 2 * LANES), load(x + i + 3 * LANES));
    if (!where_larger(maximum(a, b), worst)) continue;
    for (long j = i; j < i + 4 * LANES; j += LANES) insert_larger(j);
  }
  for (; i < n; i += LANES) insert_larger(i);
}

// The sum of e^(x - largest) of a row.
inline float sum_of_weights(const float* x, long n, float largest) {
  Floats sum = splat(0.f);
  for (long i = 0; i < n; i += LANES) {
    const Mask m = lanes(i, n);
    const Floats weight = exponential(load(x + i, m) - splat(largest));
    sum = select(m, sum + weight, sum);
  }
  return sum_of(sum);
}

// Of each position k candidates with logits `best`; a candidate's score also has the product of its row `after`, the
// position's gate, and the row `before` of the candidate chosen at the position before, first `first`.
struct CandidatePath {
  const float* best;      // [slices][n][k]
  const int64_t* tokens;  // [slices][n][k]
  const uint16_t *first, *before, *after, *gate;  // [slices][rank], twice [slices][n][k][rank], [slices][n][rank]
  int64_t* path;          // [slices][n]
  float* probabilities;   // [slices][n]
  long n, k, rank;

  float product(const uint16_t* a, const uint16_t* g, const uint16_t* b) const {
    Floats sum = splat(0.f);
    for (long i = 0; i < rank; i += LANES) {
      const Mask m = lanes(i, rank);
      const Floats gated = load_bfloat16(a + i, m) * load_bfloat16(g + i, m);
      sum = add_product(gated, load_bfloat16(b + i, m), sum);
    }
    return sum_of(sum);
  }

  void walk(long slice, float* score) const {
    const uint16_t* row = first + slice * rank;
    for (long position = slice * n; position < (slice + 1) * n; position++) {
      long chosen = 0;
      for (long j = 0; j < k; j++) {
        const long at = position * k + j;
        score[j] = best[at] + product(row, gate + position * rank, after + at * rank);
        if (score[j] > score[chosen]) chosen = j;
      }
      path[position] = tokens[position * k + chosen];
      probabilities[position] = 1.f / sum_of_weights(score, k, score[chosen]);
      row = before + (position * k + chosen) * rank;
    }
  }
};
