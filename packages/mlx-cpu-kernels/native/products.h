// Chooses the way of a product, and gathers an instruction set's table.
#pragma once

#include "byte_product.h"
#include "kernels.h"
#include "panel_product.h"

namespace mlx_cpu_kernels {
namespace {

template <class V>
void multiply_transposed_rows(const Rows& x, const Quantized& w, const MutableRows& y, Threads& threads) {
  if (x.count <= kMostByteRows && V::has_byte_products(w.bits)) return multiply_bytes<V>(x, w, y, threads);
  multiply_by_panels<V>(x, TransposedPanels<V>(w), y, threads);
}

template <class V>
void multiply_rows(const Rows& x, const Quantized& w, const MutableRows& y, Threads& threads) {
  multiply_by_panels<V>(x, StraightPanels<V>(w), y, threads);
}

template <class V>
constexpr Kernels kernels_of() {
  return {multiply_transposed_rows<V>, multiply_rows<V>, dequantize_rows<V>};
}

}  // namespace
}  // namespace mlx_cpu_kernels
