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
// Rows of x at once, so that their sums stay in level 2, and their copy within kMostCopied. For further rows, panels
// are dequantized again, which costs little from some hundred rows on.
constexpr int64_t kMostRows = 768;
constexpr int64_t kLeastRows = 96;
constexpr int64_t kMostCopied = 32 << 20;  // bytes, which the thread keeps
// Steps of depth that a tile takes at once.
constexpr int64_t kSteps = 4;
// Columns at once for many rows, at most: a tile of x is read once for all of their panels, which stay in level 2.
constexpr int64_t kManyColumns = 128;
// Numbers of x that a tile fetches into level 2 in each step of depth. The panels of kManyColumns fetch the next tile:
// processors do not foresee its rows, because they are read side by side.
template <class V>
constexpr int64_t kAhead = (V::kTileRows * kXStride * kWidth<V> + kManyColumns * kDepth - 1) / (kManyColumns * kDepth);

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

// sums[r][0 .. kWidth) = (or +=, after the first block of depth) x[r][k] * panel[k][0 .. kWidth) over k. The depth is a
// multiple of kSteps. Fetches what lies at `next`, kAhead numbers for each k.
template <class V, int rows>
[[gnu::flatten]] void multiply_tile(const float* x, const float* panel, int64_t depth, float* sums, int64_t sums_stride,
                                    bool add, const float* next) {
  constexpr int kVectors = V::kPanelVectors;
  // An addition takes four cycles and two can begin in each: with few rows, several sums are kept for each result.
  constexpr int kParts = rows == 1 ? kSteps : rows <= 3 ? 2 : 1;
  typename V::Float s[kParts][rows][kVectors];
  unroll<kParts * rows * kVectors>(
      [&]<int i>() { s[i / kVectors / rows][i / kVectors % rows][i % kVectors] = V::zero(); });
  for (int64_t k = 0; k < depth; k += kSteps, panel += kSteps * kWidth<V>) {
    __builtin_prefetch(next + k * kAhead<V>, 0, 2);
    unroll<kSteps>([&]<int step>() {
      typename V::Float w[kVectors];
      unroll<kVectors>([&]<int v>() { w[v] = V::load(panel + step * kWidth<V> + v * V::kLanes); });
      unroll<rows>([&]<int r>() {
        auto value = V::broadcast(x[r * kXStride + k + step]);
        auto& to = s[step % kParts][r];
        unroll<kVectors>([&]<int v>() { to[v] = V::multiply_add(value, w[v], to[v]); });
      });
    });
  }
  unroll<rows * kVectors>([&]<int i>() {
    constexpr int r = i / kVectors, v = i % kVectors;
    auto sum = s[0][r][v];
    unroll<kParts - 1>([&]<int part>() { sum = V::add(sum, s[part + 1][r][v]); });
    float* to = sums + r * sums_stride + v * V::kLanes;
    V::store(to, add ? V::add(V::load(to), sum) : sum);
  });
}

using Tile = void (*)(const float*, const float*, int64_t, float*, int64_t, bool, const float*);

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
    // A tile takes whole steps of kSteps: those beyond the depth meet zeros of x, and must be numbers.
    for (int64_t p = 0; p < panels; p++) {
      float* rest = panel + (p * kDepth + depth) * kWidth<V>;
      std::fill(rest, rest + (round_up(depth, kSteps) - depth) * kWidth<V>, 0.0f);
    }
    for (int64_t t = 0; t < tiles; t++) {
      int64_t row = rows * t / tiles, height = rows * (t + 1) / tiles - row;
      Tile multiply = tile_of_rows<V>(height);
      const float* next = x.tile(block, row + height);
      for (int64_t p = 0; p < panels; p++)
        multiply(x.tile(block, row), panel + p * kDepth * kWidth<V>, round_up(depth, kSteps),
                 sums + row * width + p * kWidth<V>, width, block > 0, next + p * kDepth * kAhead<V>);
      if (begin + depth < source.depth()) continue;
      for (int64_t r = row; r < row + height; r++)
        store_row<V>(sums + r * width, count, y.row(y_begin + r), y.type, first);
    }
  }
}

template <class V, class Source>
void multiply_by_panels(const Rows& x, const Source& prepared, const MutableRows& y, Threads& threads) {
  const int64_t copied_bytes = round_up(prepared.depth(), kDepth) / kDepth * kXStride * sizeof(float);
  const int64_t most = larger(kLeastRows, smaller(kMostRows, kMostCopied / larger(copied_bytes, 1)));
  for (int64_t begin = 0; begin < x.count; begin += most) {
    int64_t rows = smaller(most, x.count - begin);
    CopiedRows<V> copied(x, begin, rows, prepared.depth(), threads);
    threads.parallel_for(prepared.columns(), Source::kColumns, [&](int64_t first, int64_t last) {
      Source source = prepared;
      // Parts of equal width, as near as whole panels allow.
      int64_t units = round_up(last - first, Source::kColumns) / Source::kColumns;
      int64_t parts = rows > 2 * V::kTileRows ? round_up(last - first, kManyColumns) / kManyColumns : units;
      for (int64_t part = 0; part < parts; part++) {
        int64_t from = first + units * part / parts * Source::kColumns;
        int64_t count = smaller(first + units * (part + 1) / parts * Source::kColumns, last) - from;
        source.prepare(from, count);
        multiply_columns<V>(copied, rows, source, from, count, y, begin);
      }
    });
  }
}

}  // namespace
}  // namespace mlx_cpu_kernels
