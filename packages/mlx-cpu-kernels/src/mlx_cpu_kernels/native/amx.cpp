// Products of several rows by AMX, which multiplies 16 rows of bytes with 16 others in 16 cycles.
//
// x becomes signed digits (byte_digits.h), and the weights are unpacked to bytes. Tiles have 16 rows of the matrix, 16
// rows of x, and a group of columns. Three products of them give the sums of the digits' products as integers, without
// an error. These become float32, multiplied by the scales of both, while the processor multiplies the next tiles.
//
// The matrix is taken in strips of 64 rows and pieces of 256 columns. Their bytes, and the digits of 16 rows of x, stay
// in the first cache. The digits of all rows of x that are multiplied at once stay in the second one. All code here has
// internal linkage but one function, which is entered only after dispatch.cpp has asked the processor and the system.
#include <immintrin.h>

#include <algorithm>
#include <memory>

#include "avx512_vector.h"
#include "byte_digits.h"

namespace mlx_cpu_kernels {
namespace {

using V = Avx512;
using Float = V::Float;
using Int = V::Int;

constexpr int kTile = 16;         // rows of the matrix, and of x, in a tile
constexpr int kTileColumns = 64;  // columns of a tile: the bytes of a row
constexpr int64_t kTileBytes = kTile * kTileColumns;
constexpr int64_t kSums = kTile * kTile;  // of a tile
constexpr int kDigits = 3;
constexpr int64_t kStripTiles = 4;
constexpr int64_t kStrip = kStripTiles * kTile;
constexpr int64_t kPieceTiles = 4;  // tiles along the columns
// Rows of x at once: so many that weights are unpacked seldom, and that their digits fit into a second cache of 2 MiB.
constexpr int64_t kLeastRows = 32, kMostRows = 128;
constexpr int64_t kMostDigits = 1280 << 10;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tells the compiler that others read what was written: GCC takes a load of a tile for one that reads no memory.
inline void to_memory(const void* written) { asm volatile("" : : "r"(written) : "memory"); }

// The tile registers of this thread: 0 has weights, 1 to 3 have digits, and 4 to 6 sums. `depth` columns are multiplied
// at once.
class Tiles {
 public:
  explicit Tiles(int depth) {
    TileConfig config;
    auto set = [&](int tile, int rows, int bytes) {
      config.rows[tile] = uint8_t(rows);
      config.row_bytes[tile] = uint16_t(bytes);
    };
    set(0, kTile, depth);
    for (int i = 1; i <= kDigits; i++) set(i, depth / 4, kTileColumns);
    for (int i = 4; i < 4 + kDigits; i++) set(i, kTile, kTileColumns);
    to_memory(&config);
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// The column that is byte i of 64 unpacked ones.
constexpr int column_of(int bits, int i) {
  if (bits == 4) return i / 32 * 32 + i % 16 * 2 + i / 16 % 2;
  if (bits == 2) return (i / 32 * 8 + i % 8) * 4 + i / 8 % 4;
  return i;
}

template <int bits>
Int order_of_columns() {
  alignas(64) uint8_t order[64];
  for (int i = 0; i < 64; i++) order[i] = uint8_t(column_of(bits, i));
  return _mm512_load_si512(order);
}

// The packed values of the first `count` words, of 64 values at most, as bytes; zeros follow.
template <int bits>
inline Int unpack(const uint32_t* from, int count) {
  const Int packed = _mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), from);
  if constexpr (bits == 8) {
    return packed;
  } else if constexpr (bits == 4) {
    Int twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), packed);
    Int moved = _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
    return _mm512_and_si512(moved, _mm512_set1_epi8(15));
  } else if constexpr (bits == 2) {
    Int often = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 0, 0, 1, 1, 1, 1), packed);
    Int moved = _mm512_srlv_epi64(often, _mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6));
    return _mm512_and_si512(moved, _mm512_set1_epi8(3));
  } else {
    Int out[1];
    V::unpack_bytes<bits>(packed, out);
    return out[0];
  }
}

