// Normalization, gated activations and rotary embedding: one pass over rows of any type, computed in float32.
#pragma once

#include <cmath>

#include "kernels.h"
#include "panels.h"

namespace mlx_cpu_kernels {
namespace {

// Calls f(i, load, store) for each vector of a row. load(values, type) and store(values, type, vector) take its lanes:
// fewer than a vector at the end, and zeros beyond.
template <class V, class F>
inline void each_vector(int64_t count, F&& f) {
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    f(
        i, [i](const void* from, Type type) { return V::load_values(from, type, i); },
        [i](void* to, Type type, typename V::Float value) { V::store_values(to, type, i, value); });
  }
  if (int64_t left = count - i) {
    f(
        i, [i, left](const void* from, Type type) { return V::load_some_values(from, type, i, left); },
        [i, left](void* to, Type type, typename V::Float value) { V::store_some_values(to, type, i, value, left); });
  }
}

// e^x to the last places of float32, by the polynomial of Cephes on [-ln 2 / 2, ln 2 / 2]. Below -87.3 it is about 0.
template <class V>
inline typename V::Float exponential(typename V::Float x) {
  x = V::minimum(V::broadcast(88.3f), V::maximum(V::broadcast(-87.3f), x));  // in this order a NaN stays one
  auto n = V::round(V::multiply(x, V::broadcast(1.44269504f)));
  auto r = V::multiply_add(n, V::broadcast(-0.693359375f), x);  // ln 2 in two pieces, the first exact
  r = V::multiply_add(n, V::broadcast(2.12194440e-4f), r);
  auto p = V::broadcast(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = V::multiply_add(p, r, V::broadcast(c));
  p = V::multiply_add(p, V::multiply(r, r), V::add(r, V::broadcast(1)));
  return V::multiply_by_power_of_two(p, n);
}

template <class V>
[[gnu::flatten]] void rms_norm_row(const RmsNorm& n, int64_t row) {
  const Type type = n.x.type;
  const void* x = at(n.x.values, type, row * n.x.stride);
  auto squares = V::zero();
  if (n.added) {
    const void* added = at(n.added, type, row * n.added_stride);
    void* sums = at(n.sums, type, row * n.sums_stride);
    each_vector<V>(n.columns, [&](int64_t, auto load, auto store) {
      store(sums, type, V::add(load(x, type), load(added, type)));
      auto value = load(sums, type);  // as rounded: the same that a later addition reads
      squares = V::multiply_add(value, value, squares);
    });
    x = sums;
  } else {
    each_vector<V>(n.columns, [&](int64_t, auto load, auto) {
      auto value = load(x, type);
      squares = V::multiply_add(value, value, squares);
    });
  }
  auto factor = V::broadcast(1 / std::sqrt(V::sum(squares) / float(n.columns) + n.epsilon));
  void* y = at(n.y, type, row * n.y_stride);
  each_vector<V>(n.columns, [&](int64_t, auto load, auto store) {
    auto value = V::multiply(load(x, type), factor);
    store(y, type, n.weight ? V::multiply(value, load(n.weight, n.weight_type)) : value);
  });
}

template <class V>
[[gnu::flatten]] void layer_norm_row(const LayerNorm& n, int64_t row) {
  const Type type = n.x.type;
  const void* x = at(n.x.values, type, row * n.x.stride);
  auto sums = V::zero(), squares = V::zero();
  each_vector<V>(n.columns, [&](int64_t, auto load, auto) { sums = V::add(sums, load(x, type)); });
  const float mean = V::sum(sums) / float(n.columns);
  float minus_means[V::kLanes];
  V::store(minus_means, V::broadcast(-mean));
  each_vector<V>(n.columns, [&](int64_t i, auto load, auto) {
    const int64_t left = n.columns - i;  // the lanes beyond the end stay zeros
    auto minus_mean =
        left >= V::kLanes ? V::load(minus_means) : V::load_some_values(minus_means, Type::float32, 0, left);
    auto value = V::add(load(x, type), minus_mean);
    squares = V::multiply_add(value, value, squares);
  });
  auto factor = V::broadcast(1 / std::sqrt(V::sum(squares) / float(n.columns) + n.epsilon));
  void* y = at(n.y, type, row * n.y_stride);
  each_vector<V>(n.columns, [&](int64_t, auto load, auto store) {
    auto value = V::multiply(V::add(load(x, type), V::broadcast(-mean)), factor);
    if (n.weight) value = V::multiply(value, load(n.weight, n.weight_type));
    if (n.bias) value = V::add(value, load(n.bias, n.weight_type));
    store(y, type, value);
  });
}

// About 16,000 values are worth another thread.
inline int64_t rows_a_thread(int64_t columns) { return larger(1, 16384 / larger(columns, 1)); }

template <class V>
void rms_norm_rows(const RmsNorm& norm, Threads& threads) {
  threads.parallel_for(norm.rows, rows_a_thread(norm.columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) rms_norm_row<V>(norm, row);
  });
}

template <class V>
void layer_norm_rows(const LayerNorm& norm, Threads& threads) {
  threads.parallel_for(norm.rows, rows_a_thread(norm.columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) layer_norm_row<V>(norm, row);
  });
}

// The least -t for which the sigmoid of t is exactly 0, as MLX's is: the number after 88.
constexpr float kZeroSigmoid = 0x1.600002p6f;

