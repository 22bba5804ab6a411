// What each instruction set provides. One file an instruction set defines its table; dispatch.cpp picks one.
#pragma once

#include "half.h"
#include "quantized.h"

namespace mlx_cpu_kernels {

// Rows of a matrix that need not lie in order: row i is row index[i] of the whole, or row i where there is no index.
template <class Pointer>
struct RowsOf {
  Pointer values;
  Type type;
  int64_t stride;  // in elements
  int64_t count;
  const int64_t* index = nullptr;

  Pointer row(int64_t i) const {
    return const_cast<Pointer>(at(values, type, (index ? index[i] : i) * stride));
  }
};
using Rows = RowsOf<const void*>;
using MutableRows = RowsOf<void*>;

struct Kernels {
  void (*multiply_transposed)(const Rows& x, const Quantized& w, const MutableRows& y, Threads& threads);
  void (*multiply)(const Rows& x, const Quantized& w, const MutableRows& y, Threads& threads);
  void (*dequantize)(const Quantized& w, int64_t row_begin, int64_t row_end, void* out, Type type, Threads& threads);
};

extern const Kernels scalar_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#elif defined(__aarch64__)
extern const Kernels neon_kernels;
#endif

}  // namespace mlx_cpu_kernels