// Rows of x as digits: for each 16 rows, 64 columns and digit, a tile [column / 4][row][column % 4].
class DigitTiles {
 public:
  DigitTiles(int64_t rows, int64_t columns, int group_size)
      : rows_(rows),
        columns_(columns),
        group_size_(group_size),
        tiles_((rows + kTile - 1) / kTile),
        vectors_((columns + kTileColumns - 1) / kTileColumns),
        groups_(round_up(columns / group_size, V::kLanes)) {
    digits_ = scratch<int8_t>(Slot::x, tiles_ * vectors_ * kDigits * kTileBytes);
    scales_ = scratch<float>(Slot::x_scales, tiles_ * groups_ * kTile);
    sums_ = scratch<float>(Slot::x_sums, tiles_ * groups_ * kTile);
  }

  int64_t rows() const { return rows_; }
  int64_t tiles() const { return tiles_; }
  int64_t vectors() const { return vectors_; }
  // The tiles of the digits of 64 columns, the high ones first.
  const int8_t* digits(int64_t tile, int64_t vector) const {
    return digits_ + (tile * vectors_ + vector) * kDigits * kTileBytes;
  }
  const float* scales(int64_t tile) const { return scales_ + tile * groups_ * kTile; }  // [group][row]
  const float* sums(int64_t tile) const { return sums_ + tile * groups_ * kTile; }      // [group][row]

  // Converts the rows of a tile. fits[i] becomes whether the digits hold row i.
  template <int bits>
  void convert(const Rows& x, int64_t tile, bool* fits) const {
    const int64_t count = smaller(kTile, rows_ - tile * kTile), groups = columns_ / group_size_;
    float* scales = scales_ + tile * groups_ * kTile;
    float* sums = sums_ + tile * groups_ * kTile;
    float* magnitudes = scratch<float>(Slot::values, kTile * groups_);  // [row][group]
    std::fill(magnitudes, magnitudes + kTile * groups_, 0.0f);
    std::fill(scales, scales + groups * kTile, 0.0f);
    std::fill(sums, sums + groups * kTile, 0.0f);
    for (int64_t i = 0; i < count; i++) {
      const void* row = x.row(tile * kTile + i);
      bool has_outliers = false;
      for (int64_t g = 0; g < groups; g++) {
        float largest = largest_of_group<V>(row, x.type, g * group_size_, group_size_);
        if (largest < 0) {
          has_outliers = true;
          break;
        }
        magnitudes[i * groups_ + g] = largest;
        scales[g * kTile + i] = scale_of_group(largest);
        sums[g * kTile + i] = sum_of_group<V>(row, x.type, g * group_size_, group_size_);
      }
      fits[i] = !has_outliers && row_fits<V>(magnitudes + i * groups_, groups, true);
    }
    alignas(64) int8_t rows[kDigits][kTile][kTileColumns] = {};
    const Int order = order_of_columns<bits>();
    for (int64_t v = 0; v < vectors_; v++) {
      const int64_t first = v * kTileColumns, columns = smaller(kTileColumns, columns_ - first);
      if (columns < kTileColumns) std::fill(&rows[0][0][0], &rows[0][0][0] + sizeof rows, int8_t{0});
      for (int64_t i = 0; i < count; i++) {
        for (int64_t c = 0; c < columns; c += kChunk) {  // which lies in one group
          int8_t* const to[] = {&rows[0][i][c], &rows[1][i][c], &rows[2][i][c]};
          const float largest = magnitudes[i * groups_ + (first + c) / group_size_];
          store_digits<V>(x.row(tile * kTile + i), x.type, first + c, kChunk, integers_of_group(largest), to);
        }
      }
      int8_t* to = digits_ + (tile * vectors_ + v) * kDigits * kTileBytes;
      for (auto& digit : rows) {
        Int words[kTile];
        for (int i = 0; i < kTile; i++) {
          words[i] = V::load_words(digit[i]);
          if constexpr (bits == 2 || bits == 4) words[i] = _mm512_permutexvar_epi8(order, words[i]);
        }
        V::transpose(words);
        for (int i = 0; i < kTile; i++, to += kTileColumns) V::store_words(to, words[i]);
      }
    }
  }

 private:
  int64_t rows_, columns_;
  int group_size_;
  int64_t tiles_, vectors_, groups_;
  int8_t* digits_;
  float *scales_, *sums_;
};

