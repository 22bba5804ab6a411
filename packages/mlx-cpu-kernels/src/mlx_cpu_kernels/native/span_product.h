// Products of few rows with affine weights of 4 bits, where an instruction multiplies bytes in pairs, into 16 bits.
//
// x becomes digits of bytes (byte_digits.h), as for byte_product.h. There, a block is one vector of packed weights,
// whose sums are widened and scaled at once. Here a span is two or four neighbouring vectors of a row. Their words of
// 64 bits change places, so that each quarter of all vectors lies within one group:
//
//   two vectors   a0 b0 a2 b2 | a1 b1 a3 b3                               of  a0 a1 a2 a3 | b0 b1 b2 b3
//   four vectors  a0 b0 c0 d0 | a1 b1 c1 d1 | a2 b2 c2 d2 | a3 b3 c3 d3   of  a0 a1 a2 a3 | b0 b1 b2 b3 | c0 ... d3
//
// The pairs' sums of all vectors fit into 16 bits: 16 products of 15 with a signed byte. They are widened once, and
// scaled once. The weights of a span are unpacked once for all rows of x, whose digits stay in the first cache.
#pragma once

#include "byte_digits.h"

namespace mlx_cpu_kernels {
namespace {

constexpr int kNibbles = 2;  // values of a byte
constexpr int kPlanes = 3;   // digits of a value
constexpr int kQuarters = 4;
constexpr int64_t kQuarterColumns = 16;
// Rows of the matrix that take turns with the digits of some spans, and bytes of these.
constexpr int64_t kSpanRows = 16;
constexpr int64_t kSpanDigits = 16384;
// Words between those that one row is multiplied with and those that are fetched.
constexpr int64_t kPrefetchWords = 512;

template <class V, int vectors>
struct Span {
  static constexpr int64_t kBytes = V::kLanes * int64_t{sizeof(uint32_t)};  // of a vector
  static constexpr int64_t kVectorColumns = kNibbles * kBytes;
  static constexpr int64_t kColumns = vectors * kVectorColumns;
  static constexpr int64_t kWords = vectors * V::kLanes;
  static constexpr int64_t kDigits = vectors * kNibbles * kPlanes * kBytes;
  // Of a row of x: digits as [vector][nibble][plane][byte], the scales of the lanes, and their shares of the sums.
  static constexpr int64_t kSize = kDigits + 2 * kBytes;

  // Where the words of 64 bits lie, in the columns' order, that become quarter q of vector v.
  static constexpr int quarter(int v, int q) {
    return vectors == 4 ? q * kQuarters + v : vectors == 2 ? q % 2 * kQuarters + q / 2 * 2 + v : q;
  }
  static constexpr int64_t group_of_lane(int lane, int64_t group_size) {
    return quarter(0, lane / 2) * kQuarterColumns / group_size;
  }
  static typename V::Int groups_of_lanes(int64_t group_size) {
    uint32_t groups[V::kLanes];
    for (int lane = 0; lane < V::kLanes; lane++) groups[lane] = uint32_t(group_of_lane(lane, group_size));
    return V::load_words(groups);
  }
};

// The spans of a row. The last columns may be one vector or less, a span of its own.
template <class V, int vectors>
struct SpansOfRow {
  using S = Span<V, vectors>;
  int64_t whole, rest;  // spans, and columns behind them

  explicit SpansOfRow(int64_t columns) : whole(columns / S::kColumns), rest(columns % S::kColumns) {
    if (rest > S::kVectorColumns) whole++, rest = 0;  // the last one lacks some columns
  }
  int64_t count() const { return whole + (rest > 0); }
};

// x as [span][row], each of Span::kSize bytes. Columns beyond the end are zero, and so are their scales and sums.
template <class V, int vectors>
class SpanRows {
 public:
  using S = Span<V, vectors>;

