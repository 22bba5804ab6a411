// Products of very few rows, by bytes: x becomes integers once, and the weights are never converted at all.
//
// x becomes signed digits (byte_digits.h), which are multiplied by the weights as they are packed, 64 products of bytes
// an instruction on AVX-512. The sums of digits are shifted together as integers, without an error. One conversion and
// one multiplication by both scales serve the products of a lane.
//
//   y[n] = sum over groups g of scale[n, g] * xscale[g] * (sum of q * x) + bias[n, g] * (sum of x)
//
// Twice an e2m1 is an integer as well, which is looked up. Where weights have no sign, an offset is added to each.
// Its products are the same for all rows of the matrix, and are subtracted from the sums of integers.
//
// A block is the content of one vector of packed weights. With 2, 4 or 8 bits, value i of every byte becomes vector i,
// which so has the columns i, i + values, i + 2 * values ... x is put into the same order. With 3, 5 and 6 bits a
// block has as many values as a vector has bytes, in order. Each lane of 32 bits covers neighbouring columns.
//
// Some instruction sets multiply bytes in pairs only, into 16 bits, or have no fast way from 3, 5 and 6 bits to bytes.
// They take two digits of 12 bits, x = high * 4096 + low, and weights of 16 bits. Each half of a lane of 32 bits
// fetches the bytes that hold two neighbours (four of 3 bits). Value i of every half becomes vector i.
#pragma once

#include <type_traits>

#include "byte_digits.h"

namespace mlx_cpu_kernels {
namespace {

// Rows of the matrix, and at most of x, in a tile. The registers of AVX-512 hold the weights and the sums of digits of
// four rows, and 16 sums.
constexpr int kByteRows = 4;
constexpr int kByteColumns = 4;
constexpr int64_t kMostByteRows = 24;

template <class V, int bits>
struct Block {
  static constexpr bool kIsWide = V::has_wide_digits(bits);
  using Digit = std::conditional_t<kIsWide, int16_t, int8_t>;
  static constexpr int kPlanes = kIsWide ? 2 : 3;
  static constexpr int kDigits = V::kLanes * 4 / int(sizeof(Digit));  // of a vector
  // Values of a byte, or of half a lane.
  static constexpr int kTogether = !kIsWide ? 8 % bits == 0 ? 8 / bits : 1 : bits == 3 ? 4 : 2;
  // Twice as many vectors where a block would end within a word.
  static constexpr int kVectors = kDigits * kTogether * bits % 32 == 0 ? kTogether : 2 * kTogether;
  // Vectors of weights that are kept: halves are taken apart where they are used, by two operations for each vector.
  static constexpr int kKept = kIsWide ? kVectors / kTogether : kVectors;
  static constexpr int64_t kColumns = kDigits * kVectors;
  static constexpr int64_t kWords = kColumns * bits / 32;
  static constexpr int64_t kColumnsOfLane = kColumns / V::kLanes;

