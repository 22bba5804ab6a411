// Products of very few rows, by bytes: x becomes integers once, and the weights are never converted at all.
//
// Within a group, x is an integer of 24 bits times a scale: as fine as float32 is for the group's largest value. Such an
// integer is three signed digits of a byte, x = (high * 256 + middle) * 256 + low, and each digit is multiplied by the
// weights as they are packed, 64 products of bytes an instruction on AVX-512. The sums of digits are shifted together as
// integers, without an error, and one conversion and one multiplication by both scales serve the products of a lane.
//
//   y[n] = sum over groups g of scale[n, g] * xscale[g] * (sum of q * x) + bias[n, g] * (sum of x)
//
// A block is what one vector of packed weights holds: with 2, 4 or 8 bits, value i of every byte becomes vector i, so
// that vector i has the columns i, i + values, i + 2 * values ...; x is put into the same order. With 3, 5 and 6 bits a
// block has as many values as a vector has bytes, in order. Each lane of 32 bits covers neighbouring columns.
#pragma once

#include "kernels.h"
#include "panels.h"

namespace mlx_cpu_kernels {
namespace {

constexpr int kPlanes = 3;
// The largest integer whose digits fit: 127 * 65536 + 127 * 256 + 127, less what rounding may add.
constexpr float kLargest = 8355000.f;

template <class V, int bits>
struct Block {
  static constexpr int kBytes = V::kLanes * 4;
  static constexpr int kVectors = 8 % bits == 0 ? 8 / bits : 1;
  static constexpr int64_t kColumns = kBytes * kVectors;
  static constexpr int64_t kWords = kColumns * bits / 32;
  static constexpr int64_t kColumnsOfLane = 4 * kVectors;
};

// x as bytes, in the order of the packed weights: [row][block][vector][plane][byte], with a scale and a sum a group.
template <class V, int bits>
class ByteRows {
 public:
  using B = Block<V, bits>;

  ByteRows(const Rows& x, int64_t columns, int group_size)
      : blocks_(round_up(columns, B::kColumns) / B::kColumns), groups_(round_up(columns / group_size, V::kLanes)) {
    planes_ = scratch<int8_t>(Slot::x, x.count * row_size());
    scales_ = scratch<float>(Slot::x_scales, x.count * groups_);
    sums_ = scratch<float>(Slot::x_sums, x.count * groups_);
    for (int64_t row = 0; row < x.count; row++) convert(x.row(row), x.type, columns, group_size, row);
  }

  int64_t blocks() const { return blocks_; }
  int64_t groups() const { return groups_; }  // of a row, in whole vectors; those beyond the end are zero
  const int8_t* block(int64_t row, int64_t block) const { return planes_ + row * row_size() + block * kBlockSize; }
  const float* scales(int64_t row) const { return scales_ + row * groups_; }
  const float* sums(int64_t row) const { return sums_ + row * groups_; }

 private:
  static constexpr int64_t kBlockSize = B::kVectors * kPlanes * B::kBytes;
  int64_t row_size() const { return blocks_ * kBlockSize; }

  [[gnu::flatten]] void convert(const void* x, Type type, int64_t columns, int group_size, int64_t row) {
    int8_t* digits[kPlanes];  // in the columns' order
    int64_t padded = blocks_ * B::kColumns;
    digits[0] = scratch<int8_t>(Slot::rows, kPlanes * padded);
    for (int p = 1; p < kPlanes; p++) digits[p] = digits[p - 1] + padded;
    for (int64_t g = 0; g < groups_; g++) {
      bool inside = g * group_size < columns;
      scales_[row * groups_ + g] = inside ? convert_group(x, type, g * group_size, group_size, digits) : 0;
      sums_[row * groups_ + g] = inside ? sum_group(x, type, g * group_size, group_size) : 0;
    }
    for (int64_t c = columns; c < padded; c++)
      for (int p = 0; p < kPlanes; p++) digits[p][c] = 0;
    for (int64_t b = 0; b < blocks_; b++)
      for (int p = 0; p < kPlanes; p++)
        arrange(digits[p] + b * B::kColumns, planes_ + row * row_size() + b * kBlockSize + p * B::kBytes);
  }