  SpanRows(const Rows& x, int64_t columns, int64_t group_size)
      : rows_(x.count), columns_(columns), group_size_(group_size), spans_(columns) {
    digits_ = scratch<int8_t>(Slot::x, spans_.count() * rows_ * S::kSize);
    for (int64_t row = 0; row < rows_ && fits_; row++) fits_ = convert(x.row(row), x.type, row);
  }

  // Whether the digits hold each row of x: see ByteRows.
  bool fits() const { return fits_; }

  int64_t rows() const { return rows_; }
  const SpansOfRow<V, vectors>& spans() const { return spans_; }
  const int8_t* span(int64_t span) const { return digits_ + span * rows_ * S::kSize; }

 private:
  [[gnu::flatten]] bool convert(const void* x, Type type, int64_t row) {
    const int64_t padded = spans_.count() * S::kColumns, groups = columns_ / group_size_;
    const int64_t padded_groups = round_up(larger(groups, padded / group_size_), V::kLanes);
    float* magnitudes = scratch<float>(Slot::values, 2 * padded_groups);  // the largest ones of the groups
    float* sums = magnitudes + padded_groups;
    int8_t* planes = scratch<int8_t>(Slot::rows, kPlanes * padded);  // in the columns' order
    for (int64_t g = 0; g < padded_groups; g++) {
      magnitudes[g] = sums[g] = 0;
      if (g >= groups) continue;
      const int64_t first = g * group_size_;
      magnitudes[g] = largest_of_group<V>(x, type, first, group_size_);
      if (magnitudes[g] < 0) return false;
      int8_t* to[] = {planes + first, planes + padded + first, planes + 2 * padded + first};
      store_digits<V>(x, type, first, group_size_, integers_of_group(magnitudes[g]), to);
      sums[g] = sum_of_group<V>(x, type, first, group_size_);
    }
    if (!row_fits<V>(magnitudes, groups, true)) return false;
    for (int p = 0; p < kPlanes; p++) std::fill(planes + p * padded + columns_, planes + (p + 1) * padded, int8_t{0});
    auto arrange = [&]<int span_vectors>(int64_t s) {
      using Own = Span<V, span_vectors>;
      const int64_t first_group = s * S::kColumns / group_size_;
      int8_t* to = digits_ + (s * rows_ + row) * S::kSize;
      store_quarters<span_vectors>(planes + s * S::kColumns, padded, to);
      float* lanes = reinterpret_cast<float*>(to + S::kDigits);
      const float lanes_of_group = float(smaller(group_size_, Own::kColumns) * V::kLanes) / float(Own::kColumns);
      for (int lane = 0; lane < V::kLanes; lane++) {
        const int64_t g = first_group + Own::group_of_lane(lane, group_size_);
        lanes[lane] = scale_of_group(magnitudes[g]);
        lanes[V::kLanes + lane] = sums[g] / lanes_of_group;
      }
    };
    for (int64_t s = 0; s < spans_.whole; s++) arrange.template operator()<vectors>(s);
    if (spans_.rest) arrange.template operator()<1>(spans_.whole);
    return true;
  }

  template <int span_vectors>
  static void store_quarters(const int8_t* planes, int64_t padded, int8_t* to) {
    using Own = Span<V, span_vectors>;
    for (int p = 0; p < kPlanes; p++)
      for (int v = 0; v < span_vectors; v++)
        for (int q = 0; q < kQuarters; q++) {
          int8_t* quarter = to + (v * kNibbles * kPlanes + p) * S::kBytes + q * (S::kBytes / kQuarters);
          V::store_apart(planes + p * padded + Own::quarter(v, q) * kQuarterColumns, quarter,
                         quarter + kPlanes * S::kBytes);
        }
  }

