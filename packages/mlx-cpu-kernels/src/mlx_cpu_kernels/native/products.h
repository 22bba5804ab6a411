// Chooses the way of a product, and gathers an instruction set's table.
#pragma once

#include "attention.h"
#include "few_rows.h"
#include "fused_rows.h"
#include "kernels.h"
#include "panel_product.h"

namespace mlx_cpu_kernels {
namespace {

template <class V>
void multiply_transposed_rows(const Rows& x, const RowsProduct* products, int count, Threads& threads) {
  for (int begin = 0, end; begin < count; begin = end) {
    const auto& w = products[begin].w;
    auto joins = [&](const Quantized& other) { return same_format(w, other) && pays_by_bytes<V>(x, other); };
    end = begin + 1;
    if (pays_by_bytes<V>(x, w)) {
      while (end < count && joins(products[end].w)) end++;
      if (multiply_by_bytes<V>(x, products + begin, end - begin, threads)) continue;
    }
    for (int i = begin; i < end; i++)
      multiply_by_panels<V>(x, TransposedPanels<V>(products[i].w), products[i].y, threads);
  }
}

template <class V>
void multiply_rows(const Rows& x, const Quantized& w, const MutableRows& y, Threads& threads) {
  multiply_by_panels<V>(x, StraightPanels<V>(w), y, threads);
}

template <class V>
constexpr Kernels kernels_of() {
  return {multiply_transposed_rows<V>, multiply_rows<V>, dequantize_rows<V>, rms_norm_rows<V>, layer_norm_rows<V>,
          gated_activation_rows<V>,    add_to_rows<V>,   rotate<V>,          attend<V>};
}

}  // namespace
}  // namespace mlx_cpu_kernels
