// Dequantization into panels: blocks of a matrix in float32, laid out as the product of panels reads them.
//
// A panel covers kWidth neighbouring columns of y and some depth of the sum: [depth][kWidth]. The matrix is read in its
// own order, along its rows; what changes is which side of the product the rows are.
#pragma once

#include <utility>

#include "scratch.h"

namespace mlx_cpu_kernels {
namespace {

constexpr int64_t kChunk = 32;  // columns that fill whole words at any number of bits, and lie in one group

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Calls f<0>, f<1>, ... f<count - 1>: a loop whose counter is known when it is compiled.
template <int count, class F>
inline void unroll(F&& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (f.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, count>{});
}

// Calls f<bits>() for a number of bits that is known only now.
template <class F>
inline void with_bits(int bits, F&& f) {
  switch (bits) {
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    case 4:
      return f.template operator()<4>();
    case 5:
      return f.template operator()<5>();
    case 6:
      return f.template operator()<6>();
    default:
      return f.template operator()<8>();
  }
}

// Stores sums as values [first, first + count) of a row of any type.
template <class V>
void store_row(const float* sums, int64_t count, void* to, Type type, int64_t first) {
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) V::store_values(to, type, first + i, V::load(sums + i));
  if (i < count) V::store_some_values(to, type, first + i, V::load(sums + i), count - i);
}

template <class V>
constexpr int64_t kWidth = V::kLanes * V::kPanelVectors;

// Panels for x times the transposed matrix: a row of the matrix is a column of y.
//
// Groups of kLanes rows are transposed word by word, so that a vector holds one word of each row. From then on each
// lane unpacks its own row, with shifts that are the same in all lanes, whatever the number of bits.
template <class V>
class TransposedPanels {
 public:
  explicit TransposedPanels(const Quantized& w) : w_(w), groups_(w.columns / w.group_size) {}

  int64_t depth() const { return w_.columns; }
  int64_t columns() const { return w_.rows; }
  static constexpr int64_t kColumns = kWidth<V>;  // least number of columns to prepare at once

  // Selects the columns [first, first + count) of y, a whole number of panels except at the end.
  void prepare(int64_t first, int64_t count) {
    first_ = first;
    count_ = count;
    int64_t panels = round_up(count, kWidth<V>) / kWidth<V>;
    int64_t size = round_up(groups_, V::kLanes) * kWidth<V>;
    scales_ = scratch<float>(Slot::group_scales, panels * size);
    biases_ = scratch<float>(Slot::group_biases, panels * size);
    for (int64_t v = 0; v < panels * V::kPanelVectors; v++) {
      int64_t to = v / V::kPanelVectors * size + v % V::kPanelVectors * V::kLanes;
      transpose_groups(w_.scales, v, scales_ + to);
      transpose_groups(w_.biases, v, biases_ + to);
    }
  }

  // Writes the panels of the selected columns for the depth [begin, begin + depth), whole chunks, `stride` apart.
  void fill(int64_t begin, int64_t depth, float* panels, int64_t stride) const {
    with_bits(w_.bits, [&]<int bits>() {
      for (int64_t v = 0; v * V::kLanes < count_; v++) {
        float* panel = panels + v / V::kPanelVectors * stride + v % V::kPanelVectors * V::kLanes;
        fill_vector<bits>(v, begin, depth, panel);
      }
    });
  }

 private:
  // The row of the matrix in lane `lane` of vector v; beyond the end the last one, whose results are not used.
  int64_t row(int64_t v, int lane) const { return first_ + smaller(v * V::kLanes + lane, count_ - 1); }

  [[gnu::flatten]] void transpose_groups(const void* values, int64_t v, float* out) const {
    for (int64_t g = 0; g < groups_; g += V::kLanes) {
      typename V::Int tile[V::kLanes];
      for (int lane = 0; lane < V::kLanes; lane++) {
        const void* from = at(values, w_.type, row(v, lane) * w_.row_groups);
        tile[lane] = V::words_of_float(groups_ - g >= V::kLanes ? V::load_values(from, w_.type, g)
                                                                : V::load_some_values(from, w_.type, g, groups_ - g));
      }
      V::transpose(tile);
      for (int i = 0; i < V::kLanes; i++) V::store_words(out + (g + i) * kWidth<V>, tile[i]);
    }
  }

  // Asks for the words that the next call of fill reads in the same vector (the same rows further on, or the next rows)
  // and for the next rows' scales and biases of this depth. A processor follows a few streams of its own accord, not
  // the short pieces of 32 rows.
  void prefetch_after(int64_t v, int64_t begin, int64_t depth) const {
    int64_t next = begin + depth < w_.columns ? begin + depth : 0;
    int64_t bytes = smaller(depth, w_.columns - next) * w_.bits / 8;
    int64_t row = first_ + v * V::kLanes, next_row = smaller(row + count_, w_.rows - V::kLanes);
    if (next_row < 0) return;
    for (int lane = 0; lane < V::kLanes; lane++, row++, next_row++) {
      const uint32_t* words = w_.weights + (next ? row : next_row) * w_.row_words + next / kChunk * w_.bits;
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(reinterpret_cast<const char*>(words) + i);
      int64_t group = next_row * w_.row_groups + begin / w_.group_size;
      __builtin_prefetch(at(w_.scales, w_.type, group));
      __builtin_prefetch(at(w_.biases, w_.type, group));
    }
  }

