// The operations between the products of a transformer, each in one pass: normalization, rotary embedding, attention
// and gated activations. Values of 16 bits are computed in float32 and rounded once, at the end.
#pragma once

#include <cstdint>

#include "quantized.h"

namespace mlx_cpu_kernels {

// Rows whose neighbours lie side by side; `stride` elements from row to row.
struct Matrix {
  const void* values;
  Type type;
  int64_t stride;
};

// y = x * weight / sqrt(mean(x^2) + epsilon), a row at a time, into rows of x's type; no weight where values is null.
// With `added`, x + added takes the place of x, rounded to x's type, and is written to `sums`. y may be x.
struct RmsNorm {
  int64_t rows, columns;
  Matrix x;
  const void* weight;
  Type weight_type;
  float epsilon;
  void* y;
  int64_t y_stride;
  const void* added = nullptr;  // of x's type
  int64_t added_stride = 0;
  void* sums = nullptr;
  int64_t sums_stride = 0;
};
void rms_norm(const RmsNorm& norm, Threads& threads);

// y = (x - mean) / sqrt(variance + epsilon) * weight + bias; weight and bias may be null.
struct LayerNorm {
  int64_t rows, columns;
  Matrix x;
  const void* weight;
  const void* bias;
  Type weight_type;  // of both
  float epsilon;
  void* y;
  int64_t y_stride;
};
void layer_norm(const LayerNorm& norm, Threads& threads);

// x * sigmoid(x), and the two approximations of GELU that are x times a sigmoid as well: by tanh, and of 1.702 x.
enum class Activation { silu, gelu_tanh, gelu_sigmoid };

// y = activation(gate) * up, or activation(gate) where up is null. All have one type. y may be gate or up.
void gated_activation(Activation activation, Matrix gate, const void* up, int64_t up_stride, int64_t rows,
                      int64_t columns, void* y, int64_t y_stride, Threads& threads);

// y += added, of one type; with a stride of 0 the same row is added to all.
void add_rows(Matrix added, int64_t rows, int64_t columns, void* y, int64_t y_stride, Threads& threads);

// A tensor [batch, head, position, element]: elements lie side by side, other strides are in elements.
struct Heads {
  const void* values;
  int64_t strides[3];
};
struct MutableHeads {
  void* values;
  int64_t strides[3];
};

// Rotates the first `dims` elements of each head by its position: angle i of position p is p * scale * frequencies[i],
// by default base^(-2 i / dims). A pair is (i, i + dims / 2), or (2 i, 2 i + 1) where `traditional`. The
// position of row l of batch b is offsets[b * offset_stride] + l. The elements beyond `dims` are copied. y may be x.
struct Rope {
  int64_t batches, heads, length, head_size;
  Type type;
  Heads x;
  MutableHeads y;
  int64_t dims;
  bool traditional;
  float base;
  const float* frequencies;  // dims / 2 of them, or null
  float scale;
  const int32_t* offsets;
  int64_t offset_stride;  // 0 for one offset for all batches, else 1
};
void rope(const Rope& rope, Threads& threads);

// y = softmax(scale * q k^T + mask) v, for heads that share keys and values in groups of heads / kv_heads.
//
// Keys are dense, or quantized along the head: where k_quantized is set, it is the matrix [keys, head_size] of batch 0
// and head 0, and k.strides[0] and [1] are in words, k_group_strides in scales; so for values.
struct Attention {
  enum class Mask { none, causal, boolean, additive };

  int64_t batches, heads, kv_heads, queries, keys, head_size, value_size;
  Type type;  // of all dense tensors
  Heads q, k, v;
  MutableHeads y;
  float scale;
  Mask mask = Mask::none;  // causal: query l sees the keys up to keys - queries + l
  const void* mask_values = nullptr;
  Type mask_type = Type::float32;  // of an additive mask; a boolean one has a byte a value, 0 for what is not seen
  int64_t mask_strides[4] = {0, 0, 0, 0};  // [batch, head, query, key]
  const float* sinks = nullptr;            // a head's logit that takes its share of the sum, without a value
  const Quantized* k_quantized = nullptr;
  const Quantized* v_quantized = nullptr;
  int64_t k_group_strides[2] = {0, 0}, v_group_strides[2] = {0, 0};
  const int64_t* lengths = nullptr;  // each batch's number of keys, where they differ: at most `keys`, without a mask
};
// False where head_size or value_size is above 256, or mask's values do not lie side by side; then nothing is computed.
bool attention(const Attention& attention, Threads& threads);

}  // namespace mlx_cpu_kernels
