// Quant blocks as in a GGUF file -> tiles.  Byte maps: daemons/weights/dequant.py.
#pragma once
#include "tiles.h"

// One block of one row: codes, and scales and minima of its groups as they are stored in tiles.
template <class T>
struct Block {
  uint8_t code[T::BLOCK], scale[T::GROUPS], minimum[T::GROUPS];
  uint16_t d = 0, m = 0;
};

inline uint16_t half_at(const uint8_t* at) {
  uint16_t out;
  memcpy(&out, at, 2);
  return out;
}

template <class T>
void low_nibbles(const uint8_t* q, uint8_t* code) {  // elements 0..15 low, 16..31 high
  for (int i = 0; i < 16; i++) code[i] = q[i] & 15, code[i + 16] = q[i] >> 4;
}

template <class T>
void read_block(const uint8_t* b, Block<T>& out) {
  if constexpr (T::POWERS) {  // MXFP4: 2^(e - 128) as bfloat16
    out.d = b[0] < 2 ? 32 << b[0] : (b[0] - 1) << 7;
    low_nibbles<T>(b + 1, out.code);
  } else if constexpr (T::BLOCK == 32) {
    out.d = half_at(b);
    const uint8_t* at = b + 2;
    if (T::MIN) out.m = half_at(at), at += 2;
    if (T::HIGH == 4) {
      memcpy(out.code, at, 32);
      return;
    }
    uint32_t high = 0;
    if (T::HIGH == 1) memcpy(&high, at, 4), at += 4;
    low_nibbles<T>(at, out.code);
    for (int i = 0; i < 32; i++) out.code[i] |= (high >> i & 1) << 4;
  } else if constexpr (T::LOOKUP) {  // IQ4_XS
    out.d = half_at(b);
    const uint16_t top = half_at(b + 2);
    for (int g = 0; g < 8; g++) {
      const int low = b[4 + g / 2] >> 4 * (g % 2) & 15;
      out.scale[g] = uint8_t((low | (top >> 2 * g & 3) << 4) - 32);
      low_nibbles<T>(b + 8 + 16 * g, out.code + 32 * g);
    }
  } else if constexpr (T::HIGH == 2) {  // Q6_K
    out.d = half_at(b + 208);
    memcpy(out.scale, b + 192, 16);
    for (int i = 0; i < 256; i++) {
      const int half = i / 128, run = i / 32 % 4, at = i % 32;
      const int low = b[64 * half + at + 32 * (run & 1)] >> (run < 2 ? 0 : 4) & 15;
      out.code[i] = low | (b[128 + 32 * half + at] >> 2 * run & 3) << 4;
    }
  } else {  // Q4_K, Q5_K
    out.d = half_at(b), out.m = half_at(b + 2);
    const uint8_t *s = b + 4, *high = b + 16, *q = b + (T::HIGH ? 48 : 16);
    for (int g = 0; g < 8; g++) {
      out.scale[g] = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
      out.minimum[g] = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
      for (int i = 0; i < 32; i++) {
        out.code[32 * g + i] = q[32 * (g / 2) + i] >> 4 * (g % 2) & 15;
        if (T::HIGH) out.code[32 * g + i] |= (high[i] >> g & 1) << 4;
      }
    }
  }
}

// Put one row's block into a tile of zeros.
template <class T>
void put(const Block<T>& block, int row, uint8_t* tile) {
  const int half = row / 16;
  memcpy(tile + 2 * row, &block.d, 2);
  if (T::MIN) memcpy(tile + T::M + 2 * row, &block.m, 2);
  if (T::NESTED)
    for (int g = 0; g < T::GROUPS; g++) {
      tile[T::SCALES + TILE * g + row] = block.scale[g];
      if (T::MIN) tile[T::MINIMA + TILE * g + row] = block.minimum[g];
    }
  for (int i = 0; i < T::BLOCK; i++) {
    const int at = i % T::GROUP, four = at / 8 * 2 + at / 2 % 2, code = block.code[i];
    const int lane = 4 * (row % 16) + 2 * (at % 2) + at / 4 % 2;  // a byte of the four
    uint8_t* group = tile + (half_group<T>(tile, i / T::GROUP, half) - tile);
    if (T::HIGH == 4) {
      group[T::CODES + 64 * four + lane] = uint8_t(code + T::OFFSET);
      continue;
    }
    const int high = code >> 4;
    group[T::CODES + 64 * (four / 2) + lane] |= (code & 15) << 4 * (four % 2);
    if (T::HIGH == 1 && high) set_high_bit(group, four, lane);
    if (T::HIGH == 2) group[lane] |= high << 2 * four;
  }
}

// The numbers of a row as bfloat16, rounded as daemons/weights/dequant.py computes them.
template <class T>
void dequantise_row(const uint8_t* raw, long n_blocks, long block_bytes, uint16_t* out) {
  for (long b = 0; b < n_blocks; b++, raw += block_bytes, out += T::BLOCK) {
    Block<T> block;
    read_block<T>(raw, block);
    const float d = T::POWERS ? one_bfloat16(block.d) : _cvtsh_ss(block.d), m = _cvtsh_ss(block.m);
    for (int g = 0; g < T::GROUPS; g++) {
      float scale = d, minimum = m;
      if (T::NESTED) scale *= T::SIGNED ? float(int8_t(block.scale[g])) : float(block.scale[g]);
      if (T::NESTED && T::MIN) minimum *= float(block.minimum[g]);
      alignas(64) float x[T::GROUP];
      for (int i = 0; i < T::GROUP; i++) {
        const int code = block.code[g * T::GROUP + i];
        int value = T::HIGH == 4 ? int8_t(code) : code + T::ZERO;
        if constexpr (T::LOOKUP) value = T::VALUES[code];
        const float product = scale * float(value);
        x[i] = T::MIN ? product + T::MIN * minimum : product;
      }
      for (int i = 0; i < T::GROUP; i += LANES) store_bfloat16(out + g * T::GROUP + i, load(x + i));
    }
  }
}

template <class T>
void repack(const uint8_t* raw, long n_rows, long n_blocks, long row_bytes, uint8_t* tiles) {
  const long n_strips = (n_rows + TILE - 1) / TILE, block_bytes = row_bytes / n_blocks;
#pragma omp parallel for
  for (long strip = 0; strip < n_strips; strip++)
    for (long b = 0; b < n_blocks; b++) {
      uint8_t* tile = tiles + (strip * n_blocks + b) * T::BYTES;
      memset(tile, 0, T::BYTES);
      for (long row = strip * TILE; row < n_rows && row < (strip + 1) * TILE; row++) {
        Block<T> block;
        read_block<T>(raw + row * row_bytes + b * block_bytes, block);
        put<T>(block, row % TILE, tile);
      }
    }
}
