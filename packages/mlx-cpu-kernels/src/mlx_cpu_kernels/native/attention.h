// Attention by blocks of keys. The scores of a block, their exponentials and their part of the result follow one
// another while all are in the caches. The largest score so far of each query is kept. When it grows, the sums so far
// are scaled.
//
// Both products are tiles of panels. A block of keys becomes panels [head_size][keys], and a block of values panels
// [keys][value_size]. Quantized ones become the same panels as any quantized matrix. A few rows, as in decode, read
// keys and values where they are.
#pragma once

#include "fused_rows.h"
#include "panel_product.h"

namespace mlx_cpu_kernels {
namespace {

constexpr int64_t kKeys = kDepth;       // keys of a block
constexpr int64_t kQueryRows = 384;     // rows of a unit of work, which prepares the blocks for itself
constexpr int64_t kMostDirectRows = 8;  // that read keys and values where they are
constexpr int kDirectTile = 3;          // of these, whose sums are in registers together
constexpr float kHidden = -3.4e38f;  // a score that is not seen; not infinity: nothing seen gives the mean, as in MLX

// Rows of any type as panels [row][columns], zeros beyond the columns.
template <class V>
[[gnu::flatten]] void copy_to_panels(const Heads& x, Type type, int64_t batch, int64_t head, int64_t first,
                                     int64_t count, int64_t columns, float* panels) {
  for (int64_t r = 0; r < count; r++) {
    const void* from = head_row(x, type, batch, head, first + r);
    for (int64_t c = 0; c < round_up(columns, kWidth<V>); c += V::kLanes) {
      float* to = panels + c / kWidth<V> * kKeys * kWidth<V> + r * kWidth<V> + c % kWidth<V>;
      int64_t left = columns - c;
      V::store(to, left >= V::kLanes ? V::load_values(from, type, c)
                   : left > 0        ? V::load_some_values(from, type, c, left)
                                     : V::zero());
    }
  }
}

// Rows of any type as panels of the transposed matrix, [column][rows]; rows beyond the last repeat it.
template <class V>
[[gnu::flatten]] void transpose_to_panels(const Heads& x, Type type, int64_t batch, int64_t head, int64_t first,
                                          int64_t count, int64_t columns, float* panels) {
  for (int64_t r = 0; r < count; r += V::kLanes) {
    const void* rows[V::kLanes];
    for (int lane = 0; lane < V::kLanes; lane++)
      rows[lane] = head_row(x, type, batch, head, first + smaller(r + lane, count - 1));
    float* panel = panels + r / kWidth<V> * kDepth * kWidth<V> + r % kWidth<V>;
    for (int64_t c = 0; c < columns; c += V::kLanes) {
      typename V::Int tile[V::kLanes];
      int64_t left = columns - c;
      for (int lane = 0; lane < V::kLanes; lane++)
        tile[lane] = V::words_of_float(left >= V::kLanes ? V::load_values(rows[lane], type, c)
                                                         : V::load_some_values(rows[lane], type, c, left));
      V::transpose(tile);
      for (int i = 0; i < V::kLanes; i++) V::store_words(panel + (c + i) * kWidth<V>, tile[i]);
    }
  }
}

// The queries that share one head of keys. Row r is head r % group and position r / group. So positions ascend, and a
// block of keys that is hidden from one tile is hidden from those before.
template <class V>
class QueryBlock {
 public:
  QueryBlock(const Attention& a, int64_t batch, int64_t kv_head, int64_t first, int64_t rows)
      : a_(a),
        batch_(batch),
        kv_head_(kv_head),
        first_(first),
        rows_(rows),
        group_(a.heads / a.kv_heads),
        keys_(a.lengths ? a.lengths[batch] : a.keys) {
    width_ = round_up(a.value_size, kWidth<V>);
    depth_ = round_up(a.head_size, kSteps);  // a tile takes whole steps
    queries_ = scratch<float>(Slot::x, rows * kXStride);
    sums_ = scratch<float>(Slot::sums, rows * width_);
    largest_ = scratch<float>(Slot::x_scales, rows);
    totals_ = scratch<float>(Slot::x_sums, rows);
    scores_ = scratch<float>(Slot::rows, V::kTileRows * kXStride);
    key_panels_ = scratch<float>(Slot::panels, kDepth * kKeys);
    value_panels_ = scratch<float>(Slot::values, kKeys * width_);
  }

