// Dequantization into panels: blocks of a matrix in float32, laid out as the product of panels reads them.
//
// A panel covers kWidth neighbouring columns of y and some depth of the sum: [depth][kWidth]. The matrix is read in its
// own order, along its rows; what changes is which side of the product the rows are.
#pragma once

#include <utility>

#include "scratch.h"

namespace mlx_cpu_kernels {
namespace {

constexpr int64_t kChunk = 32;  // columns that fill whole words at any number of bits, and lie in one group, or two

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

inline void prefetch(const void* from) { __builtin_prefetch(from, 0, 2); }

// Fetches the lines of `bytes` from `from` on, each once.
inline void prefetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch(static_cast<const char*>(from) + i);
}

// Bytes between the weights that are multiplied and those that are fetched. They go into the second cache. It awaits
// more lines at a time than the first one, with which a Zen 4 core reads at half the speed.
constexpr int64_t kPrefetchBytes = 32768;
// How many rows ahead weights and scales are prefetched. Memory answers later than four short rows are multiplied.
inline int64_t rows_ahead(const Quantized& w) {
  return 4 * larger(1, kPrefetchBytes / larger(1, 4 * w.row_words * int64_t{sizeof(uint32_t)}));
}

// How a kernel's weights are stored.
struct Format {
  Mode mode;
  int bits;

  constexpr bool is_affine() const { return mode == Mode::affine; }
  constexpr bool is_e2m1() const { return mode == Mode::mxfp4 || mode == Mode::nvfp4; }
  constexpr int groups_of_chunk() const { return mode == Mode::nvfp4 ? 2 : 1; }  // at most
};

// Calls f<format>() for a format that is known only now.
template <class F>
inline void with_format(const Quantized& w, F&& f) {
  switch (w.mode) {
    case Mode::mxfp4:
      return f.template operator()<Format{Mode::mxfp4, 4}>();
    case Mode::nvfp4:
      return f.template operator()<Format{Mode::nvfp4, 4}>();
    case Mode::mxfp8:
      return f.template operator()<Format{Mode::mxfp8, 8}>();
    default:
      break;
  }
  switch (w.bits) {
    case 2:
      return f.template operator()<Format{Mode::affine, 2}>();
    case 3:
      return f.template operator()<Format{Mode::affine, 3}>();
    case 4:
      return f.template operator()<Format{Mode::affine, 4}>();
    case 5:
      return f.template operator()<Format{Mode::affine, 5}>();
    case 6:
      return f.template operator()<Format{Mode::affine, 6}>();
    default:
      return f.template operator()<Format{Mode::affine, 8}>();
  }
}

// The e4m3 in the lowest byte of each lane: see float_of_e4m3.
template <class V>
inline typename V::Float e4m3_of_low_bits(typename V::Int words) {
  auto magnitude = V::template shift_left<20>(V::and_words(words, V::broadcast_word(0x7f)));
  auto sign = V::template shift_left<24>(V::and_words(words, V::broadcast_word(0x80)));
  auto value = V::multiply(V::float_of_bits(magnitude), V::broadcast(0x1p120f));
  auto not_a_number = V::zero_where_below(V::float_of_bits(V::broadcast_word(0x7fc00000)), value, V::broadcast(480));
  return V::float_of_bits(V::or_words(V::or_words(V::words_of_float(value), sign), V::words_of_float(not_a_number)));
}

// The number that the lowest bits of each lane are, before it is scaled.
template <class V, Format format>
inline typename V::Float value_of_low_bits(typename V::Int words) {
  if constexpr (format.is_affine())
    return V::template value_of_low_bits<format.bits>(words);
  else if constexpr (format.is_e2m1())
    return V::e2m1_of_low_bits(words);
  else
    return e4m3_of_low_bits<V>(words);
}

template <class V>
inline typename V::Float float_of_bytes(typename V::Int bytes, Type type) {
  if (type == Type::e4m3) return e4m3_of_low_bits<V>(bytes);
  return V::maximum(V::float_of_bits(V::template shift_left<23>(bytes)), V::broadcast(0x1p-127f));
}

// Scales or biases [i, i + kLanes) of any type, or the first `count` < kLanes of them, then zeros, and nothing beyond.
template <class V>
inline typename V::Float load_scales(const void* from, Type type, int64_t i) {
  if (is_byte(type)) return float_of_bytes<V>(V::load_bytes(at(from, type, i)), type);
  return V::load_values(from, type, i);
}
template <class V>
inline typename V::Float load_some_scales(const void* from, Type type, int64_t i, int64_t count) {
  if (is_byte(type)) return float_of_bytes<V>(V::load_some_bytes(at(from, type, i), count), type);
  return V::load_some_values(from, type, i, count);
}

// Stores sums as values [first, first + count) of a row of any type.
template <class V>
void store_row(const float* sums, int64_t count, void* to, Type type, int64_t first) {
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) V::store_values(to, type, first + i, V::load(sums + i));
  if (i < count) V::store_some_values(to, type, first + i, V::load(sums + i), count - i);
}