  // The column that is digit i of vector v.
  static constexpr int column(int v, int i) {
    return v / kTogether * kTogether * kDigits + i * kTogether + v % kTogether;
  }
};

// Sums of the products of a block's integers, for several rows of the matrix and one of x, each lane its own. They are
// those of the first digits, and of the last ones where both do not fit into 32 bits. A vector of x is loaded once for
// all rows, and their sums do not wait for one another.
template <class V, int bits, int rows>
inline void sum_block(const typename V::Int (&weights)[rows][Block<V, bits>::kKept],
                      const typename Block<V, bits>::Digit* x, typename V::Int (&sums)[rows],
                      typename V::Int (&last)[rows]) {
  using B = Block<V, bits>;
  unroll<rows>([&]<int r>() { sums[r] = last[r] = V::zero_words(); });
  auto digits = [&](int v, int plane) { return V::load_words(x + (v * B::kPlanes + plane) * B::kDigits); };
  if constexpr (B::kIsWide) {
    unroll<B::kVectors>([&]<int v>() {
      auto high = digits(v, 0), low = digits(v, 1);
      unroll<rows>([&]<int r>() {
        auto w = V::template value_of_halves<bits, B::kTogether, v % B::kTogether>(weights[r][v / B::kTogether]);
        sums[r] = V::multiply_add_halves(sums[r], w, high);
        last[r] = V::multiply_add_halves(last[r], w, low);
      });
    });
  } else if constexpr (V::kSumsPairs) {
    // The sums of a lane's two pairs fit into 16 bits for all vectors of a block. So each plane is widened once.
    unroll<rows>([&]<int r>() {
      typename V::Int pairs[B::kPlanes];
      unroll<B::kPlanes>([&]<int plane>() {
        pairs[plane] = V::multiply_pairs(weights[r][0], digits(0, plane));
        unroll<B::kVectors - 1>([&]<int v>() {
          pairs[plane] = V::add_halves(pairs[plane], V::multiply_pairs(weights[r][v + 1], digits(v + 1, plane)));
        });
      });
      sums[r] = V::join_planes(pairs[0], pairs[1], pairs[2]);
    });
  } else {
    auto add_plane = [&]<int plane>(auto& to) {
      unroll<B::kVectors>([&]<int v>() {
        auto plane_digits = digits(v, plane);
        unroll<rows>([&]<int r>() { to[r] = V::multiply_add_bytes(to[r], weights[r][v], plane_digits); });
      });
    };
    add_plane.template operator()<0>(sums);
    unroll<rows>([&]<int r>() { sums[r] = V::template shift_left<8>(sums[r]); });
    add_plane.template operator()<1>(sums);
    if constexpr (bits < 8) {
      unroll<rows>([&]<int r>() { sums[r] = V::template shift_left<8>(sums[r]); });
      add_plane.template operator()<2>(sums);
    } else {
      add_plane.template operator()<2>(last);
    }
  }
}

// Number by which each weight of the format has been raised.
template <class V, Format format>
constexpr int kOffset = format.is_e2m1() ? V::kE2m1Offset : 0;

// x as digits, in the order of the packed weights: [row][block][vector][plane][digit], with a scale and a sum a group.
template <class V, Format format>
class ByteRows {
 public:
  using B = Block<V, format.bits>;
  using Digit = typename B::Digit;

  ByteRows(const Rows& x, int64_t columns, int group_size)
      : blocks_(round_up(columns, B::kColumns) / B::kColumns), groups_(round_up(columns / group_size, V::kLanes)) {
    planes_ = scratch<Digit>(Slot::x, x.count * row_size());
    scales_ = scratch<float>(Slot::x_scales, x.count * groups_);
    if constexpr (format.is_affine()) sums_ = scratch<float>(Slot::x_sums, x.count * groups_);
    if constexpr (kOffset<V, format> != 0) offsets_ = scratch<uint32_t>(Slot::x_offsets, x.count * blocks_ * V::kLanes);
    for (int64_t row = 0; row < x.count && fits_; row++) fits_ = convert(x.row(row), x.type, columns, group_size, row);
  }

  // Whether the digits hold each row of x. A row of tiny or of huge numbers does not fit, nor one with outliers; NaN
  // does, its sums keep it.
  bool fits() const { return fits_; }

  int64_t blocks() const { return blocks_; }
  int64_t groups() const { return groups_; }  // of a row, in whole vectors; those beyond the end are zero
  const Digit* block(int64_t row, int64_t block) const { return planes_ + row * row_size() + block * kBlockSize; }
  const float* scales(int64_t row) const { return scales_ + row * groups_; }
  const float* sums(int64_t row) const { return sums_ + row * groups_; }
  // Numbers that the weights' offset adds to the sums of a block.
  typename V::Int offsets(int64_t row, int64_t block) const {
    return V::load_words(offsets_ + (row * blocks_ + block) * V::kLanes);
  }

 private:
  static constexpr int64_t kBlockSize = B::kVectors * B::kPlanes * B::kDigits;
  int64_t row_size() const { return blocks_ * kBlockSize; }