  int64_t rows_, columns_, group_size_;
  SpansOfRow<V, vectors> spans_;
  int8_t* digits_;
  bool fits_ = true;
};

// The products of a span's weights with the digits at x, as integers of the lanes.
template <class V, int vectors>
inline typename V::Float multiply_span(const typename V::Int (&weights)[vectors * kNibbles], const int8_t* x) {
  auto digits = [&](int v, int p) { return V::load_words(x + (v * kPlanes + p) * Span<V, vectors>::kBytes); };
  typename V::Int high, middle, low;
  unroll<vectors * kNibbles>([&]<int v>() {
    auto add = [&](auto& to, int plane) {
      auto pairs = V::multiply_pairs(weights[v], digits(v, plane));
      to = v ? V::add_halves(to, pairs) : pairs;
    };
    add(high, 0);
    add(middle, 1);
    add(low, 2);
    V::keep_order(high, middle, low);
  });
  return V::float_of_planes(high, middle, low);
}

// Multiplies rows of the matrix with all rows of x. A span has `groups` scales and biases.
template <class V, int vectors, int groups>
class SpanTile {
 public:
  using S = Span<V, vectors>;

  SpanTile(const SpanRows<V, vectors>& x, int64_t group_size)
      : x_(x),
        group_size_(group_size),
        order_(S::groups_of_lanes(group_size)),
        rest_order_(Span<V, 1>::groups_of_lanes(group_size)),
        at_once_(larger(kSpanDigits / (x.rows() * S::kSize), 1)),
        sums_(scratch<float>(Slot::sums, kSpanRows * x.rows() * V::kLanes)) {}

  int64_t x_rows() const { return x_.rows(); }

  // y[j * y_stride + r] for the `count` rows from `first` on, at most kSpanRows. Up to three more are written in each
  // row of y.
  void multiply(const Quantized& w, int64_t first, int64_t count, float* y, int64_t y_stride) const {
    const int64_t rows = x_.rows(), sums_of_row = rows * V::kLanes, from = first * w.row_groups;
    const float* scales = convert(w.scales, w, from, count, Slot::group_scales);
    const float* biases = convert(w.biases, w, from, count, Slot::group_biases);
    std::fill(sums_, sums_ + round_up(count, 4) * sums_of_row, 0.f);
    if (rows == 1)
      add<true>(w, first, count, 0, x_.spans().count(), scales, biases);
    else
      for (int64_t s = 0; s < x_.spans().count(); s += at_once_)
        add<false>(w, first, count, s, smaller(s + at_once_, x_.spans().count()), scales, biases);
    for (int64_t j = 0; j < rows; j++)
      for (int64_t r = 0; r < count; r += 4) {
        auto sum = [&](int i) { return V::load(sums_ + (r + i) * sums_of_row + j * V::kLanes); };
        V::store_sums(y + j * y_stride + r, sum(0), sum(1), sum(2), sum(3));
      }
  }

 private:
  // The scales or biases of some rows as float32.
  [[gnu::flatten]] static const float* convert(const void* values, const Quantized& w, int64_t from, int64_t rows,
                                               Slot slot) {
    const int64_t count = (rows - 1) * w.row_groups + w.columns / w.group_size;
    values = at(values, w.type, from);
    if (w.type == Type::float32) return static_cast<const float*>(values);
    float* to = scratch<float>(slot, count);
    auto convert_as = [&](Type type) {  // known when it is compiled, so that no vector asks for it again
      int64_t i = 0;
      for (; i + V::kLanes <= count; i += V::kLanes) V::store(to + i, V::load_values(values, type, i));
      if (i < count) V::store(to + i, V::load_some_values(values, type, i, count - i));
    };
    if (w.type == Type::float16)
      convert_as(Type::float16);
    else
      convert_as(Type::bfloat16);
    return to;
  }