template <class V, Format format>
inline typename V::Float scaled(typename V::Float value, typename V::Float scale, typename V::Float bias) {
  if constexpr (format.is_affine()) return V::multiply_add(value, scale, bias);
  return V::multiply(value, scale);
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
      if (w_.mode == Mode::affine) transpose_groups(w_.biases, v, biases_ + to);
    }
  }

  // Writes the panels of the selected columns for the depth [begin, begin + depth), whole chunks, `stride` apart.
  void fill(int64_t begin, int64_t depth, float* panels, int64_t stride) const {
    with_format(w_, [&]<Format format>() {
      for (int64_t v = 0; v * V::kLanes < count_; v++) {
        float* panel = panels + v / V::kPanelVectors * stride + v % V::kPanelVectors * V::kLanes;
        fill_vector<format>(v, begin, depth, panel);
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
        tile[lane] = V::words_of_float(groups_ - g >= V::kLanes ? load_scales<V>(from, w_.type, g)
                                                                : load_some_scales<V>(from, w_.type, g, groups_ - g));
      }
      V::transpose(tile);
      for (int i = 0; i < V::kLanes; i++) V::store_words(out + (g + i) * kWidth<V>, tile[i]);
    }
  }

  // Prefetches the words that the next call of fill reads in the same vector: the same rows further on, or the next
  // rows. It also prefetches the next rows' scales and biases of this depth. A processor follows a few streams of its
  // own accord, not the short pieces of 32 rows.
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
      if (w_.mode == Mode::affine) __builtin_prefetch(at(w_.biases, w_.type, group));
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

  template <Format format>
  [[gnu::flatten]] void fill_vector(int64_t v, int64_t begin, int64_t depth, float* panel) const {
    constexpr int bits = format.bits, kGroups = format.groups_of_chunk();
    const uint32_t* words = transpose_words(v, begin / kChunk * bits, depth / kChunk * bits);
    prefetch_after(v, begin, depth);
    int64_t size = round_up(groups_, V::kLanes) * kWidth<V>;
    int64_t at_vector = v / V::kPanelVectors * size + v % V::kPanelVectors * V::kLanes;
    for (int64_t k = 0; k < depth; k += kChunk, words += bits * V::kLanes, panel += kChunk * kWidth<V>) {
      int64_t group = at_vector + (begin + k) / w_.group_size * kWidth<V>;
      typename V::Float scale[kGroups], bias = V::zero();
      unroll<kGroups>([&]<int g>() { scale[g] = V::load(scales_ + group + g * kWidth<V>); });
      if constexpr (format.is_affine()) bias = V::load(biases_ + group);
      typename V::Int q[bits];
      for (int i = 0; i < bits; i++) q[i] = V::load_words(words + i * V::kLanes);
      unroll<kChunk>([&]<int i>() {
        constexpr int word = i * bits / 32, next = word + 1 < bits ? word + 1 : word;
        auto value = value_of_low_bits<V, format>(V::template field<bits, i * bits % 32>(q[word], q[next]));
        V::store(panel + i * kWidth<V>, scaled<V, format>(value, scale[i * kGroups / kChunk], bias));
      });
    }
  }

  const Quantized& w_;
  int64_t groups_, first_ = 0, count_ = 0;
  float *scales_ = nullptr, *biases_ = nullptr;
};

// Calls f(i, value) for the vectors i of 32 neighbouring columns of a row, of which `column` is the first.
template <class V, Format format, class F>
inline void unpack_chunk(const Quantized& w, int64_t row, int64_t column, F&& f) {
  constexpr int kGroups = format.groups_of_chunk();
  const int64_t group = row * w.row_groups + column / w.group_size;
  const uint32_t* words = w.weights + row * w.row_words + column / kChunk * format.bits;
  typename V::Float scale[kGroups], bias = V::zero();
  for (int g = 0; g < kGroups; g++) scale[g] = V::broadcast(load_value(w.scales, w.type, group + g));
  if constexpr (format.is_affine()) bias = V::broadcast(load_value(w.biases, w.type, group));
  V::template unpack_in_order<format.bits>(words, [&](int i, auto moved) {
    f(i, scaled<V, format>(value_of_low_bits<V, format>(moved), scale[i * V::kLanes * kGroups / kChunk], bias));
  });
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
    with_format(w_, [&]<Format format>() {
      for (int64_t k = 0; k < depth; k++) {
        for (int64_t c = 0; c < count_; c += kChunk) {
          unpack_chunk<V, format>(w_, begin + k, first_ + c, [&](int i, auto value) {
            int64_t column = c + i * V::kLanes;
            V::store(panels + column / kWidth<V> * stride + k * kWidth<V> + column % kWidth<V>, value);
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
    with_format(w, [&]<Format format>() {
      for (int64_t r = begin; r < end; r++) {
        for (int64_t c = 0; c < w.columns; c += kChunk) {
          unpack_chunk<V, format>(w, row_begin + r, c, [&](int i, auto value) {
            V::store_values(out, type, r * w.columns + c + i * V::kLanes, value);
          });
        }
      }
    });
  });
}

}  // namespace
}  // namespace mlx_cpu_kernels