  // Returns false where the row does not fit.
  [[gnu::flatten]] bool convert(const void* x, Type type, int64_t columns, int group_size, int64_t row) {
    float* magnitudes = scratch<float>(Slot::values, groups_);  // the largest ones of the groups
    Digit* digits[B::kPlanes];                                  // in the columns' order
    int64_t padded = blocks_ * B::kColumns;
    digits[0] = scratch<Digit>(Slot::rows, B::kPlanes * padded);
    for (int p = 1; p < B::kPlanes; p++) digits[p] = digits[p - 1] + padded;
    for (int64_t g = 0; g < groups_; g++) {
      bool inside = g * group_size < columns;
      magnitudes[g] = inside ? largest_of_group<V>(x, type, g * group_size, group_size) : 0;
      if (magnitudes[g] < 0) return false;
      if (inside) store_group(x, type, g * group_size, group_size, magnitudes[g], digits);
      float scale = scale_of_group(magnitudes[g]) / (format.is_e2m1() ? 2 : 1);
      float sum = inside ? sum_of_group<V>(x, type, g * group_size, group_size) : 0;
      if constexpr (format.is_affine())
        sums_[row * groups_ + g] = sum;
      else
        scale += 0 * sum;  // the digits of what is not finite are, and there is no bias that meets the sum
      scales_[row * groups_ + g] = scale;
    }
    if (!row_fits<V>(magnitudes, columns / group_size, format.is_affine())) return false;
    for (int64_t c = columns; c < padded; c++)
      for (int p = 0; p < B::kPlanes; p++) digits[p][c] = 0;
    for (int64_t b = 0; b < blocks_; b++)
      for (int p = 0; p < B::kPlanes; p++)
        arrange(digits[p] + b * B::kColumns, planes_ + row * row_size() + b * kBlockSize + p * B::kDigits);
    if constexpr (kOffset<V, format> != 0) {
      typename V::Int weights[1][B::kKept], sums[1], none[1];
      for (auto& vector : weights[0]) vector = V::broadcast_word(kOffset<V, format> * 0x01010101);
      for (int64_t b = 0; b < blocks_; b++) {
        sum_block<V, format.bits, 1>(weights, block(row, b), sums, none);
        V::store_words(offsets_ + (row * blocks_ + b) * V::kLanes, sums[0]);
      }
    }
    return true;
  }

  // Writes the digits of a group.
  static void store_group(const void* x, Type type, int64_t first, int64_t count, float largest, Digit* const* digits) {
    const float integers = integers_of_group(largest);
    if constexpr (B::kIsWide) {
      const auto factor = V::broadcast(integers);
      const auto half = V::broadcast_word(2048);
      for (int64_t i = 0; i < count; i += V::kLanes) {
        auto low = V::round_to_words(V::multiply(V::load_values(x, type, first + i), factor));
        auto high = V::template shift_right_signed<12>(V::add_words(low, half));
        V::store_low_halves(digits[0] + first + i, high);
        V::store_low_halves(digits[1] + first + i, V::template shift_right_signed<20>(V::template shift_left<20>(low)));
      }
    } else {
      int8_t* const to[] = {digits[0] + first, digits[1] + first, digits[2] + first};
      store_digits<V>(x, type, first, count, integers, to);
    }
  }

  static void arrange(const Digit* in_order, Digit* block) {
    for (int v = 0; v < B::kVectors; v++)
      for (int i = 0; i < B::kDigits; i++) block[v * B::kPlanes * B::kDigits + i] = in_order[B::column(v, i)];
  }