  void attend() {
    if (is_direct()) {
      switch (a_.type) {
        case Type::float32:
          return attend_directly<Type::float32>();
        case Type::float16:
          return attend_directly<Type::float16>();
        default:
          return attend_directly<Type::bfloat16>();
      }
    }
    for (int64_t r = 0; r < rows_; r++) begin_row(r);
    for (int64_t key = 0; key < keys_; key += kKeys) {
      int64_t count = smaller(kKeys, keys_ - key);
      if (!sees(rows_ - 1, key)) break;
      prepare_keys(key, count);
      prepare_values(key, count);
      int64_t tiles = (rows_ + V::kTileRows - 1) / V::kTileRows;
      for (int64_t t = 0; t < tiles; t++) {
        int64_t row = rows_ * t / tiles, end = rows_ * (t + 1) / tiles;
        if (sees(end - 1, key)) attend_tile(row, end - row, key, count);
      }
    }
    for (int64_t r = 0; r < rows_; r++) end_row(r);
  }

 private:
  int64_t head(int64_t r) const { return kv_head_ * group_ + (first_ + r) % group_; }
  int64_t query(int64_t r) const { return (first_ + r) / group_; }
  // The number of keys that a row sees: those before.
  int64_t limit(int64_t r) const {
    return a_.mask == Attention::Mask::causal ? keys_ - a_.queries + query(r) + 1 : keys_;
  }
  bool sees(int64_t r, int64_t key) const { return key < limit(r) || key == 0; }

  // Whether there are too few rows to share what panels cost.
  bool is_direct() const {
    bool is_whole = a_.head_size % V::kLanes == 0 && a_.value_size % V::kLanes == 0;
    return rows_ <= smaller(kMostDirectRows, V::kTileRows) && is_whole && !a_.k_quantized && !a_.v_quantized;
  }

  // Reads keys and values where they are.
  template <Type type>
  [[gnu::flatten]] void attend_directly() {
    for (int64_t r = 0; r < rows_; r++) begin_row(r);
    for (int64_t key = 0; key < keys_; key += kKeys) {
      int64_t count = smaller(kKeys, keys_ - key);
      if (!sees(rows_ - 1, key)) break;
      for (int64_t k = 0; k < count; k += 4) score_four<type>(key, k, count);
      for (int64_t r = 0; r < rows_; r++) weigh(r, key, count, scores_ + r * kXStride);
      int64_t r = 0;
      for (; r + kDirectTile <= rows_; r += kDirectTile) add_values<type, kDirectTile>(r, key, count);
      for (; r < rows_; r++) add_values<type, 1>(r, key, count);
    }
    for (int64_t r = 0; r < rows_; r++) end_row(r);
  }

  // The scores of four keys, of which those beyond the block repeat its last.
  template <Type type>
  void score_four(int64_t key, int64_t k, int64_t count) {
    const void* keys[4];
    for (int i = 0; i < 4; i++) keys[i] = head_row(a_.k, type, batch_, kv_head_, key + smaller(k + i, count - 1));
    for (int64_t r = 0; r < rows_; r++) {
      const float* q = queries_ + r * kXStride;
      typename V::Float sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
      for (int64_t c = 0; c < a_.head_size; c += V::kLanes) {
        auto of_query = V::load(q + c);
        unroll<4>([&]<int i>() { sums[i] = V::multiply_add(of_query, V::load_values(keys[i], type, c), sums[i]); });
      }
      V::store_sums(scores_ + r * kXStride + k, sums[0], sums[1], sums[2], sums[3]);
    }
  }

  // Adds the weighted values of a block to a few rows, four vectors at once as long as there are as many.
  template <Type type, int rows>
  void add_values(int64_t r, int64_t key, int64_t count) {
    int64_t c = 0;
    for (; c + 4 * V::kLanes <= a_.value_size; c += 4 * V::kLanes) add_columns<type, rows, 4>(r, c, key, count);
    for (; c < a_.value_size; c += V::kLanes) add_columns<type, rows, 1>(r, c, key, count);
  }