// Some rows of a matrix, as many as are multiplied together.
template <int bits>
class Strip {
 public:
  Strip(const Quantized& w, const DigitTiles& x)
      : w_(w), x_(x), padded_groups_(round_up(w.columns / w.group_size, V::kLanes)) {
    weights_ = scratch<uint8_t>(Slot::panels, kStripTiles * kPieceTiles * kTileBytes);
    sums_ = scratch<float>(Slot::sums, x.tiles() * kStripTiles * kSums);
    scales_ = scratch<float>(Slot::group_scales, kStrip * padded_groups_);
    biases_ = scratch<float>(Slot::group_biases, kStrip * padded_groups_);
  }

  // Computes the columns of y from `first` on that the strip gives, for the rows of x that fit.
  void multiply(int64_t first, const MutableRows& y, const bool* fits) {
    first_ = first;
    tiles_ = (smaller(kStrip, w_.rows - first) + kTile - 1) / kTile;
    copy_groups(w_.scales, scales_);
    copy_groups(w_.biases, biases_);
    for (int64_t v = 0; v < x_.vectors(); v += kPieceTiles) {
      const int64_t vectors = smaller(kPieceTiles, x_.vectors() - v);
      unpack_piece(v, vectors);
      to_memory(weights_);
      if (w_.group_size == 32)
        add_piece<32>(v, vectors);
      else if (w_.group_size == 64)
        add_piece<64>(v, vectors);
      else
        add_piece<128>(v, vectors);
    }
    for (int64_t t = 0; t < x_.tiles(); t++)
      for (int64_t tile = 0; tile < tiles_; tile++) store(t, tile, y, fits);
  }

 private:
  // A row of the matrix; beyond the end the last one, whose results are not used.
  int64_t row(int64_t i) const { return smaller(first_ + i, w_.rows - 1); }

  // Scales or biases of the strip's rows in float32, as [group][row].
  void copy_groups(const void* values, float* to) const {
    const int64_t groups = w_.columns / w_.group_size;
    for (int64_t i = 0; i < tiles_ * kTile; i += kTile) {
      for (int64_t g = 0; g < groups; g += V::kLanes) {
        Int words[kTile];
        for (int j = 0; j < kTile; j++) {
          const int64_t from = row(i + j) * w_.row_groups + g;
          words[j] =
              V::words_of_float(groups - g >= V::kLanes ? V::load_values(values, w_.type, from)
                                                        : V::load_some_values(values, w_.type, from, groups - g));
        }
        V::transpose(words);
        for (int j = 0; j < kTile; j++) V::store_words(to + (g + j) * kStrip + i, words[j]);
      }
    }
  }

  // Weights as bytes: [tile of rows][64 columns][row][column]. Prefetches those of some pieces later.
  void unpack_piece(int64_t v, int64_t vectors) const {
    constexpr int64_t kWords = 2 * bits, kPieceWords = kPieceTiles * kWords;  // of 64 columns, and of a piece
    constexpr int64_t kAhead = 2 * kPieceWords;
    const int64_t words = w_.columns * bits / 32, padded = round_up(words, kPieceWords), begin = v * kWords;
    const bool is_same_row = begin + kAhead < padded;
    const int64_t next = is_same_row ? begin + kAhead : (begin + kAhead - padded) % padded;
    for (int64_t i = 0; i < tiles_ * kTile; i++) {
      const uint32_t* ahead = w_.weights + row(is_same_row ? i : i + kStrip) * w_.row_words + next;
      for (int64_t word = 0; word < kPieceWords; word += 16) __builtin_prefetch(ahead + word, 0, 2);
      const uint32_t* from = w_.weights + row(i) * w_.row_words + begin;
      uint8_t* to = weights_ + (i / kTile * kPieceTiles * kTile + i % kTile) * kTileColumns;
      for (int64_t j = 0; j < vectors; j++) {
        const int64_t left = words - begin - j * kWords;
        V::store_words(to + j * kTileBytes, unpack<bits>(from + j * kWords, int(smaller(kWords, left))));
      }
    }
  }

