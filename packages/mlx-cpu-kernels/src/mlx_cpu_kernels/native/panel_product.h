// Products of many rows: the matrix is dequantized into panels that stay in the caches while all rows use them.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "panels.h"

namespace mlx_cpu_kernels {
namespace {

// Depth of a panel. 256 * 32 float32 are 32 kB: with the rows of x of a tile they fit into 48 kB of level 1.
constexpr int64_t kDepth = 256;
// From row to row of x as it is copied. Not a power of two: a tile's rows would compete for the same lines of level 1.
constexpr int64_t kXStride = kDepth + 16;
// Rows of x at once, so that their sums stay in level 2, and their copy within kMostCopied. For further rows, panels are
// dequantized again, which costs little from some hundred rows on.
constexpr int64_t kMostRows = 768;
constexpr int64_t kLeastRows = 96;
constexpr int64_t kMostCopied = 16 << 20;  // bytes, which the thread keeps
// Steps of depth that a tile of one row takes at once.
constexpr int64_t kSteps = 4;
// Panels at once for many rows: a tile of x is read once for all of them.
constexpr int64_t kManyPanels = 4;

// x in float32 and in blocks of depth: [block][row][kXStride].
template <class V>
class CopiedRows {
 public:
  CopiedRows(const Rows& x, int64_t begin, int64_t count, int64_t depth, Threads& threads) : count_(count) {
    int64_t blocks = round_up(depth, kDepth) / kDepth;
    values_ = scratch<float>(Slot::x, blocks * count * kXStride);
    threads.parallel_for(blocks * count, larger(1, 65536 / kDepth), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        int64_t k = i / count * kDepth;
        copy(x.row(begin + i % count), x.type, k, smaller(kDepth, depth - k), values_ + i * kXStride);
      }
    });
  }

  const float* tile(int64_t block, int64_t row) const { return values_ + (block * count_ + row) * kXStride; }

 private:
  static void copy(const void* from, Type type, int64_t k, int64_t depth, float* to) {
    int64_t i = 0;
    for (; i + V::kLanes <= depth; i += V::kLanes) V::store(to + i, V::load_values(from, type, k + i));
    if (i < depth) V::store(to + i, V::load_some_values(from, type, k + i, depth - i));
  }

  int64_t count_;
  float* values_;
};

// sums[r][0 .. kWidth) = (or +=, after the first block of depth) x[r][k] * panel[k][0 .. kWidth) over k.
template <class V, int rows>
[[gnu::flatten]] void multiply_tile(const float* x, const float* panel, int64_t depth, float* sums, int64_t sums_stride,
                                    bool add) {
  constexpr int kVectors = V::kPanelVectors;
  // An addition takes four cycles and two can begin in each: with few rows, several sums are kept for each result.
  constexpr int kParts = rows == 1 ? kSteps : rows <= 3 ? 2 : 1;
  typename V::Float s[kParts][rows][kVectors];
  for (auto& part : s)
    for (auto& row : part)
      for (auto& sum : row) sum = V::zero();
  for (int64_t k = 0; k < depth; k += kParts, panel += kParts * kWidth<V>) {
    unroll<kParts>([&]<int part>() {
      typename V::Float w[kVectors];
      unroll<kVectors>([&]<int v>() { w[v] = V::load(panel + part * kWidth<V> + v * V::kLanes); });
      unroll<rows>([&]<int r>() {
        auto value = V::broadcast(x[r * kXStride + k + part]);
        unroll<kVectors>([&]<int v>() { s[part][r][v] = V::multiply_add(value, w[v], s[part][r][v]); });
      });
    });
  }
  for (int part = 1; part < kParts; part++)
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < kVectors; v++) s[0][r][v] = V::add(s[0][r][v], s[part][r][v]);
  for (int r = 0; r < rows; r++) {
    for (int v = 0; v < kVectors; v++) {
      float* to = sums + r * sums_stride + v * V::kLanes;
      V::store(to, add ? V::add(V::load(to), s[0][r][v]) : s[0][r][v]);
    }
  }
}

using Tile = void (*)(const float*, const float*, int64_t, float*, int64_t, bool);

template <class V>
Tile tile_of_rows(int64_t rows) {
  Tile found = nullptr;
  unroll<V::kTileRows>([&]<int i>() {
    if (rows == i + 1) found = multiply_tile<V, i + 1>;
  });
  return found;
}

// The rows of y that one block of rows of x gives, for the columns [first, first + count) that `source` has prepared.
template <class V, class Source>
void multiply_columns(const CopiedRows<V>& x, int64_t rows, const Source& source, int64_t first, int64_t count,
                      const MutableRows& y, int64_t y_begin) {
  int64_t panels = round_up(count, kWidth<V>) / kWidth<V>, width = panels * kWidth<V>;
  float* panel = scratch<float>(Slot::panels, panels * kDepth * kWidth<V>);
  float* sums = scratch<float>(Slot::sums, rows * width);
  // Tiles of equal height: 13 rows are 7 and 6, not 12 and 1.
  int64_t tiles = (rows + V::kTileRows - 1) / V::kTileRows;
  for (int64_t begin = 0, block = 0; begin < source.depth(); begin += kDepth, block++) {
    int64_t depth = smaller(kDepth, source.depth() - begin);
    source.fill(begin, depth, panel, kDepth * kWidth<V>);
    // A tile of few rows takes up to kSteps of them at once: those beyond the depth meet zeros of x, and must be numbers.
    for (int64_t p = 0; p < panels; p++) {
      float* rest = panel + (p * kDepth + depth) * kWidth<V>;
      std::fill(rest, rest + (round_up(depth, kSteps) - depth) * kWidth<V>, 0.0f);
    }
    for (int64_t t = 0; t < tiles; t++) {
      int64_t row = rows * t / tiles, height = rows * (t + 1) / tiles - row;
      Tile multiply = tile_of_rows<V>(height);
      for (int64_t p = 0; p < panels; p++)
        multiply(x.tile(block, row), panel + p * kDepth * kWidth<V>, depth, sums + row * width + p * kWidth<V>, width,
                 block > 0);
    }
  }
  for (int64_t row = 0; row < rows; row++) store_row<V>(sums + row * width, count, y.row(y_begin + row), y.type, first);
}

template <class V, class Source>
void multiply_by_panels(const Rows& x, const Source& prepared, const MutableRows& y, Threads& threads) {
  const int64_t copied_bytes = round_up(prepared.depth(), kDepth) / kDepth * kXStride * sizeof(float);
  const int64_t most = larger(kLeastRows, smaller(kMostRows, kMostCopied / larger(copied_bytes, 1)));
  for (int64_t begin = 0; begin < x.count; begin += most) {
    int64_t rows = smaller(most, x.count - begin);
    CopiedRows<V> copied(x, begin, rows, prepared.depth(), threads);
    int64_t step = rows > 2 * V::kTileRows ? kManyPanels * Source::kColumns : Source::kColumns;
    threads.parallel_for(prepared.columns(), step, [&](int64_t first, int64_t last) {
      Source source = prepared;
      for (int64_t column = first; column < last; column += step) {
        int64_t count = smaller(step, last - column);
        source.prepare(column, count);
        multiply_columns<V>(copied, rows, source, column, count, y, begin);
      }
    });
  }
}

}  // namespace
}  // namespace mlx_cpu_kernels
