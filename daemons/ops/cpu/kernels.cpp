// The entry points that daemons/ops/cpu/library.py calls, but for those in attention.cpp and dense.cpp.
#include <vector>

#include "topk.h"
#include "delta_net.h"
#include "parallel.h"
#include "recorded.h"
#include "rows.h"
#include "type_kernels.h"

inline const TypeKernels* kernels_of(long kind) {
  switch (kind) {
    case 2: return &q4_0;
    case 3: return &q4_1;
    case 6: return &q5_0;
    case 7: return &q5_1;
    case 8: return &q8_0;
    case 12: return &q4_k;
    case 13: return &q5_k;
    case 14: return &q6_k;
    case 20: return &iq4_nl;
    case 23: return &iq4_xs;
    case 39: return &mxfp4;
    default: return nullptr;
  }
}

constexpr long MOST_ROWS = 1024;  // at a time: their activations take 1.5 bytes a column each
constexpr long FEW_ROWS = 32;
constexpr long PART_ROWS = 128;  // of many, that a thread takes at a time

// Rows of a matrix whose results are columns of one output.
struct Matrix {
  long kind, n_rows;  // GGML's number of the type
  const uint8_t* tiles;
};

inline long count_strips(const Matrix* matrices, long n_matrices) {
  long n_strips = 0;
  for (long i = 0; i < n_matrices; i++) n_strips += (matrices[i].n_rows + TILE - 1) / TILE;
  return n_strips;
}

// Calls run(matrix, its first strip, its last, its first column) for the strips from `begin` to `end` of all matrices.
template <class Run>
void for_strips(const Matrix* matrices, long n_matrices, long begin, long end, Run run) {
  long column = 0;
  for (long i = 0; i < n_matrices; i++) {
    const long strips = (matrices[i].n_rows + TILE - 1) / TILE, stop = end < strips ? end : strips;
    if (begin < stop) run(matrices[i], begin, stop, column);
    begin = begin > strips ? begin - strips : 0, end -= strips, column += matrices[i].n_rows;
  }
}