  // Sums of integers of a group of columns, and what makes them float32.
  struct Group {
    const int32_t* integers;  // [digit][row of the matrix][row of x]
    Float x_scale, x_sum;
    const float *scales, *biases;  // of the rows of the matrix
  };

  // Adds the rows [first, last) of a group to the sums of a tile.
  template <int first, int last>
  [[gnu::always_inline]] static void add_rows(const Group& group, Float (&sums)[kTile]) {
#pragma GCC unroll 16
    for (int m = first; m < last; m++) {
      const int32_t* from = group.integers + m * kTile;
      Int high = V::add_words(V::shift_left<8>(V::load_words(from)), V::load_words(from + kSums));
      Float low = V::float_of_words(V::load_words(from + 2 * kSums));
      Float value = V::multiply_add(V::float_of_words(high), V::broadcast(256), low);
      sums[m] = V::multiply_add(value, V::multiply(group.x_scale, V::broadcast(group.scales[m])), sums[m]);
      sums[m] = V::multiply_add(group.x_sum, V::broadcast(group.biases[m]), sums[m]);
    }
  }

  // Stores the sums of a digit's products, and begins those of other tiles. Registers have their numbers in the text of
  // the program.
  template <int digit>
  [[gnu::always_inline]] static void multiply_digit(int32_t* stored, const int8_t* digits) {
    stored += digit * kSums;
    digits += digit * kTileBytes;
    if constexpr (digit == 0) {
      _tile_stored(4, stored, kTile * 4);
      _tile_zero(4);
      _tile_loadd(1, digits, kTileColumns);
      _tile_dpbusd(4, 0, 1);
    } else if constexpr (digit == 1) {
      _tile_stored(5, stored, kTile * 4);
      _tile_zero(5);
      _tile_loadd(2, digits, kTileColumns);
      _tile_dpbusd(5, 0, 2);
    } else {
      _tile_stored(6, stored, kTile * 4);
      _tile_zero(6);
      _tile_loadd(3, digits, kTileColumns);
      _tile_dpbusd(6, 0, 3);
    }
  }

  // Adds the products of further columns.
  [[gnu::always_inline]] static void multiply_more(const uint8_t* weights, const int8_t* digits) {
    _tile_loadd(0, weights, kTileColumns);
    _tile_loadd(1, digits, kTileColumns);
    _tile_dpbusd(4, 0, 1);
    _tile_loadd(2, digits + kTileBytes, kTileColumns);
    _tile_dpbusd(5, 0, 2);
    _tile_loadd(3, digits + 2 * kTileBytes, kTileColumns);
    _tile_dpbusd(6, 0, 3);
  }

  // A tile of x, one of the strip, and a group of columns of the piece.
  struct Place {
    int64_t t = 0, tile = 0, group = 0;
  };

  // The place after another one. After the last one it comes again, until all integers are added.
  [[gnu::always_inline]] Place after(Place at, int64_t groups) const {
    if (at.group < groups - 1) return {at.t, at.tile, at.group + 1};
    if (at.tile < tiles_ - 1) return {at.t, at.tile + 1, 0};
    if (at.t < x_.tiles() - 1) return {at.t + 1, 0, 0};
    return at;
  }

  // The sums of a tile as they are before a piece.
  [[gnu::always_inline]] static void begin_sums(const float* from, bool is_first, Float (&sums)[kTile]) {
#pragma GCC unroll 16
    for (int m = 0; m < kTile; m++) sums[m] = is_first ? V::zero() : V::load(from + m * kTile);
  }

