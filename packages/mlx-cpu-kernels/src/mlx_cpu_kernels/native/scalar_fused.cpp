// The scalar reference of norms, activations, rotary embedding and attention: plain loops in float64.
#include <cmath>
#include <limits>
#include <vector>

#include "scalar.h"

namespace mlx_cpu_kernels {

void scalar_rms_norm(const RmsNorm& n, Threads& threads) {
  threads.parallel_for(n.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const void* x = at(n.x.values, n.x.type, r * n.x.stride);
      if (n.added) {
        void* sums = at(n.sums, n.x.type, r * n.sums_stride);
        for (int64_t c = 0; c < n.columns; c++)
          store_value(sums, n.x.type, c,
                      load_value(x, n.x.type, c) + load_value(n.added, n.x.type, r * n.added_stride + c));
        x = sums;
      }
      double squares = 0;
      for (int64_t c = 0; c < n.columns; c++) squares += std::pow(double(load_value(x, n.x.type, c)), 2);
      double factor = 1 / std::sqrt(squares / n.columns + n.epsilon);
      for (int64_t c = 0; c < n.columns; c++)
        store_value(
            at(n.y, n.x.type, r * n.y_stride), n.x.type, c,
            float(load_value(x, n.x.type, c) * factor * (n.weight ? load_value(n.weight, n.weight_type, c) : 1)));
    }
  });
}

void scalar_layer_norm(const LayerNorm& n, Threads& threads) {
  threads.parallel_for(n.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const void* x = at(n.x.values, n.x.type, r * n.x.stride);
      double mean = 0, variance = 0;
      for (int64_t c = 0; c < n.columns; c++) mean += load_value(x, n.x.type, c) / double(n.columns);
      for (int64_t c = 0; c < n.columns; c++)
        variance += std::pow(load_value(x, n.x.type, c) - mean, 2) / double(n.columns);
      double factor = 1 / std::sqrt(variance + n.epsilon);
      for (int64_t c = 0; c < n.columns; c++) {
        double value = (load_value(x, n.x.type, c) - mean) * factor;
        if (n.weight) value *= load_value(n.weight, n.weight_type, c);
        if (n.bias) value += load_value(n.bias, n.weight_type, c);
        store_value(at(n.y, n.x.type, r * n.y_stride), n.x.type, c, float(value));
      }
    }
  });
}

void scalar_gated_activation(Activation activation, const Matrix& gate, const Matrix& up, int64_t rows, int64_t columns,
                             void* y, int64_t y_stride, Threads& threads) {
  auto activate = [&](double x) {
    double t = activation == Activation::silu        ? x
               : activation == Activation::gelu_tanh ? 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)
                                                     : 1.702 * x;
    return x / (t < -88 ? INFINITY : 1 + std::exp(-t));  // zero from there on, as MLX's
  };
  threads.parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      for (int64_t c = 0; c < columns; c++) {
        double value = activate(load_value(gate.values, gate.type, r * gate.stride + c));
        if (up.values) value *= load_value(up.values, up.type, r * up.stride + c);
        store_value(y, gate.type, r * y_stride + c, float(value));
      }
    }
  });
}

void scalar_add_rows(const Matrix& added, int64_t rows, int64_t columns, void* y, int64_t y_stride, Threads& threads) {
  threads.parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      for (int64_t c = 0; c < columns; c++) {
        float value = load_value(y, added.type, r * y_stride + c);
        store_value(y, added.type, r * y_stride + c,
                    value + load_value(added.values, added.type, r * added.stride + c));
      }
    }
  });
}

void scalar_rope(const Rope& rope, Threads& threads) {
  int64_t half = rope.dims / 2;
  threads.parallel_for(rope.batches * rope.heads * rope.length, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> in(rope.head_size);
    for (int64_t i = begin; i < end; i++) {
      int64_t l = i % rope.length, head = i / rope.length % rope.heads, batch = i / rope.length / rope.heads;
      const void* x = head_row(rope.x, rope.type, batch, head, l);
      void* y = head_row(rope.y, rope.type, batch, head, l);
      for (int64_t d = 0; d < rope.head_size; d++) in[d] = load_value(x, rope.type, d);
      for (int64_t d = rope.dims; d < rope.head_size; d++) store_value(y, rope.type, d, float(in[d]));
      float position = float(rope.offsets[batch * rope.offset_stride] + l) * rope.scale;
      for (int64_t d = 0; d < half; d++) {
        float frequency =
            rope.frequencies ? rope.frequencies[d] : std::exp2(-float(d) / float(half) * std::log2(rope.base));
        float angle = position * frequency;
        int64_t first = rope.traditional ? 2 * d : d, second = rope.traditional ? 2 * d + 1 : d + half;
        store_value(y, rope.type, first, float(in[first] * std::cos(angle) - in[second] * std::sin(angle)));
        store_value(y, rope.type, second, float(in[first] * std::sin(angle) + in[second] * std::cos(angle)));
      }
    }
  });
}

namespace {

void attend(const Attention& a, int64_t batch, int64_t head, int64_t query) {
  int64_t kv_head = head / (a.heads / a.kv_heads);
  auto element = [&](const Quantized* quantized, const Heads& x, const int64_t* group_strides, int64_t key, int64_t d) {
    if (!quantized) return load_value(head_row(x, a.type, batch, kv_head, key), a.type, d);
    return scalar_value(quantized_head(*quantized, x, group_strides, batch, kv_head), key, d);
  };
  int64_t keys = a.lengths ? a.lengths[batch] : a.keys;
  std::vector<double> scores(keys);
  double largest = a.sinks ? a.sinks[head] : -INFINITY;
  for (int64_t key = 0; key < keys; key++) {
    double score = 0;
    const void* q = head_row(a.q, a.type, batch, head, query);
    for (int64_t d = 0; d < a.head_size; d++)
      score += double(load_value(q, a.type, d)) * element(a.k_quantized, a.k, a.k_group_strides, key, d);
    score *= a.scale;
    int64_t at_mask =
        batch * a.mask_strides[0] + head * a.mask_strides[1] + query * a.mask_strides[2] + key * a.mask_strides[3];
    bool hidden = (a.mask == Attention::Mask::causal && key > keys - a.queries + query) ||
                  (a.mask == Attention::Mask::boolean && !static_cast<const uint8_t*>(a.mask_values)[at_mask]);
    // The lowest value rather than infinity: a row of which nothing is seen becomes the mean, as in MLX.
    if (hidden) score = std::numeric_limits<float>::lowest();
    if (a.mask == Attention::Mask::additive) score += load_value(a.mask_values, a.mask_type, at_mask);
    scores[key] = score;
    largest = std::fmax(largest, score);
  }
  double sum = a.sinks ? std::exp(a.sinks[head] - largest) : 0;
  for (auto& score : scores) sum += score = std::exp(score - largest);
  for (int64_t d = 0; d < a.value_size; d++) {
    double value = 0;
    for (int64_t key = 0; key < keys; key++)
      value += scores[key] * element(a.v_quantized, a.v, a.v_group_strides, key, d);
    store_value(head_row(a.y, a.type, batch, head, query), a.type, d, float(value / sum));
  }
}

}  // namespace

void scalar_attention(const Attention& a, Threads& threads) {
  threads.parallel_for(a.batches * a.heads * a.queries, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) attend(a, i / a.queries / a.heads, i / a.queries % a.heads, i % a.queries);
  });
}

}  // namespace mlx_cpu_kernels
