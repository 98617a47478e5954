// What is compiled for each quant type: in several files (types_*.cpp), so that compilers work side by side.
#pragma once
#include "dequantise.h"
#include "gemm.h"
#include "repack.h"

struct TypeKernels {
  long tile_bytes, block, sharing;
  void (*repack)(const uint8_t* raw, long n_rows, long n_blocks, long row_bytes, uint8_t* tiles);
  void (*dequantise)(const uint8_t* tiles, long n_columns, long begin, long n_rows, uint16_t* out);
  void (*dequantise_row)(const uint8_t* raw, long n_blocks, long block_bytes, uint16_t* out);
  void (*multiply)(const uint8_t* tiles, const ByteRows& a, long row, long stop, long n_out, long begin, long end,
                   const Output& out, long out_row, long column);
};

template <class T>
constexpr TypeKernels KERNELS{T::BYTES,           T::BLOCK,        SHARING<T>, repack<T>, dequantise_strips<T>,
                              dequantise_row<T>, multiply_strips<T>};

extern const TypeKernels q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4;