  static float sum_group(const void* x, Type type, int64_t first, int64_t count) {
    auto sum = V::zero();
    for (int64_t i = 0; i < count; i += V::kLanes) sum = V::add(sum, V::load_values(x, type, first + i));
    return V::sum(sum);
  }

  // Writes the digits of a group, and returns its scale.
  static float convert_group(const void* x, Type type, int64_t first, int64_t count, int8_t* const* digits) {
    auto most = V::zero();
    for (int64_t i = 0; i < count; i += V::kLanes)
      most = V::maximum(most, V::absolute(V::load_values(x, type, first + i)));
    float largest = V::largest(most);
    if (largest < 1e-30f) largest = 0;  // its inverse would not be finite
    auto inverse = V::broadcast(largest > 0 ? kLargest / largest : 0);
    const auto half = V::broadcast_word(128);
    for (int64_t i = 0; i < count; i += V::kLanes) {
      auto low = V::round_to_words(V::multiply(V::load_values(x, type, first + i), inverse));
      auto middle = V::template shift_right_signed<8>(V::add_words(low, half));
      auto high = V::template shift_right_signed<8>(V::add_words(middle, half));
      V::store_low_bytes(digits[0] + first + i, high);
      V::store_low_bytes(digits[1] + first + i, middle);
      V::store_low_bytes(digits[2] + first + i, low);
    }
    return largest / kLargest;
  }

  static void arrange(const int8_t* in_order, int8_t* block) {
    for (int v = 0; v < B::kVectors; v++)
      for (int i = 0; i < B::kBytes; i++) block[v * kPlanes * B::kBytes + i] = in_order[i * B::kVectors + v];
  }