  // Adds the products of a piece to the sums of all tiles. Three places are in work at a time. One is
  // multiplied, the integers of the one before are stored, and those of the one before that become float32. The sums
  // stay in registers: no lambda takes them, and functions that do are always inlined.
  template <int size>
  void add_piece(int64_t v, int64_t vectors) const {
    constexpr int kSteps = size == 128 ? 2 : 1;  // tiles of a group
    const int64_t columns = smaller(vectors * kTileColumns, w_.columns - v * kTileColumns);
    const int64_t groups = columns / size, first_group = v * kTileColumns / size;
    const int64_t places = x_.tiles() * tiles_ * groups;
    alignas(64) int32_t integers[2][kDigits * kSums];
    Place multiplied, added;
    float* to = sums_;
    Float sums[kTile];
    begin_sums(to, v == 0, sums);
    for (int64_t i = 0; i < places + 2; i++) {
      const int64_t vector = size == 32 ? multiplied.group / 2 : multiplied.group * kSteps;
      const int64_t half = size == 32 ? multiplied.group % 2 : 0;
      const uint8_t* weights = weights_ + (multiplied.tile * kPieceTiles + vector) * kTileBytes + half * 32;
      const int8_t* digits = x_.digits(multiplied.t, v + vector) + half * kTileBytes / 2;
      multiplied = after(multiplied, groups);
      int32_t* stored = integers[(i + 1) % 2];
      const int64_t at = first_group + added.group;
      const Group group{integers[i % 2], V::load(x_.scales(added.t) + at * kTile),
                        V::load(x_.sums(added.t) + at * kTile), scales_ + at * kStrip + added.tile * kTile,
                        biases_ + at * kStrip + added.tile * kTile};
      _tile_loadd(0, weights, kTileColumns);
      multiply_digit<0>(stored, digits);
      add_rows<0, 4>(group, sums);
      multiply_digit<1>(stored, digits);
      add_rows<4, 10>(group, sums);
      multiply_digit<2>(stored, digits);
      if constexpr (kSteps == 2) multiply_more(weights + kTileBytes, digits + kDigits * kTileBytes);
      add_rows<10, 16>(group, sums);
      if (i < 2) {  // nothing was stored yet: what was added is forgotten
        begin_sums(to, v == 0, sums);
        continue;
      }
      if (++added.group < groups) continue;
      added.group = 0;
#pragma GCC unroll 16
      for (int m = 0; m < kTile; m++) V::store(to + m * kTile, sums[m]);
      if (++added.tile == tiles_) {
        added.tile = 0;
        if (++added.t == x_.tiles()) break;
      }
      to = sums_ + (added.t * kStripTiles + added.tile) * kSums;
      begin_sums(to, v == 0, sums);
    }
  }

  void store(int64_t t, int64_t tile, const MutableRows& y, const bool* fits) const {
    const float* sums = sums_ + (t * kStripTiles + tile) * kSums;
    Int words[kTile];
    for (int m = 0; m < kTile; m++) words[m] = V::load_words(sums + m * kTile);
    V::transpose(words);
    const int64_t column = first_ + tile * kTile, columns = smaller(kTile, w_.rows - column);
    for (int64_t i = 0, rows = smaller(kTile, x_.rows() - t * kTile); i < rows; i++) {
      if (!fits[t * kTile + i]) continue;
      void* to = y.row(t * kTile + i);
      if (columns == kTile)
        V::store_values(to, y.type, column, V::float_of_bits(words[i]));
      else
        V::store_some_values(to, y.type, column, V::float_of_bits(words[i]), columns);
    }
  }

  const Quantized& w_;
  const DigitTiles& x_;
  const int64_t padded_groups_;
  int64_t first_ = 0, tiles_ = 0;
  uint8_t* weights_;
  float *sums_, *scales_, *biases_;
};

template <class R>
R some_rows(const R& rows, int64_t begin, int64_t count) {
  if (rows.index) return {rows.values, rows.type, rows.stride, count, rows.index + begin};
  return {at(rows.values, rows.type, begin * rows.stride), rows.type, rows.stride, count};
}

// Rows that digits do not hold. No container of the standard library: its functions are not of this file alone.
struct Others {
  explicit Others(int64_t most) : rows(new int64_t[most]) {}
  std::unique_ptr<int64_t[]> rows;
  int64_t count = 0;
};

// Where the others are in the memory of x or y.
template <class R>
R other_rows(const R& all, const Others& others, Others& indices) {
  for (int64_t i = 0; i < others.count; i++) indices.rows[i] = all.index ? all.index[others.rows[i]] : others.rows[i];
  return {all.values, all.type, all.stride, others.count, indices.rows.get()};
}

