// What a transformer's layer computes beside its products, in float32: norms, rotations, attention and activations.
#pragma once

#include <cstdint>

#include "threads.h"

namespace mlx_cpu_kernels {

// y = x * weight / sqrt(mean(x^2) + epsilon) for each row of `size` values; without a weight it is 1. x may be y.
void rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t size, float epsilon, Threads& threads);

// y = silu(gate) * up.
void swiglu(const float* gate, const float* up, float* y, int64_t size, Threads& threads);

// Rotates pairs of the first `dims` values of each head by an angle that grows with the token's position.
struct Rotation {
  const float* x;  // [batch, heads, tokens, size], the last axis dense
  float* y;        // the same shape, dense
  int64_t batch, heads, tokens, size;
  int64_t batch_stride, head_stride, token_stride;  // of x
  int64_t dims;
  bool is_traditional;              // pairs of neighbours; else value i and value i + dims / 2
  const float* frequencies;         // radians from one position to the next, of each pair
  float scale;                      // of positions
  const int32_t* offsets;           // position of the first token ...
  int64_t offset_stride;            // ... of each batch entry: 1, or 0 where they share it
};
void rotate(const Rotation& rotation, Threads& threads);

enum class MaskKind { none, causal, boolean, additive };

// out = softmax(scale * q k^T + mask) v, where several heads of queries share a head of keys and values.
struct Attention {
  const float *queries, *keys, *values;  // [batch, heads or kv_heads, tokens or length, size], the last axis dense
  float* out;                            // [batch, tokens, heads, value_size], dense
  int64_t batch, heads, kv_heads, tokens, length, size, value_size;
  struct Strides {
    int64_t batch, head, token;
  } query_strides, key_strides, value_strides;
  float scale;
  MaskKind mask_kind;  // causal: the last query sees every key, each one before it one key less
  const void* mask;    // bool or float
  struct {
    int64_t batch, head, query, key;
  } mask_strides;      // 0 where broadcast
  const float* sinks;  // a further score of each head, whose value is 0; or null
};
void attend(const Attention& attention, Threads& threads);

}  // namespace mlx_cpu_kernels
