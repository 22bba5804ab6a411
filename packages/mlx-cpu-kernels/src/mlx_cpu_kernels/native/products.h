// Chooses the way of a product, and gathers an instruction set's table.
#pragma once

#include "attention.h"
#include "byte_product.h"
#include "fused_rows.h"
#include "kernels.h"
#include "panel_product.h"

namespace mlx_cpu_kernels {
namespace {

template <class V>
void multiply_transposed_rows(const Rows& x, const Quantized& w, const MutableRows& y, Threads& threads) {
  if (pays_by_bytes<V>(x, w)) return multiply_by_bytes<V>(x, w, y, threads);
  multiply_by_panels<V>(x, TransposedPanels<V>(w), y, threads);
}

template <class V>
void multiply_rows(const Rows& x, const Quantized& w, const MutableRows& y, Threads& threads) {
  multiply_by_panels<V>(x, StraightPanels<V>(w), y, threads);
}

template <class V>
constexpr Kernels kernels_of() {
  return {multiply_transposed_rows<V>, multiply_rows<V>,         dequantize_rows<V>, rms_norm_rows<V>,
          layer_norm_rows<V>,          gated_activation_rows<V>, rotate<V>,          attend<V>};
}

}  // namespace
}  // namespace mlx_cpu_kernels