  int64_t blocks_, groups_;
  Digit* planes_;
  float *scales_, *sums_;
  uint32_t* offsets_;
  bool fits_ = true;
};

// The products of a block for several rows of the matrix and one of x, as float32.
template <class V, Format format, int rows>
inline void multiply_block(const typename V::Int (&weights)[rows][Block<V, format.bits>::kKept],
                           const ByteRows<V, format>& x, int64_t row, int64_t block,
                           typename V::Float (&products)[rows]) {
  constexpr bool kIsWide = Block<V, format.bits>::kIsWide;
  typename V::Int sums[rows], last[rows];
  sum_block<V, format.bits, rows>(weights, x.block(row, block), sums, last);
  if constexpr (kOffset<V, format> != 0) {
    auto offsets = x.offsets(row, block);
    unroll<rows>([&]<int r>() { sums[r] = V::subtract_words(sums[r], offsets); });
  }
  constexpr int kShift = kIsWide ? 12 : 8;
  unroll<rows>([&]<int r>() {
    if constexpr (format.bits == 8)  // products of 8 bits leave no room for the last digit in 32 bits
      products[r] = V::multiply_add(V::float_of_words(sums[r]), V::broadcast(1 << kShift), V::float_of_words(last[r]));
    else if constexpr (kIsWide)
      products[r] = V::float_of_words(V::add_words(V::template shift_left<kShift>(sums[r]), last[r]));
    else
      products[r] = V::float_of_words(sums[r]);
  });
}

// Begins the sums of kByteRows rows from n on with their biases, and joins the rows' scales with those of x. Then
// only one multiplication a lane and block is left. Compiled for each type of the scales, so that no row asks for it
// again.
template <class V, Format format, Type type, int m>
[[gnu::flatten]] void begin_rows(const ByteRows<V, format>& x, const Quantized& w, int64_t n, int64_t first,
                                 typename V::Float (&sums)[kByteRows][m], float* scales) {
  const int64_t groups = w.columns / w.group_size, padded = x.groups(), ahead = rows_ahead(w) * w.row_groups;
  unroll<kByteRows>([&]<int r>() { unroll<m>([&]<int j>() { sums[r][j] = V::zero(); }); });
  auto add_groups = [&](int64_t g, auto&& load) {
    unroll<kByteRows>([&]<int r>() {
      const int64_t from = (n + r) * w.row_groups + g;
      auto scale = load(w.scales, from);
      unroll<m>([&]<int j>() {
        V::store(scales + (r * m + j) * padded + g, V::multiply(scale, V::load(x.scales(first + j) + g)));
      });
      if constexpr (format.is_affine()) {
        auto bias = load(w.biases, from);
        unroll<m>([&]<int j>() { sums[r][j] = V::multiply_add(bias, V::load(x.sums(first + j) + g), sums[r][j]); });
      }
    });
  };
  const int64_t next = n * w.row_groups + ahead, next_bytes = kByteRows * w.row_groups * size_of(type);
  prefetch(at(w.scales, type, next), next_bytes);
  if constexpr (format.is_affine()) prefetch(at(w.biases, type, next), next_bytes);
  int64_t g = 0;
  for (; g + V::kLanes <= groups; g += V::kLanes)
    add_groups(g, [](const void* values, int64_t i) { return load_scales<V>(values, type, i); });
  if (g < groups)
    add_groups(g, [&](const void* values, int64_t i) { return load_some_scales<V>(values, type, i, groups - g); });
}

// Multiplies kByteRows rows of the matrix with a few rows of x.
template <class V, Format format>
class ByteTile {
 public:
  ByteTile(const ByteRows<V, format>& x, int group_size)
      : x_(x), padded_groups_(x.groups()), group_shift_(__builtin_ctz(unsigned(group_size))) {
    uint32_t groups[V::kLanes];
    for (int i = 0; i < V::kLanes; i++) groups[i] = uint32_t(i * B::kColumnsOfLane / group_size);
    lane_groups_ = V::load_words(groups);
    scales_ = scratch<float>(Slot::group_scales, rows * kByteColumns * padded_groups_ + 8);
  }