// t of x * sigmoid(t).
template <class V>
inline typename V::Float sigmoid_argument(Activation activation, typename V::Float x) {
  switch (activation) {
    case Activation::gelu_tanh:  // (1 + tanh(t / 2)) / 2 is sigmoid(t)
      return V::multiply(x,
                         V::multiply_add(V::multiply(x, x), V::broadcast(0.07135481283f), V::broadcast(1.5957691216f)));
    case Activation::gelu_sigmoid:
      return V::multiply(x, V::broadcast(1.702f));
    default:
      return x;
  }
}

template <class V>
[[gnu::flatten]] void gated_activation_row(Activation activation, const void* gate, const void* up, Type type,
                                           int64_t columns, void* y) {
  each_vector<V>(columns, [&](int64_t, auto load, auto store) {
    auto x = load(gate, type);
    auto minus_t = V::multiply(sigmoid_argument<V>(activation, x), V::broadcast(-1));
    auto e = exponential<V>(minus_t);
    e = V::add(e, V::zero_where_below(V::broadcast(INFINITY), minus_t, V::broadcast(kZeroSigmoid)));
    auto value = V::divide(x, V::add(e, V::broadcast(1)));
    store(y, type, up ? V::multiply(value, load(up, type)) : value);
  });
}

template <class V>
void gated_activation_rows(Activation activation, const Matrix& gate, const Matrix& up, int64_t rows, int64_t columns,
                           void* y, int64_t y_stride, Threads& threads) {
  threads.parallel_for(rows, rows_a_thread(columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      gated_activation_row<V>(activation, at(gate.values, gate.type, row * gate.stride),
                              up.values ? at(up.values, up.type, row * up.stride) : nullptr, gate.type, columns,
                              at(y, gate.type, row * y_stride));
  });
}

template <class V>
void add_to_rows(const Matrix& added, int64_t rows, int64_t columns, void* y, int64_t y_stride, Threads& threads) {
  const Type type = added.type;
  threads.parallel_for(rows, rows_a_thread(columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const void* from = at(added.values, type, row * added.stride);
      void* to = at(y, type, row * y_stride);
      each_vector<V>(
          columns, [&](int64_t, auto load, auto store) { store(to, type, V::add(load(to, type), load(from, type))); });
    }
  });
}

// The cosines and sines of the positions of one batch: [position][half], computed once for all heads.
struct Angles {
  const float *cosines, *sines;
};

inline Angles compute_angles(const Rope& rope, int32_t offset) {
  const int64_t half = rope.dims / 2;
  float* cosines = scratch<float>(Slot::x_scales, rope.length * half);
  float* sines = scratch<float>(Slot::x_sums, rope.length * half);
  for (int64_t i = 0; i < half; i++) {
    float frequency = rope.frequencies ? rope.frequencies[i] : ::exp2f(-float(i) / float(half) * ::log2f(rope.base));
    for (int64_t l = 0; l < rope.length; l++) {
      float angle = float(offset + l) * rope.scale * frequency;
      cosines[l * half + i] = ::cosf(angle);
      sines[l * half + i] = ::sinf(angle);
    }
  }
  return {cosines, sines};
}

template <class V>
[[gnu::flatten]] void rotate_halves(const void* x, void* y, Type type, int64_t half, const float* cosines,
                                    const float* sines) {
  each_vector<V>(half, [&](int64_t, auto load, auto store) {
    const void* second_x = at(x, type, half);
    auto a = load(x, type), b = load(second_x, type);
    auto cosine = load(cosines, Type::float32), sine = load(sines, Type::float32);
    store(y, type, V::multiply_add(a, cosine, V::multiply(V::multiply(b, V::broadcast(-1)), sine)));
    store(at(y, type, half), type, V::multiply_add(a, sine, V::multiply(b, cosine)));
  });
}

inline void rotate_pairs(const void* x, void* y, Type type, int64_t half, const float* cosines, const float* sines) {
  for (int64_t i = 0; i < half; i++) {
    float a = load_value(x, type, 2 * i), b = load_value(x, type, 2 * i + 1);
    store_value(y, type, 2 * i, a * cosines[i] - b * sines[i]);
    store_value(y, type, 2 * i + 1, a * sines[i] + b * cosines[i]);
  }
}

template <class V>
void rotate(const Rope& rope, Threads& threads) {
  const int64_t half = rope.dims / 2;
  Angles angles{};
  for (int64_t batch = 0; batch < rope.batches; batch++) {
    if (batch == 0 || rope.offset_stride) angles = compute_angles(rope, rope.offsets[batch * rope.offset_stride]);
    threads.parallel_for(rope.heads * rope.length, rows_a_thread(rope.head_size), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        int64_t head = i / rope.length, l = i % rope.length;
        const void* x = head_row(rope.x, rope.type, batch, head, l);
        void* y = head_row(rope.y, rope.type, batch, head, l);
        const float *cosines = angles.cosines + l * half, *sines = angles.sines + l * half;
        if (rope.traditional)
          rotate_pairs(x, y, rope.type, half, cosines, sines);
        else
          rotate_halves<V>(x, y, rope.type, half, cosines, sines);
        int64_t beyond = rope.head_size - rope.dims;
        std::memmove(at(y, rope.type, rope.dims), at(x, rope.type, rope.dims), beyond * size_of(rope.type));
      }
    });
  }
}

}  // namespace
}  // namespace mlx_cpu_kernels
