// Functions that each instruction set provides. One file an instruction set defines its table; dispatch.cpp picks one.
#pragma once

#include "fused.h"
#include "half.h"
#include "quantized.h"

namespace mlx_cpu_kernels {

// Rows of a matrix that need not lie in order. Row i is row index[i] of the whole, or row i where there is no index.
template <class Pointer>
struct RowsOf {
  Pointer values;
  Type type;
  int64_t stride;  // in elements
  int64_t count;
  const int64_t* index = nullptr;

  Pointer row(int64_t i) const { return const_cast<Pointer>(at(values, type, (index ? index[i] : i) * stride)); }
};
using Rows = RowsOf<const void*>;
using MutableRows = RowsOf<void*>;

// One of the matrices that x is multiplied with, and where the result goes.
struct RowsProduct {
  Quantized w;
  MutableRows y;
};

static inline bool same_format(const Quantized& a, const Quantized& b) {
  return a.mode == b.mode && a.bits == b.bits && a.group_size == b.group_size && a.columns == b.columns;
}

struct Kernels {
  void (*multiply_transposed)(const Rows& x, const RowsProduct* products, int count, Threads& threads);
  void (*multiply)(const Rows& x, const Quantized& w, const MutableRows& y, Threads& threads);
  void (*dequantize)(const Quantized& w, int64_t row_begin, int64_t row_end, void* out, Type type, Threads& threads);
  void (*rms_norm)(const RmsNorm& norm, Threads& threads);
  void (*layer_norm)(const LayerNorm& norm, Threads& threads);
  void (*gated_activation)(Activation activation, const Matrix& gate, const Matrix& up, int64_t rows, int64_t columns,
                           void* y, int64_t y_stride, Threads& threads);
  void (*add_rows)(const Matrix& added, int64_t rows, int64_t columns, void* y, int64_t y_stride, Threads& threads);
  void (*rope)(const Rope& rope, Threads& threads);
  void (*attention)(const Attention& attention, Threads& threads);
};

// The elements of one head of a tensor, at a position.
static inline const void* head_row(const Heads& x, Type type, int64_t batch, int64_t head, int64_t position) {
  int64_t element = batch * x.strides[0] + head * x.strides[1] + position * x.strides[2];
  return static_cast<const char*>(x.values) + element * size_of(type);
}
static inline void* head_row(const MutableHeads& x, Type type, int64_t batch, int64_t head, int64_t position) {
  int64_t element = batch * x.strides[0] + head * x.strides[1] + position * x.strides[2];
  return static_cast<char*>(x.values) + element * size_of(type);
}

// The keys or values of one batch and head, where they are quantized.
static inline Quantized quantized_head(const Quantized& all, const Heads& x, const int64_t* group_strides,
                                       int64_t batch, int64_t head) {
  Quantized one = all;
  int64_t groups = (batch * group_strides[0] + head * group_strides[1]) * size_of(all.type);
  one.weights += batch * x.strides[0] + head * x.strides[1];
  one.scales = static_cast<const char*>(one.scales) + groups;
  one.biases = static_cast<const char*>(one.biases) + groups;
  return one;
}

extern const Kernels scalar_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
// Kernels::multiply_transposed by AMX, and by AVX-512 where that is faster.
void multiply_transposed_by_amx(const Rows& x, const RowsProduct* products, int count, Threads& threads);
#elif defined(__aarch64__)
extern const Kernels neon_kernels;
#endif

}  // namespace mlx_cpu_kernels