  template <Type type, int rows, int vectors>
  void add_columns(int64_t r, int64_t c, int64_t key, int64_t count) {
    typename V::Float sums[rows][vectors];
    auto place = [&](int i, int v) { return sums_ + (r + i) * width_ + c + v * V::kLanes; };
    unroll<rows>([&]<int i>() { unroll<vectors>([&]<int v>() { sums[i][v] = V::load(place(i, v)); }); });
    for (int64_t k = 0; k < count; k++) {
      const void* from = head_row(a_.v, type, batch_, kv_head_, key + k);
      typename V::Float values[vectors];
      unroll<vectors>([&]<int v>() { values[v] = V::load_values(from, type, c + v * V::kLanes); });
      unroll<rows>([&]<int i>() {
        auto weight = V::broadcast(scores_[(r + i) * kXStride + k]);
        unroll<vectors>([&]<int v>() { sums[i][v] = V::multiply_add(weight, values[v], sums[i][v]); });
      });
    }
    unroll<rows>([&]<int i>() { unroll<vectors>([&]<int v>() { V::store(place(i, v), sums[i][v]); }); });
  }

  void begin_row(int64_t r) {
    const void* q = head_row(a_.q, a_.type, batch_, head(r), query(r));
    float* to = queries_ + r * kXStride;
    for (int64_t c = a_.head_size; c < depth_; c++) to[c] = 0;
    auto scale = V::broadcast(a_.scale);
    each_vector<V>(a_.head_size, [&](int64_t, auto load, auto store) {
      store(to, Type::float32, V::multiply(load(q, a_.type), scale));
    });
    for (int64_t c = 0; c < width_; c++) sums_[r * width_ + c] = 0;
    largest_[r] = a_.sinks ? a_.sinks[head(r)] : -INFINITY;
    totals_[r] = a_.sinks ? 1 : 0;
  }

  void end_row(int64_t r) {
    void* y = head_row(a_.y, a_.type, batch_, head(r), query(r));
    auto factor = V::broadcast(1 / totals_[r]);
    const float* sums = sums_ + r * width_;
    each_vector<V>(a_.value_size, [&](int64_t, auto load, auto store) {
      store(y, a_.type, V::multiply(load(sums, Type::float32), factor));
    });
  }

  void prepare_keys(int64_t key, int64_t count) {
    if (a_.k_quantized) {
      Quantized all = quantized_head(*a_.k_quantized, a_.k, a_.k_group_strides, batch_, kv_head_);
      TransposedPanels<V> panels(all);
      panels.prepare(key, count);
      panels.fill(0, a_.head_size, key_panels_, kDepth * kWidth<V>);
    } else {
      transpose_to_panels<V>(a_.k, a_.type, batch_, kv_head_, key, count, a_.head_size, key_panels_);
    }
    int64_t panels = round_up(count, kWidth<V>) / kWidth<V>;
    for (int64_t p = 0; p < panels; p++)  // the steps beyond the head, times zeros of the queries
      for (int64_t i = a_.head_size * kWidth<V>; i < depth_ * kWidth<V>; i++)
        key_panels_[p * kDepth * kWidth<V> + i] = 0;
  }

  void prepare_values(int64_t key, int64_t count) {
    if (a_.v_quantized) {
      Quantized all = quantized_head(*a_.v_quantized, a_.v, a_.v_group_strides, batch_, kv_head_);
      StraightPanels<V> panels(all);
      panels.prepare(0, a_.value_size);
      panels.fill(key, count, value_panels_, kKeys * kWidth<V>);
    } else {
      copy_to_panels<V>(a_.v, a_.type, batch_, kv_head_, key, count, a_.value_size, value_panels_);
    }
    for (int64_t p = 0; p < width_ / kWidth<V>; p++)  // the steps beyond the block, times zeros of the scores
      for (int64_t i = count * kWidth<V>; i < round_up(count, kSteps) * kWidth<V>; i++)
        value_panels_[p * kKeys * kWidth<V> + i] = 0;
  }

  void attend_tile(int64_t row, int64_t rows, int64_t key, int64_t count) {
    // A tile of a causal mask needs no more keys than its last row sees.
    count = smaller(count, larger(limit(row + rows - 1) - key, 1));
    Tile multiply = tile_of_rows<V>(rows);
    const float* queries = queries_ + row * kXStride;
    for (int64_t k = 0; k < count; k += kWidth<V>)
      multiply(queries, key_panels_ + k * kDepth, depth_, scores_ + k, kXStride, false, queries);
    for (int64_t r = 0; r < rows; r++) weigh(row + r, key, count, scores_ + r * kXStride);
    for (int64_t c = 0; c < width_; c += kWidth<V>)
      multiply(scores_, value_panels_ + c * kKeys, round_up(count, kSteps), sums_ + row * width_ + c, width_, true,
               scores_);
  }

