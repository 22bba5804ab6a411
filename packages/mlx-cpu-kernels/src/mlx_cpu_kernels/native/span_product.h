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

template <class V, int vectors>
struct Span {
  static constexpr int64_t kBytes = V::kLanes * int64_t{sizeof(uint32_t)};  // of a vector
  static constexpr int64_t kColumns = vectors * kNibbles * kBytes;
  static constexpr int64_t kWords = vectors * V::kLanes;
  static constexpr int64_t kDigits = vectors * kNibbles * kPlanes * kBytes;
  // Of a row of x: digits as [vector][nibble][plane][byte], the scales of the lanes, and their shares of the sums.
  static constexpr int64_t kSize = kDigits + 2 * kBytes;

  // The words of 64 bits in the columns' order that become quarter q of vector v.
  static constexpr int quarter(int v, int q) {
    return vectors == 4 ? q * kQuarters + v : q % 2 * kQuarters + q / 2 * 2 + v;
  }
  static constexpr int64_t group_of_lane(int lane, int64_t group_size) {
    return quarter(0, lane / 2) * kQuarterColumns / group_size;
  }
};

// x as [span][row], each of Span::kSize bytes. Columns beyond the end are zero, and so are their scales and sums.
template <class V, int vectors>
class SpanRows {
 public:
  using S = Span<V, vectors>;

  SpanRows(const Rows& x, int64_t columns, int64_t group_size)
      : rows_(x.count),
        columns_(columns),
        group_size_(group_size),
        spans_(round_up(columns, S::kColumns) / S::kColumns) {
    digits_ = scratch<int8_t>(Slot::x, spans_ * rows_ * S::kSize);
    for (int64_t row = 0; row < rows_ && fits_; row++) fits_ = convert(x.row(row), x.type, row);
  }

  // Whether the digits hold each row of x: see ByteRows.
  bool fits() const { return fits_; }

  int64_t rows() const { return rows_; }
  int64_t spans() const { return spans_; }
  const int8_t* span(int64_t span) const { return digits_ + span * rows_ * S::kSize; }

 private:
  [[gnu::flatten]] bool convert(const void* x, Type type, int64_t row) {
    const int64_t padded = spans_ * S::kColumns, groups = columns_ / group_size_;
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
    const float lanes_of_group = float(smaller(group_size_, S::kColumns) * V::kLanes) / float(S::kColumns);
    for (int64_t s = 0; s < spans_; s++) {
      int8_t* to = digits_ + (s * rows_ + row) * S::kSize;
      arrange(planes + s * S::kColumns, padded, to);
      float* lanes = reinterpret_cast<float*>(to + S::kDigits);
      for (int lane = 0; lane < V::kLanes; lane++) {
        const int64_t g = s * S::kColumns / group_size_ + S::group_of_lane(lane, group_size_);
        lanes[lane] = scale_of_group(magnitudes[g]);
        lanes[V::kLanes + lane] = sums[g] / lanes_of_group;
      }
    }
    return true;
  }

  static void arrange(const int8_t* planes, int64_t padded, int8_t* to) {
    for (int p = 0; p < kPlanes; p++)
      for (int v = 0; v < vectors; v++)
        for (int q = 0; q < kQuarters; q++) {
          int8_t* quarter = to + (v * kNibbles * kPlanes + p) * S::kBytes + q * (S::kBytes / kQuarters);
          V::store_apart(planes + p * padded + S::quarter(v, q) * kQuarterColumns, quarter,
                         quarter + kPlanes * S::kBytes);
        }
  }

  int64_t rows_, columns_, group_size_, spans_;
  int8_t* digits_;
  bool fits_ = true;
};

// Neighbouring spans of one row of the matrix. The last one has fewer words and groups, or none.
struct SpansOfRow {
  const uint32_t* words;
  const float *scales, *biases;
  int64_t whole, last_words, last_groups;
};

// Multiplies spans with all rows of x, and adds to sums[row][kLanes]. A span has `groups` scales and biases. They are
// spread over the lanes in the given order. Fetches what lies `ahead` words later.
template <class V, int vectors, int groups, bool is_one>
[[gnu::flatten]] void add_spans(const SpansOfRow& spans, typename V::Int order, const int8_t* x, int64_t rows,
                                int64_t ahead, float* sums) {
  using S = Span<V, vectors>;
  auto products = V::zero(), offsets = V::zero();  // of the only row, in registers
  auto add_span = [&](const uint32_t* words, const float* scales, const float* biases) {
    typename V::Int weights[vectors * kNibbles];
    V::template unpack_quarters<vectors>(words, weights);
    const auto scale = V::template spread<groups>(scales, order), bias = V::template spread<groups>(biases, order);
    for (int64_t row = 0; row < (is_one ? 1 : rows); row++, x += S::kSize) {
      auto digits = [&](int v, int p) { return V::load_words(x + (v * kPlanes + p) * S::kBytes); };
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
      auto* lanes = reinterpret_cast<const float*>(x + S::kDigits);
      auto both_scales = V::multiply(scale, V::load(lanes)), share = V::load(lanes + V::kLanes);
      auto product = V::float_of_planes(high, middle, low);
      if constexpr (is_one) {
        offsets = V::multiply_add(bias, share, offsets);
        products = V::multiply_add(product, both_scales, products);
      } else {
        auto sum = V::multiply_add(bias, share, V::load(sums + row * V::kLanes));
        V::store(sums + row * V::kLanes, V::multiply_add(product, both_scales, sum));
      }
    }
  };
  const uint32_t* words = spans.words;
  const float *scales = spans.scales, *biases = spans.biases;
  for (int64_t s = 0; s < spans.whole; s++, words += S::kWords, scales += groups, biases += groups) {
    for (int64_t i = 0; i < S::kWords; i += 16) __builtin_prefetch(words + ahead + i, 0, 2);
    add_span(words, scales, biases);
  }
  if (spans.last_words > 0) {
    alignas(64) uint32_t some_words[S::kWords];
    alignas(64) float some_scales[V::kLanes], some_biases[V::kLanes];
    for (int64_t v = 0; v < vectors; v++) {
      const int64_t left = smaller(larger(spans.last_words - v * V::kLanes, 0), V::kLanes);
      V::store_words(some_words + v * V::kLanes, V::load_some_words(words + v * V::kLanes, left));
    }
    V::store_words(some_scales, V::load_some_words(scales, spans.last_groups));
    V::store_words(some_biases, V::load_some_words(biases, spans.last_groups));
    add_span(some_words, some_scales, some_biases);
  }
  if constexpr (is_one) V::store(sums, V::add(V::load(sums), V::add(products, offsets)));
}