  // Adds to sums_ the products of the spans [begin, end) of rows of the matrix. The sums of one row of x stay in
  // registers.
  template <bool is_one>
  [[gnu::flatten]] void add(const Quantized& w, int64_t first, int64_t count, int64_t begin, int64_t end,
                            const float* scales, const float* biases) const {
    const int64_t x_rows = x_.rows(), whole = smaller(end, x_.spans().whole);
    // One row passes through the matrix word by word. With others, the same words of later rows come next.
    const int64_t ahead = is_one ? kPrefetchWords : rows_ahead(w) * w.row_words;
    const int64_t all_words = w.columns / 8, all_groups = w.columns / group_size_;
    const int64_t full = smaller(whole, all_words / S::kWords);  // spans that lack nothing
    const auto order = order_, rest_order = rest_order_;
    for (int64_t r = 0; r < count; r++) {
      const uint32_t* const row_words = w.weights + (first + r) * w.row_words;
      const float *const row_scales = scales + r * w.row_groups, *const row_biases = biases + r * w.row_groups;
      float* const sums = sums_ + r * x_rows * V::kLanes;
      const int8_t* x = x_.span(begin);
      auto products = V::zero(), offsets = V::zero();
      if (begin == 0) {  // not those of all rows at once: so many fetches would have to wait for one another
        const int64_t later = (first + r + rows_ahead(w)) * w.row_groups;
        prefetch(at(w.scales, w.type, later), all_groups * size_of(w.type));
        prefetch(at(w.biases, w.type, later), all_groups * size_of(w.type));
      }
      auto add_span = [&]<int span_vectors>(const uint32_t* words, auto scale, auto bias) {
        typename V::Int weights[span_vectors * kNibbles];
        V::template unpack_quarters<span_vectors>(words, weights);
        for (int64_t row = 0; row < (is_one ? 1 : x_rows); row++, x += S::kSize) {
          auto product = multiply_span<V, span_vectors>(weights, x);
          auto* lanes = reinterpret_cast<const float*>(x + S::kDigits);
          auto both_scales = V::multiply(scale, V::load(lanes)), share = V::load(lanes + V::kLanes);
          if constexpr (is_one) {
            offsets = V::multiply_add(bias, share, offsets);
            products = V::multiply_add(product, both_scales, products);
          } else {
            auto sum = V::multiply_add(bias, share, V::load(sums + row * V::kLanes));
            V::store(sums + row * V::kLanes, V::multiply_add(product, both_scales, sum));
          }
        }
      };
      for (int64_t s = begin; s < full; s++) {
        const uint32_t* words = row_words + s * S::kWords;
        for (int64_t i = 0; i < S::kWords; i += 16) __builtin_prefetch(words + ahead + i, 0, is_one ? 3 : 2);
        add_span.template operator()<vectors>(words, V::template spread<groups>(row_scales + s * groups, order),
                                              V::template spread<groups>(row_biases + s * groups, order));
      }
      if (full == end) {
        if constexpr (is_one) V::store(sums, V::add(products, offsets));
        continue;
      }
      alignas(64) uint32_t words[S::kWords];
      alignas(64) float some_scales[V::kLanes], some_biases[V::kLanes];
      auto copy = [](const void* from, int64_t left, void* to) {
        V::store_words(to, V::load_some_words(from, smaller(larger(left, 0), V::kLanes)));
      };
      copy(row_scales + full * groups, all_groups - full * groups, some_scales);
      copy(row_biases + full * groups, all_groups - full * groups, some_biases);
      for (int64_t i = 0; i < (full < whole ? S::kWords : V::kLanes); i += V::kLanes)
        copy(row_words + full * S::kWords + i, all_words - full * S::kWords - i, words + i);
      if (full < whole)
        add_span.template operator()<vectors>(words, V::template spread<groups>(some_scales, order),
                                              V::template spread<groups>(some_biases, order));
      else
        add_span.template operator()<1>(words, V::template spread<groups>(some_scales, rest_order),
                                        V::template spread<groups>(some_biases, rest_order));
      if constexpr (is_one) V::store(sums, V::add(products, offsets));
    }
  }

  const SpanRows<V, vectors>& x_;
  const int64_t group_size_;
  const typename V::Int order_, rest_order_;  // the group of each lane, counted from the span's first
  const int64_t at_once_;                     // spans
  float* const sums_;
};

}  // namespace
}  // namespace mlx_cpu_kernels
