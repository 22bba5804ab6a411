// The scalar reference: scalar.cpp has its products, scalar_fused.cpp what is here beside scalar_value.
#pragma once

#include "kernels.h"

namespace mlx_cpu_kernels {

float scalar_value(const Quantized& w, int64_t row, int64_t column);

void scalar_rms_norm(const RmsNorm& norm, Threads& threads);
void scalar_layer_norm(const LayerNorm& norm, Threads& threads);
void scalar_gated_activation(Activation activation, const Matrix& gate, const Matrix& up, int64_t rows, int64_t columns,
                             void* y, int64_t y_stride, Threads& threads);
void scalar_add_rows(const Matrix& added, int64_t rows, int64_t columns, void* y, int64_t y_stride, Threads& threads);
void scalar_rope(const Rope& rope, Threads& threads);
void scalar_attention(const Attention& attention, Threads& threads);

}  // namespace mlx_cpu_kernels