// Multiplies rows of the matrix with all rows of x.
template <class V, int vectors, int groups>
class SpanTile {
 public:
  using S = Span<V, vectors>;

  SpanTile(const SpanRows<V, vectors>& x, const Quantized& w) : x_(x) {
    uint32_t order[V::kLanes];
    for (int lane = 0; lane < V::kLanes; lane++) order[lane] = uint32_t(S::group_of_lane(lane, w.group_size));
    order_ = V::load_words(order);
    at_once_ = larger(kSpanDigits / (x.rows() * S::kSize), 1);
    sums_ = scratch<float>(Slot::sums, kSpanRows * x.rows() * V::kLanes);
    const int64_t most_groups = smaller(at_once_, x.spans()) * groups;
    if (w.type != Type::float32) {
      scales_ = scratch<float>(Slot::group_scales, round_up(most_groups, V::kLanes));
      biases_ = scratch<float>(Slot::group_biases, round_up(most_groups, V::kLanes));
    }
  }

  int64_t x_rows() const { return x_.rows(); }

  // y[j * y_stride + r] for the `count` rows from `first` on, at most kSpanRows. Up to three more are written in each
  // row of y.
  void multiply(const Quantized& w, int64_t first, int64_t count, float* y, int64_t y_stride) const {
    const int64_t rows = x_.rows(), sums_of_row = rows * V::kLanes;
    std::fill(sums_, sums_ + round_up(count, 4) * sums_of_row, 0.f);
    for (int64_t s = 0; s < x_.spans(); s += at_once_) add(w, first, count, s);
    for (int64_t j = 0; j < rows; j++)
      for (int64_t r = 0; r < count; r += 4) {
        auto sum = [&](int i) { return V::load(sums_ + (r + i) * sums_of_row + j * V::kLanes); };
        V::store_sums(y + j * y_stride + r, sum(0), sum(1), sum(2), sum(3));
      }
  }

 private:
  // Adds to the sums of rows of the matrix the products of the spans from `span` on, at_once_ at most.
  void add(const Quantized& w, int64_t first, int64_t count, int64_t span) const {
    auto add = x_.rows() == 1 ? add_spans<V, vectors, groups, true> : add_spans<V, vectors, groups, false>;
    const int64_t left = w.columns / 8 - span * S::kWords;  // words
    const int64_t spans = smaller(at_once_, x_.spans() - span), whole = smaller(spans, left / S::kWords);
    SpansOfRow row;
    row.whole = whole;
    row.last_words = whole < spans ? left - whole * S::kWords : 0;
    row.last_groups = row.last_words * 8 / w.group_size;
    const int64_t all_groups = whole * groups + row.last_groups, bytes = all_groups * size_of(w.type);
    const void *scales = at(w.scales, w.type, first * w.row_groups + span * groups);
    const void *biases = at(w.biases, w.type, first * w.row_groups + span * groups);
    row.words = w.weights + first * w.row_words + span * S::kWords;
    const int64_t ahead = rows_ahead(w);
    for (int64_t r = 0; r < count; r++, row.words += w.row_words) {
      prefetch(at(scales, w.type, ahead * w.row_groups), bytes);
      prefetch(at(biases, w.type, ahead * w.row_groups), bytes);
      row.scales = convert(scales, w.type, all_groups, scales_);
      row.biases = convert(biases, w.type, all_groups, biases_);
      add(row, order_, x_.span(span), x_.rows(), ahead * w.row_words, sums_ + r * x_.rows() * V::kLanes);
      scales = at(scales, w.type, w.row_groups);
      biases = at(biases, w.type, w.row_groups);
    }
  }

  static const float* convert(const void* values, Type type, int64_t count, float* to) {
    if (type == Type::float32) return static_cast<const float*>(values);
    int64_t i = 0;
    for (; i + V::kLanes <= count; i += V::kLanes) V::store(to + i, V::load_values(values, type, i));
    if (i < count) V::store(to + i, V::load_some_values(values, type, i, count - i));
    return to;
  }

  const SpanRows<V, vectors>& x_;
  typename V::Int order_;
  int64_t at_once_;  // spans
  float *sums_, *scales_ = nullptr, *biases_ = nullptr;
};

}  // namespace
}  // namespace mlx_cpu_kernels