  // Words [begin, begin + count) of each of the vector's rows, as [word][lane].
  [[gnu::flatten]] const uint32_t* transpose_words(int64_t v, int64_t begin, int64_t count) const {
    uint32_t* out = scratch<uint32_t>(Slot::words, round_up(count, V::kLanes) * V::kLanes);
    const uint32_t* rows[V::kLanes];
    for (int lane = 0; lane < V::kLanes; lane++) rows[lane] = w_.weights + row(v, lane) * w_.row_words + begin;
    for (int64_t i = 0; i < count; i += V::kLanes) {
      typename V::Int tile[V::kLanes];
      if (count - i >= V::kLanes) {
        for (int lane = 0; lane < V::kLanes; lane++) tile[lane] = V::load_words(rows[lane] + i);
      } else {
        for (int lane = 0; lane < V::kLanes; lane++) tile[lane] = V::load_some_words(rows[lane] + i, count - i);
      }
      V::transpose(tile);
      for (int j = 0; j < V::kLanes; j++) V::store_words(out + (i + j) * V::kLanes, tile[j]);
    }
    return out;
  }

  template <int bits>
  [[gnu::flatten]] void fill_vector(int64_t v, int64_t begin, int64_t depth, float* panel) const {
    const uint32_t* words = transpose_words(v, begin / kChunk * bits, depth / kChunk * bits);
    prefetch_after(v, begin, depth);
    int64_t size = round_up(groups_, V::kLanes) * kWidth<V>;
    int64_t at_vector = v / V::kPanelVectors * size + v % V::kPanelVectors * V::kLanes;
    for (int64_t k = 0; k < depth; k += kChunk, words += bits * V::kLanes, panel += kChunk * kWidth<V>) {
      int64_t group = at_vector + (begin + k) / w_.group_size * kWidth<V>;
      auto scale = V::load(scales_ + group), bias = V::load(biases_ + group);
      typename V::Int q[bits];
      for (int i = 0; i < bits; i++) q[i] = V::load_words(words + i * V::kLanes);
      unroll<kChunk>([&]<int i>() {
        constexpr int word = i * bits / 32, next = word + 1 < bits ? word + 1 : word;
        auto value = V::template field<bits, i * bits % 32>(q[word], q[next]);
        V::store(panel + i * kWidth<V>, V::multiply_add(value, scale, bias));
      });
    }
  }

  const Quantized& w_;
  int64_t groups_, first_ = 0, count_ = 0;
  float *scales_ = nullptr, *biases_ = nullptr;
};

// Calls f(i, value) for the vectors i of 32 neighbouring columns of a row, which start at a whole word.
template <class V, int bits, class F>
inline void unpack_chunk(const uint32_t* words, float scale, float bias, F&& f) {
  auto scales = V::broadcast(scale), biases = V::broadcast(bias);
  V::template unpack_in_order<bits>(words, [&](int i, auto value) { f(i, V::multiply_add(value, scales, biases)); });
}

// Panels for x times the matrix as it is: a column of the matrix is a column of y.
template <class V>
class StraightPanels {
 public:
  explicit StraightPanels(const Quantized& w) : w_(w) {}

  int64_t depth() const { return w_.rows; }
  int64_t columns() const { return w_.columns; }
  static constexpr int64_t kColumns = kWidth<V> > kChunk ? kWidth<V> : kChunk;

  void prepare(int64_t first, int64_t count) {
    first_ = first;
    count_ = count;
  }

  void fill(int64_t begin, int64_t depth, float* panels, int64_t stride) const {
    with_bits(w_.bits, [&]<int bits>() {
      for (int64_t k = 0; k < depth; k++) {
        for (int64_t c = 0; c < count_; c += kChunk) {
          int64_t group = (begin + k) * w_.row_groups + (first_ + c) / w_.group_size;
          const uint32_t* words = w_.weights + (begin + k) * w_.row_words + (first_ + c) / kChunk * bits;
          unpack_chunk<V, bits>(words, load_value(w_.scales, w_.type, group), load_value(w_.biases, w_.type, group),
                                [&](int i, auto value) {
                                  int64_t column = c + i * V::kLanes;
                                  V::store(panels + column / kWidth<V> * stride + k * kWidth<V> + column % kWidth<V>,
                                           value);
                                });
        }
      }
    });
  }

 private:
  const Quantized& w_;
  int64_t first_ = 0, count_ = 0;
};

template <class V>
void dequantize_rows(const Quantized& w, int64_t row_begin, int64_t row_end, void* out, Type type, Threads& threads) {
  int64_t grain = larger(1, 4096 / w.columns);
  threads.parallel_for(row_end - row_begin, grain, [&](int64_t begin, int64_t end) {
    with_bits(w.bits, [&]<int bits>() {
      for (int64_t r = begin; r < end; r++) {
        for (int64_t c = 0; c < w.columns; c += kChunk) {
          int64_t group = (row_begin + r) * w.row_groups + c / w.group_size;
          const uint32_t* words = w.weights + (row_begin + r) * w.row_words + c / kChunk * bits;
          unpack_chunk<V, bits>(
              words, load_value(w.scales, w.type, group), load_value(w.biases, w.type, group),
              [&](int i, auto value) { V::store_values(out, type, r * w.columns + c + i * V::kLanes, value); });
        }
      }
    });
  });
}

}  // namespace
}  // namespace mlx_cpu_kernels