  int64_t blocks_, groups_;
  int8_t* planes_;
  float *scales_, *sums_;
};

// The products of the integers of a block with one row of x, each lane its own sum, as float32.
template <class V, int bits>
inline typename V::Float multiply_block(const typename V::Int* weights, const int8_t* x) {
  using B = Block<V, bits>;
  auto plane = [&](typename V::Int sums, int p) {
    for (int v = 0; v < B::kVectors; v++)
      sums = V::multiply_add_bytes(sums, weights[v], V::load_words(x + (v * kPlanes + p) * B::kBytes));
    return sums;
  };
  auto upper = plane(V::template shift_left<8>(plane(V::zero_words(), 0)), 1);
  if constexpr (bits < 8) return V::float_of_words(plane(V::template shift_left<8>(upper), 2));
  // Four products of 255 * 127 leave no room for a third digit in 32 bits.
  return V::multiply_add(V::float_of_words(upper), V::broadcast(256), V::float_of_words(plane(V::zero_words(), 2)));
}

inline void prefetch_groups(const Quantized& w, int64_t row, int64_t groups) {
  auto scales = static_cast<const char*>(at(w.scales, w.type, row * w.row_groups));
  auto biases = static_cast<const char*>(at(w.biases, w.type, row * w.row_groups));
  for (int64_t i = 0; i < groups * size_of(w.type); i += 64) {
    __builtin_prefetch(scales + i);
    __builtin_prefetch(biases + i);
  }
}

// y[j][n .. n + rows) for the m rows of x. Several rows of the matrix at once hide how long an instruction takes.
template <class V, int bits, int rows, int m>
[[gnu::flatten]] void multiply_byte_rows(const ByteRows<V, bits>& x, const Quantized& w, int64_t n, float* y,
                                         int64_t y_stride) {
  using B = Block<V, bits>;
  const int64_t groups = x.groups(), real_groups = w.columns / w.group_size;
  // Both scales of each group in one; a lane takes one of at most eight that a block covers.
  float* scales = scratch<float>(Slot::group_scales, rows * m * groups + 8);
  typename V::Float sums[rows][m];
  for (int r = 0; r < rows; r++) {
    const void* row_scales = at(w.scales, w.type, (n + r) * w.row_groups);
    const void* row_biases = at(w.biases, w.type, (n + r) * w.row_groups);
    prefetch_groups(w, n + r + rows, real_groups);
    for (int j = 0; j < m; j++) sums[r][j] = V::zero();
    for (int64_t g = 0; g < groups; g += V::kLanes) {
      bool whole = g + V::kLanes <= real_groups;
      auto scale = whole ? V::load_values(row_scales, w.type, g)
                         : V::load_some_values(row_scales, w.type, g, real_groups - g);
      auto bias = whole ? V::load_values(row_biases, w.type, g)
                        : V::load_some_values(row_biases, w.type, g, real_groups - g);
      for (int j = 0; j < m; j++) {
        V::store(scales + (r * m + j) * groups + g, V::multiply(scale, V::load(x.scales(j) + g)));
        sums[r][j] = V::multiply_add(bias, V::load(x.sums(j) + g), sums[r][j]);
      }
    }
  }
  const auto lanes = V::lane_groups(B::kColumnsOfLane, w.group_size);
  const int64_t whole_blocks = w.columns / B::kColumns;
  for (int64_t b = 0; b < x.blocks(); b++) {
    int64_t group = b * B::kColumns / w.group_size;
    for (int r = 0; r < rows; r++) {
      const uint32_t* from = w.weights + (n + r) * w.row_words + b * B::kWords;
      __builtin_prefetch(from + rows * w.row_words);
      int64_t left = (w.columns - b * B::kColumns) * bits / 32;
      typename V::Int unpacked[B::kVectors];
      bool whole = b < whole_blocks && B::kWords == V::kLanes;
      V::template unpack_bytes<bits>(
          whole ? V::load_words(from) : V::load_some_words(from, smaller(B::kWords, left)), unpacked);
      for (int j = 0; j < m; j++) {
        auto products = multiply_block<V, bits>(unpacked, x.block(j, b));
        auto scale = V::choose_of_eight(scales + (r * m + j) * groups + group, lanes);
        sums[r][j] = V::multiply_add(products, scale, sums[r][j]);
      }
    }
  }
  for (int j = 0; j < m; j++)
    for (int r = 0; r < rows; r++) y[j * y_stride + r] = V::sum(sums[r][j]);
}

template <class V, int bits, int m>
void multiply_bytes_of_rows(const Rows& x, const Quantized& w, const MutableRows& y, Threads& threads) {
  constexpr int kRowsAtOnce = m == 1 ? 4 : 2;
  constexpr int64_t kPiece = 64;  // results that are kept in float32 until they are stored in the type of y
  ByteRows<V, bits> bytes(x, w.columns, w.group_size);
  threads.parallel_for(w.rows, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kPiece) {
      int64_t count = smaller(kPiece, end - first), n = 0;
      float results[m * kPiece];
      for (; n + kRowsAtOnce <= count; n += kRowsAtOnce)
        multiply_byte_rows<V, bits, kRowsAtOnce, m>(bytes, w, first + n, results + n, kPiece);
      for (; n < count; n++) multiply_byte_rows<V, bits, 1, m>(bytes, w, first + n, results + n, kPiece);
      for (int j = 0; j < m; j++) store_row<V>(results + j * kPiece, count, y.row(j), y.type, first);
    }
  });
}

constexpr int64_t kMostByteRows = 3;

template <class V>
void multiply_bytes(const Rows& x, const Quantized& w, const MutableRows& y, Threads& threads) {
  with_bits(w.bits, [&]<int bits>() {
    if constexpr (V::has_byte_products(bits)) {
      if (x.count == 1) return multiply_bytes_of_rows<V, bits, 1>(x, w, y, threads);
      if (x.count == 2) return multiply_bytes_of_rows<V, bits, 2>(x, w, y, threads);
      multiply_bytes_of_rows<V, bits, 3>(x, w, y, threads);
    }
  });
}

}  // namespace
}  // namespace mlx_cpu_kernels