extern "C" {

long tile_bytes(long kind) {
  const TypeKernels* type = kernels_of(kind);
  return type ? type->tile_bytes : -1;
}

long pack(long kind, const uint8_t* raw, long n_rows, long n_blocks, long row_bytes, uint8_t* tiles) {
  const TypeKernels* type = kernels_of(kind);
  if (!type) return -1;
  type->repack(raw, n_rows, n_blocks, row_bytes, tiles);
  return 0;
}

long dequantise(long kind, const uint8_t* tiles, long n_columns, long first, long n_rows, uint16_t* out) {
  const TypeKernels* type = kernels_of(kind);
  if (!type) return -1;
  type->dequantise(tiles, n_columns, first / TILE, n_rows, out);
  return 0;
}

// Rows of a table of quant blocks, by id.  A row that is the one before, as masks of a draft are, is copied.
long lookup(long kind, const uint8_t* raw, long row_bytes, long n_blocks, const int64_t* ids, long stride, long n,
            uint16_t* out) {
  const TypeKernels* type = kernels_of(kind);
  if (!type) return -1;
  const long width = n_blocks * type->block;
  for (long i = 0; i < n; i++) {
    if (i && ids[i * stride] == ids[(i - 1) * stride])
      memcpy(out + i * width, out + (i - 1) * width, width * 2);
    else
      type->dequantise_row(raw + ids[i * stride] * row_bytes, n_blocks, row_bytes / n_blocks, out + i * width);
  }
  return 0;
}

// x bfloat16 [n][n_columns] times the matrices -> out [n][sum of their rows], float32 or bfloat16.
long multiply(const Matrix* matrices, long n_matrices, const uint16_t* x, long n, long n_columns, void* out,
              long out_stride, long is_float) {
  if (!n) return 0;
  static thread_local std::vector<Line> memory[2];  // for types with large blocks and with small ones
  const long passes = (n + MOST_ROWS - 1) / MOST_ROWS, most = (n + passes - 1) / passes;
  bool is_used[2] = {};
  for (long i = 0; i < n_matrices; i++) {
    const TypeKernels* type = kernels_of(matrices[i].kind);
    if (!type) return -1;
    is_used[type->sharing < SHARED] = true;
  }
  const long sharing[2] = {SHARED, GROUP_SUM};
  for (int i = 0; i < 2; i++)
    if (is_used[i]) memory[i].resize(most * ByteRows::floats(n_columns, sharing[i]) / LANES + 1);
  const long n_strips = count_strips(matrices, n_matrices);
  const Output products{out, out_stride, is_float};
  for (long first = 0; first < n; first += most) {
    const long left = n - first < most ? n - first : most;
    const ByteRows rows[2] = {{memory[0].data()->x, left, n_columns, sharing[0]},
                              {memory[1].data()->x, left, n_columns, sharing[1]}};
    const ByteRows& a = rows[is_used[1]];  // for what both have
    const auto strips = [&](long begin, long end, long row, long stop) {
      for_strips(matrices, n_matrices, begin, end, [&](const Matrix& w, long begin, long end, long column) {
        const TypeKernels& type = *kernels_of(w.kind);
        type.multiply(w.tiles, rows[type.sharing < SHARED], row, stop, w.n_rows, begin, end, products, first, column);
      });
    };
    const long parts = (a.n + PART_ROWS - 1) / PART_ROWS;
    for (int k = 0; k < 2; k++)
      if (is_used[k])
        parallel_for(left * n_columns > PARALLEL, a.parts(), [&](long i) { rows[k].put(i, x + first * n_columns); });
    if (omp_get_max_threads() == 1 || n_strips * parts <= 4) {
      strips(0, n_strips, 0, a.n);
      continue;
    }
#pragma omp parallel
    {
      const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
      if (a.n <= FEW_ROWS) {  // to read weights takes the time: each thread reads on
        strips(n_strips * thread / threads, n_strips * (thread + 1) / threads, 0, a.n);
      } else {
#pragma omp for schedule(dynamic)  // other programs may hold up a thread
        for (long i = 0; i < n_strips * parts; i++) {
          const long strip = i / parts, row = i % parts * PART_ROWS;
          strips(strip, strip + 1, row, a.n - row < PART_ROWS ? a.n : row + PART_ROWS);
        }
      }
    }
  }
  return 0;
}

// Whether many rows are faster by oneDNN's product of dequantised weights.
long multiplies_many_by_onednn() {
#if defined(__AMX_BF16__) || (WIDE && !defined(__AVX512VNNI__))
  return 1;
#else
  return 0;
#endif
}

long rms_norm(const uint16_t* x, long stride, long n_rows, long heads, long width, const float* weight, long weights,
              float eps, const uint16_t* delta, uint16_t* sum, uint16_t* out, float* out_float) {
  const RmsNorm norm{x, delta, weight, sum, out, out_float, stride, heads, weights, width, eps};
  parallel_for(n_rows * width > PARALLEL, n_rows, [&](long r) { norm.row(r); });
  return 0;
}

long qk_norm_rope(const uint16_t* x, long stride, long n_rows, long heads, long width, const float* weight, float eps,
                  const float* cosine, const float* sine, long half, uint16_t* out) {
  parallel_for(n_rows * heads * width > PARALLEL, n_rows, [=](long r) {
    for (long h = 0; h < heads; h++)
      norm_and_rotate(x + r * stride + h * width, weight ? weight + h * width : nullptr, eps, cosine + r * half,
                      sine + r * half, half, width, out + (r * heads + h) * width);
  });
  return 0;
}

long act_and_mul(const uint16_t* x, long stride, long n_rows, long width, long activation, uint16_t* out) {
  parallel_for(n_rows * width > PARALLEL, n_rows,
               [=](long r) { act_and_mul_row(x + r * stride, width, activation, out + r * width); });
  return 0;
}

long output_gate(const uint16_t* x, long n_rows, long heads, long dim, const uint16_t* gate, long gate_stride,
                 long by_head, long is_softplus, uint16_t* out) {
  parallel_for(n_rows * heads * dim > PARALLEL, n_rows, [=](long r) {
    output_gate_row(x + r * heads * dim, gate + r * gate_stride, heads, dim, by_head, is_softplus,
                    out + r * heads * dim);
  });
  return 0;
}

long block_convolution(const uint16_t* x, const uint16_t* delta, const float* base, long n_rows, long n, long width,
                       long taps, long group, long delta_stride, uint16_t* out) {
  const BlockConvolution convolution{x, delta, base, out, n, width, taps, group, delta_stride};
  parallel_for(n_rows * width > PARALLEL, n_rows, [&](long r) { convolution.row(r); });
  return 0;
}

long delta_net(const DeltaNet* arguments) {
  static thread_local std::vector<Line> keys;
  DeltaNet net = *arguments;
  keys.resize(net.slices * net.n_key * net.n * net.key_row() / LANES);
  net.keys = keys.data()->x;
  const bool pays = net.slices * net.n_value * net.dim * net.dim > PARALLEL;
  parallel_for(pays, net.slices * net.n_key, [&](long i) { net.read_keys(i / net.n_key, i % net.n_key); });
  parallel_for(pays, net.slices * net.n_value, [&](long i) { net.recur(i / net.n_value, i % net.n_value); });
  return 0;
}

// cos and sin [n_rows][half] of positions times frequencies, times `magnitude`.
long rope_tables(const int64_t* positions, long n_rows, const float* frequencies, long half, float magnitude,
                 float* cosine, float* sine) {
  parallel_for(n_rows * half > PARALLEL / 8, n_rows, [=](long r) {
    for (long i = 0; i < half; i++) {
      const float angle = float(positions[r]) * frequencies[i];
      cosine[r * half + i] = std::cos(angle) * magnitude, sine[r * half + i] = std::sin(angle) * magnitude;
    }
  });
  return 0;
}

long add(const uint16_t* x, const uint16_t* y, long n, uint16_t* out) {
  parallel_for(n > PARALLEL, (n + LANES - 1) / LANES, [=](long vector) {
    const long i = vector * LANES;
    const Mask m = lanes(i, n);
    store_bfloat16(out + i, m, load_bfloat16(x + i, m) + load_bfloat16(y + i, m));
  });
  return 0;
}

// Rows of `row_bytes` from and to rows of other lengths.
long copy_rows(const uint8_t* rows, long stride_bytes, long n_rows, long row_bytes, uint8_t* out,
               long out_stride_bytes) {
  for (long r = 0; r < n_rows; r++) memcpy(out + r * out_stride_bytes, rows + r * stride_bytes, row_bytes);
  return 0;
}

// float32 to bfloat16, or back.
long cast(const void* x, long to_bfloat16, long n, void* out) {
  parallel_for(n > PARALLEL, (n + LANES - 1) / LANES, [=](long vector) {
    const long i = vector * LANES;
    const Mask m = lanes(i, n);
    if (to_bfloat16)
      store_bfloat16((uint16_t*)out + i, m, load((const float*)x + i, m));
    else
      store((float*)out + i, m, load_bfloat16((const uint16_t*)x + i, m));
  });
  return 0;
}

// RMSNorm of float32 rows.
long rms_norm_float(const float* x, long n_rows, long width, const float* weight, float eps, uint16_t* out) {
  parallel_for(n_rows * width > PARALLEL, n_rows,
               [=](long r) { rms_norm_float_row(x + r * width, width, weight, eps, out + r * width); });
  return 0;
}

long offset(const int64_t* x, long n, long by, int64_t* out) {
  for (long i = 0; i < n; i++) out[i] = x[i] + by;
  return 0;
}

long apply_updates(const Updates* arguments) {
  const Updates all = *arguments;
  parallel_for(all.layers * all.n_value * all.dim * all.dim > PARALLEL, all.layers * all.n_value,
               [&](long i) { all.apply(i / all.n_value, i % all.n_value); });
  return 0;
}

// Slices of n rows, each moved down by one: the first is row ids[slice] of `pool`.  Row t of a slice then becomes row
// kept[slice][t] of the pool, unless that is -1.
long shift_rows(const float* x, long slices, long n, long width, float* pool, const int64_t* ids, const int64_t* kept,
                float* out) {
  for (long slice = 0; slice < slices; slice++) {
    const float* rows = x + slice * n * width;
    float* to = out + slice * n * width;
    memcpy(to, pool + ids[slice] * width, width * 4);
    memcpy(to + width, rows, (n - 1) * width * 4);
    for (long t = 0; t < n; t++)
      if (const long row = kept[slice * n + t]; row >= 0) memcpy(pool + row * width, rows + t * width, width * 4);
  }
  return 0;
}

long top_k(const float* x, long n_rows, long n, long k, float* best, int64_t* ids) {
  parallel_for(n_rows * n > PARALLEL, n_rows, [=](long r) { top_k_row(x + r * n, n, k, best + r * k, ids + r * k); });
  return 0;
}

// The best of each row, and the probability that softmax gives it.
long most_likely(const float* x, long n_rows, long n, int64_t* ids, float* probabilities) {
  parallel_for(n_rows * n > PARALLEL, n_rows, [=](long r) {
    float best;
    top_k_row(x + r * n, n, 1, &best, ids + r);
    probabilities[r] = 1.f / sum_of_weights(x + r * n, n, best);
  });
  return 0;
}

long select_path(const CandidatePath* candidates, long slices) {
  static thread_local std::vector<float> score;
  score.resize(candidates->k);
  for (long slice = 0; slice < slices; slice++) candidates->walk(slice, score.data());
  return 0;
}

// ---- recorded steps

RECORDED(lookup)
RECORDED(multiply)
RECORDED(rms_norm)
RECORDED(qk_norm_rope)
RECORDED(act_and_mul)
RECORDED(output_gate)
RECORDED(block_convolution)
RECORDED(delta_net)
RECORDED(rope_tables)
RECORDED(add)
RECORDED(copy_rows)
RECORDED(cast)
RECORDED(rms_norm_float)
RECORDED(offset)
RECORDED(shift_rows)
RECORDED(top_k)
RECORDED(most_likely)
RECORDED(select_path)

long replay(const RecordedCall* calls, long n) {
  for (long i = 0; i < n; i++)
    if (const long failed = calls[i].run(calls[i].arguments)) return failed;
  return 0;
}
}