// Rows of x that are multiplied at once, of equal numbers as far as whole tiles allow.
int64_t rows_at_once(int64_t rows, const Quantized& w) {
  const int64_t most = std::clamp(kMostDigits / (kDigits * w.columns) / kTile * kTile, kLeastRows, kMostRows);
  const int64_t blocks = (rows + most - 1) / most;
  return round_up((rows + blocks - 1) / blocks, kTile);
}

// Products of one format with the rows of x that digits hold; notes the others.
template <int bits>
void multiply_fitting(const Rows& x, const RowsProduct* products, int count, Threads& threads, Others& others) {
  const Quantized& first = products[0].w;
  const int64_t most = rows_at_once(x.count, first);
  bool fits[kMostRows];
  for (int64_t begin = 0; begin < x.count; begin += most) {
    const int64_t rows = smaller(most, x.count - begin);
    const Rows some = some_rows(x, begin, rows);
    DigitTiles digits(rows, first.columns, first.group_size);
    threads.parallel_for(digits.tiles(), 1, [&](int64_t tile, int64_t end) {
      for (; tile < end; tile++) digits.convert<bits>(some, tile, fits + tile * kTile);
    });
    const int64_t before = others.count;
    for (int64_t i = 0; i < rows; i++)
      if (!fits[i]) others.rows[others.count++] = begin + i;
    if (others.count - before == rows) continue;
    for (int i = 0; i < count; i++) {
      const Quantized& w = products[i].w;
      const MutableRows to = some_rows(products[i].y, begin, rows);
      threads.parallel_for(w.rows, kStrip, [&](int64_t row, int64_t end) {
        Tiles tiles(w.group_size == 32 ? 32 : 64);
        Strip<bits> strip(w, digits);
        for (; row < end; row += kStrip) strip.multiply(row, to, fits);
      });
    }
  }
}

void multiply_fitting(const Rows& x, const RowsProduct* products, int count, Threads& threads, Others& others) {
  switch (products[0].w.bits) {
    case 2:
      return multiply_fitting<2>(x, products, count, threads, others);
    case 3:
      return multiply_fitting<3>(x, products, count, threads, others);
    case 4:
      return multiply_fitting<4>(x, products, count, threads, others);
    case 5:
      return multiply_fitting<5>(x, products, count, threads, others);
    case 6:
      return multiply_fitting<6>(x, products, count, threads, others);
    default:
      return multiply_fitting<8>(x, products, count, threads, others);
  }
}

// Whether the product is faster so. A tile takes as long for one row of x as for 16, and for 32 columns as for 64. With
// few rows of x, each thread needs some strips: AVX-512 shares fewer rows of the matrix among threads.
bool pays(const Rows& x, const Quantized& w, const Threads& threads) {
  if (w.mode != Mode::affine || w.rows < kTile || w.columns == 0 || x.count < 5) return false;
  const int64_t at_once = smaller(x.count, rows_at_once(x.count, w));
  const bool has_strips = threads.count() == 1 || w.rows >= 2 * kStrip * threads.count();
  return at_once >= (w.group_size == 32 ? 48 : !has_strips ? 32 : w.group_size == 64 ? 7 : 5);
}

}  // namespace

void multiply_transposed_by_amx(const Rows& x, const RowsProduct* products, int count, Threads& threads) {
  for (int begin = 0, end; begin < count; begin = end) {
    const Quantized& w = products[begin].w;
    const bool by_tiles = pays(x, w, threads);
    auto joins = [&](const Quantized& other) {
      return pays(x, other, threads) == by_tiles && (!by_tiles || same_format(w, other));
    };
    end = begin + 1;
    while (end < count && joins(products[end].w)) end++;
    if (!by_tiles) {
      avx512_kernels.multiply_transposed(x, products + begin, end - begin, threads);
      continue;
    }
    Others others(x.count);
    multiply_fitting(x, products + begin, end - begin, threads, others);
    if (others.count == 0) continue;
    Others x_indices(others.count), y_indices(others.count);
    const Rows rest = other_rows(x, others, x_indices);
    for (int i = begin; i < end; i++) {
      const RowsProduct product{products[i].w, other_rows(products[i].y, others, y_indices)};
      avx512_kernels.multiply_transposed(rest, &product, 1, threads);
    }
  }
}

}  // namespace mlx_cpu_kernels
