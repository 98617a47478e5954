// Rows of bfloat16 to slots of pages, as bfloat16, float32, float16 or q8_0.
#pragma once
#include "paged_attention.h"

// A head of `width` numbers to place `at`, in numbers, of plain pages.
template <int KIND>
void write_plain(const uint16_t* row, uint8_t* numbers, long at, long width) {
  for (long i = 0; i < width; i += LANES) {
    const Mask m = lanes(i, width);
    const Floats x = load_bfloat16(row + i, m);
    if constexpr (KIND == 0) store_bfloat16((uint16_t*)numbers + at + i, m, x);
    if constexpr (KIND == 1) store((float*)numbers + at + i, m, x);
    if constexpr (KIND == 2) store_half((uint16_t*)numbers + at + i, m, x);
  }
}

// The same as q8_0: codes of 32 numbers over the half that is their scale; those beyond `width` are 0.
inline void write_q8(const uint16_t* row, uint8_t* codes, uint16_t* scales, long width, long stored) {
  for (long group = 0; group < stored; group += 32) {
    Floats x[2], largest = splat(0.f);
    for (long half = 0; half < 2; half++) {
      const long i = group + half * LANES;
      x[half] = i < width ? load_bfloat16(row + i, lanes(i, width)) : splat(0.f);
      largest = maximum(largest, absolute(x[half]));
    }
    const uint16_t scale = _cvtss_sh(largest_of(largest) / 127.f, _MM_FROUND_TO_NEAREST_INT);
    const float stored_scale = _cvtsh_ss(scale), inverse = stored_scale > 0.f ? 1.f / stored_scale : 0.f;
    for (long half = 0; half < 2; half++) {
      const Ints code = limited_ints(to_ints(x[half] * splat(inverse)), 127);
      store_bytes(codes + group + half * LANES, code);
    }
    scales[group / 32] = scale;
  }
}

// rows [n][heads][width], `stride` from one to the next, to slots page * 64 + offset.
inline void write_rows(const Pages& pages, const int64_t* slots, const uint16_t* rows, long stride, long n) {
  uint8_t* numbers = const_cast<uint8_t*>(pages.numbers);
  uint16_t* scales = const_cast<uint16_t*>(pages.scales);
  for (long r = 0; r < n; r++)
    for (long h = 0; h < pages.heads; h++) {
      const uint16_t* row = rows + r * stride + h * pages.width;
      const long at = (slots[r] * pages.heads + h) * pages.stored;
      switch (pages.kind) {
        case 0: write_plain<0>(row, numbers, at, pages.width); break;
        case 1: write_plain<1>(row, numbers, at, pages.width); break;
        case 2: write_plain<2>(row, numbers, at, pages.width); break;
        default: write_q8(row, numbers + at, scales + at / 32, pages.width, pages.stored);
      }
    }
}