  // y[j * y_stride + r] for the rows [n, n + kByteRows) of the matrix and the rows [first, first + m) of x.
  template <int m>
  [[gnu::flatten]] void multiply(const Quantized& w, int64_t n, int64_t first, float* y, int64_t y_stride) const {
    typename V::Float sums[rows][m];
    {
      typename V::Float begun[rows][m];  // its address leaves this function, which would keep the sums out of registers
      begin<m>(w, n, first, begun);
      unroll<rows>([&]<int r>() { unroll<m>([&]<int j>() { sums[r][j] = begun[r][j]; }); });
    }
    const uint32_t* words[rows];
    for (int r = 0; r < rows; r++) words[r] = w.weights + (n + r) * w.row_words;
    const int64_t blocks = w.columns / B::kColumns;
    const uint32_t* next = words[0] + rows_ahead(w) * w.row_words;
    auto prefetch_block = [&] { prefetch(next), next += B::kWords; };
    for (int64_t b = 0; b < blocks; b++) {
      add_block<m>(b, first, sums, [&](int r, auto& weights) {
        const uint32_t* from = words[r] + b * B::kWords;
        prefetch_block();
        unpack(from, B::kWords, weights);
      });
    }
    if (blocks < x_.blocks()) {
      int64_t left = (w.columns - blocks * B::kColumns) * format.bits / 32;
      add_block<m>(blocks, first, sums, [&](int r, auto& weights) {
        prefetch_block();
        unpack(words[r] + blocks * B::kWords, left, weights);
      });
    }
    unroll<m>([&]<int j>() { V::store_sums(y + j * y_stride, sums[0][j], sums[1][j], sums[2][j], sums[3][j]); });
  }

 private:
  using B = Block<V, format.bits>;
  static constexpr int rows = kByteRows;
  static constexpr int kLeastGroup = kChunk / format.groups_of_chunk();

  template <int m>
  void begin(const Quantized& w, int64_t n, int64_t first, typename V::Float (&sums)[rows][m]) const {
    if constexpr (format.is_affine()) {
      auto of_type = w.type == Type::float32   ? begin_rows<V, format, Type::float32, m>
                     : w.type == Type::float16 ? begin_rows<V, format, Type::float16, m>
                                               : begin_rows<V, format, Type::bfloat16, m>;
      of_type(x_, w, n, first, sums, scales_);
    } else {
      constexpr Type kType = format.mode == Mode::nvfp4 ? Type::e4m3 : Type::e8m0;
      begin_rows<V, format, kType, m>(x_, w, n, first, sums, scales_);
    }
  }

  // The first `count` words of a block as weights, then zeros.
  static void unpack(const uint32_t* from, int64_t count, typename V::Int (&weights)[B::kKept]) {
    if constexpr (B::kIsWide) {
      V::template load_halves<format.bits, B::kTogether>(from, count, weights);
    } else {
      bool is_whole = B::kWords == V::kLanes && count == V::kLanes;
      auto words = is_whole ? V::load_words(from) : V::load_some_words(from, count);
      if constexpr (format.is_e2m1())
        V::unpack_e2m1(words, weights);
      else
        V::template unpack_bytes<format.bits>(words, weights);
    }
  }

  template <int m, class Unpack>
  void add_block(int64_t b, int64_t first, typename V::Float (&sums)[rows][m], Unpack&& unpack) const {
    const float* scales = scales_ + (b * B::kColumns >> group_shift_);
    // Where a block is summed row by row, the registers hold the weights of one row.
    constexpr int at_once = V::kSumsPairs && !B::kIsWide ? 1 : rows;
    unroll<rows / at_once>([&]<int part>() {
      constexpr int begin = part * at_once;
      typename V::Int weights[at_once][B::kKept];
      unroll<at_once>([&]<int r>() { unpack(begin + r, weights[r]); });
      unroll<m>([&]<int j>() {
        typename V::Float products[at_once];
        multiply_block<V, format, at_once>(weights, x_, first + j, b, products);
        unroll<at_once>([&]<int i>() {
          constexpr int r = begin + i;
          auto scale =
              V::template choose<B::kColumns / kLeastGroup>(scales + (r * m + j) * padded_groups_, lane_groups_);
          sums[r][j] = V::multiply_add(products[i], scale, sums[r][j]);
        });
      });
    });
  }

  const ByteRows<V, format>& x_;
  const int64_t padded_groups_;
  const int group_shift_;
  typename V::Int lane_groups_;  // the group of each lane, counted from the block's first
  float* scales_;                // both scales of each group in one: [row][row of x][group]
};

}  // namespace
}  // namespace mlx_cpu_kernels