  // Turns the scores of a row into weights relative to its largest score so far.
  [[gnu::flatten]] void weigh(int64_t r, int64_t key, int64_t count, float* scores) {
    apply_mask(r, key, count, scores);
    auto most = V::broadcast(-INFINITY);
    int64_t k = 0;
    for (; k + V::kLanes <= count; k += V::kLanes) most = V::maximum(most, V::load(scores + k));
    float largest = V::largest(most);
    for (; k < count; k++) largest = scores[k] > largest ? scores[k] : largest;
    if (largest > largest_[r]) {
      rescale(r, largest_[r] == -INFINITY ? 0 : ::expf(largest_[r] - largest));
      largest_[r] = largest;
    }
    // An additive mask of -infinity may have hidden all so far: then there is nothing to weigh.
    auto shift = V::broadcast(largest_[r] == -INFINITY ? 0 : -largest_[r]);
    auto lowest = V::broadcast(-87.f);
    auto total = V::zero();
    for (int64_t i = count; i < round_up(count, V::kLanes); i++) scores[i] = -INFINITY;
    for (k = 0; k < count; k += V::kLanes) {
      auto x = V::add(V::load(scores + k), shift);
      auto weight = V::zero_where_below(exponential<V>(x), x, lowest);
      V::store(scores + k, weight);
      total = V::add(total, weight);
    }
    for (int64_t i = count; i < round_up(count, kSteps); i++) scores[i] = 0;
    totals_[r] += V::sum(total);
  }

  void rescale(int64_t r, float factor) {
    totals_[r] *= factor;
    for (int64_t c = 0; c < width_; c += V::kLanes) {
      float* sums = sums_ + r * width_ + c;
      V::store(sums, V::multiply(V::load(sums), V::broadcast(factor)));
    }
  }

  void apply_mask(int64_t r, int64_t key, int64_t count, float* scores) const {
    if (a_.mask == Attention::Mask::none) return;
    if (a_.mask == Attention::Mask::causal) {
      for (int64_t k = larger(limit(r) - key, 0); k < count; k++) scores[k] = kHidden;
      return;
    }
    const int64_t* strides = a_.mask_strides;
    int64_t first = batch_ * strides[0] + head(r) * strides[1] + query(r) * strides[2] + key;
    if (a_.mask == Attention::Mask::boolean) {
      auto seen = static_cast<const uint8_t*>(a_.mask_values) + first;
      for (int64_t k = 0; k < count; k++) scores[k] = seen[k] ? scores[k] : kHidden;
    } else {
      const void* values = at(a_.mask_values, a_.mask_type, first);
      each_vector<V>(count, [&](int64_t i, auto load, auto) {
        V::store(scores + i, V::add(V::load(scores + i), load(values, a_.mask_type)));
      });
    }
  }

  const Attention& a_;
  int64_t batch_, kv_head_, first_, rows_, group_, keys_, width_, depth_;
  float *queries_, *sums_, *largest_, *totals_, *scores_, *key_panels_, *value_panels_;
};

// The work of threads is blocks of rows. Where a block is read directly, which prepares nothing, it is rows: three
// heads of keys are two equal shares then.
template <class V>
void attend(const Attention& a, Threads& threads) {
  int64_t rows = a.heads / a.kv_heads * a.queries, blocks = (rows + kQueryRows - 1) / kQueryRows;
  int64_t units = rows <= kMostDirectRows ? rows : blocks;
  threads.parallel_for(a.batches * a.kv_heads * units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      int64_t unit = i % units, kv_head = i / units % a.kv_heads, batch = i / units / a.kv_heads;
      int64_t together = units == blocks ? 1 : smaller(units - unit, end - i);
      int64_t first = rows * unit / units, last = rows * (unit + together) / units;
      QueryBlock<V>(a, batch, kv_head, first, last - first).attend();
      i += together;
    }
  });
}

}  // namespace
}  // namespace mlx_cpu_kernels
