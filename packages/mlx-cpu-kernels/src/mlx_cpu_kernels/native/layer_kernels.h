// The operations of layers.h whose speed depends on the instruction set. Each set's file includes this once.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "layers.h"
#include "vectors.h"

namespace mlx_cpu_kernels {

struct LayerKernels {
  void (*rms_norm)(const float* x, const float* weight, float* y, int64_t rows, int64_t size, float epsilon);
  void (*swiglu)(const float* gate, const float* up, float* y, int64_t size);
  // Heads [begin, end) of all, where the KV heads of a batch entry follow those of the entry before.
  void (*attend)(const Attention& attention, int64_t begin, int64_t end);
};

extern const LayerKernels base_layer_kernels;  // for every processor
#if defined(__x86_64__)
extern const LayerKernels avx2_layer_kernels;
extern const LayerKernels avx512_layer_kernels;
#endif

namespace {

void rms_norm_rows(const float* x, const float* weight, float* y, int64_t rows, int64_t size, float epsilon) {
  for (int64_t row = 0; row < rows; row++, x += size, y += size) {
    Vector squares[2] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
      for (int part = 0; part < 2; part++) {
        const Vector values = load(x + i + part * kLanes);
        squares[part] += values * values;
      }
    }
    float total = sum(squares[0] + squares[1]);
    for (; i < size; i++) total += x[i] * x[i];
    const float factor = 1.0f / std::sqrt(total / static_cast<float>(size) + epsilon);
    if (weight) {
      for (i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
    } else {
      for (i = 0; i < size; i++) y[i] = x[i] * factor;
    }
  }
}

inline Vector silu_product(Vector gate, Vector up) { return gate / (all(1.0f) + exponential(-gate)) * up; }

void swiglu_values(const float* gate, const float* up, float* y, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(y + i, silu_product(load(gate + i), load(up + i)));
  if (i == size) return;
  float gates[kLanes] = {}, ups[kLanes] = {}, products[kLanes];
  std::copy(gate + i, gate + size, gates);
  std::copy(up + i, up + size, ups);
  store(products, silu_product(load(gates), load(ups)));
  std::copy(products, products + (size - i), y + i);
}

constexpr int64_t kKeys = 128;  // keys whose scores are computed and used together
constexpr int64_t kRows = 48;   // rows of queries that use a block of keys while it is in the cache
constexpr int kTile = 6;        // rows whose sums are held in registers
constexpr int64_t kFewRows = 8;  // up to so many, keys are read in place

// Memory of one thread for blocks of keys, values, queries and scores.
struct Workspace {
  std::vector<float> queries, keys, values, scores, sums;
};

inline Workspace& workspace() {
  static thread_local Workspace memory;
  return memory;
}

inline int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

// A head of keys and values with the rows of queries that use it: row r is token r % tokens of head r / tokens.
class Head {
 public:
  Head(const Attention& a, int64_t index) : a_(a), batch_(index / a.kv_heads), kv_head_(index % a.kv_heads) {
    keys_ = a.keys + batch_ * a.key_strides.batch + kv_head_ * a.key_strides.head;
    values_ = a.values + batch_ * a.value_strides.batch + kv_head_ * a.value_strides.head;
  }

  int64_t rows() const { return a_.heads / a_.kv_heads * a_.tokens; }
  int64_t token(int64_t row) const { return row % a_.tokens; }
  int64_t head(int64_t row) const { return kv_head_ * (a_.heads / a_.kv_heads) + row / a_.tokens; }
  const float* key(int64_t i) const { return keys_ + i * a_.key_strides.token; }
  const float* value(int64_t i) const { return values_ + i * a_.value_strides.token; }

  const float* query(int64_t row) const {
    return a_.queries + batch_ * a_.query_strides.batch + head(row) * a_.query_strides.head +
           token(row) * a_.query_strides.token;
  }

  float* out(int64_t row) const {
    return a_.out + ((batch_ * a_.tokens + token(row)) * a_.heads + head(row)) * a_.value_size;
  }

  // Number of keys that a row sees, without masks that are arrays.
  int64_t visible(int64_t row) const {
    return a_.mask_kind == MaskKind::causal ? std::max<int64_t>(0, a_.length - a_.tokens + token(row) + 1) : a_.length;
  }

  // Changes the scores of keys [begin, begin + count) of a row as the mask says.
  void mask(int64_t row, int64_t begin, int64_t count, float* scores) const {
    if (a_.mask_kind == MaskKind::causal) {
      for (int64_t i = std::max<int64_t>(0, visible(row) - begin); i < count; i++) scores[i] = -FLT_MAX;
      return;
    }
    if (a_.mask_kind == MaskKind::none) return;
    const auto& strides = a_.mask_strides;
    const int64_t first = batch_ * strides.batch + head(row) * strides.head + token(row) * strides.query + begin * strides.key;
    if (a_.mask_kind == MaskKind::boolean) {
      const bool* shown = static_cast<const bool*>(a_.mask) + first;
      for (int64_t i = 0; i < count; i++) scores[i] = shown[i * strides.key] ? scores[i] : -FLT_MAX;
    } else {
      const float* added = static_cast<const float*>(a_.mask) + first;
      for (int64_t i = 0; i < count; i++) scores[i] += added[i * strides.key];
    }
  }

  float sink(int64_t row) const { return a_.sinks ? a_.sinks[head(row)] : -FLT_MAX; }
  bool has_sinks() const { return a_.sinks; }

 private:
  const Attention& a_;
  int64_t batch_, kv_head_;
  const float *keys_, *values_;
};

// Sum of a row so far: of exponentials, and of the values that they weigh. Both are relative to the largest score.
struct RowSum {
  float largest, total;
};

// Replaces scores by their exponentials, and adds these to the row's sum. Returns the factor of what was summed before.
inline float weigh(float* scores, int64_t count, RowSum& sum_so_far) {
  const int64_t whole = padded(count);
  for (int64_t i = count; i < whole; i++) scores[i] = -FLT_MAX;
  Vector most = load(scores);
  for (int64_t i = kLanes; i < whole; i += kLanes) most = larger(most, load(scores + i));
  const float before = sum_so_far.largest, now = std::max(before, largest(most));
  Vector total = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Vector weights = exponential(load(scores + i) - all(now));
    store(scores + i, weights);
    total += weights;
  }
  for (int64_t i = count; i < whole; i++) scores[i] = 0;
  // Lanes behind the last key add e^0 each only where the row has seen no key at all.
  const float factor = before == now ? 1.0f : std::exp(before - now);
  float added = sum(total);
  if (now == -FLT_MAX) added -= static_cast<float>(whole - count);
  sum_so_far = {now, sum_so_far.total * factor + added};
  return factor;
}

inline float dot(const float* a, const float* b, int64_t size) {
  Vector sums = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sums += load(a + i) * load(b + i);
  float total = sum(sums);
  for (; i < size; i++) total += a[i] * b[i];
  return total;
}

inline void add_scaled(float* sums, const float* values, float weight, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(sums + i, load(sums + i) + all(weight) * load(values + i));
  for (; i < size; i++) sums[i] += weight * values[i];
}

inline void scale_by(float* values, float factor, int64_t size) {
  for (int64_t i = 0; i < size; i++) values[i] *= factor;
}

// Scores of a tile of rows with `padded` keys of a block: scores[r][k] = sum over i of queries[r][i] * keys[i][k].
template <int rows>
inline void score_tile(const float* queries, int64_t size, const float* keys, int64_t count, float* scores) {
  for (int64_t k = 0; k < count; k += 2 * kLanes) {
    Vector sums[rows][2] = {};
    for (int64_t i = 0; i < size; i++) {
      const Vector first = load(keys + i * kKeys + k), second = load(keys + i * kKeys + k + kLanes);
      for (int r = 0; r < rows; r++) {
        const Vector query = all(queries[r * size + i]);
        sums[r][0] += query * first;
        sums[r][1] += query * second;
      }
    }
    for (int r = 0; r < rows; r++) {
      store(scores + r * kKeys + k, sums[r][0]);
      store(scores + r * kKeys + k + kLanes, sums[r][1]);
    }
  }
}

// Values weighted by a tile's scores: sums[r][i] = factors[r] * sums[r][i] + sum over k of weights[r][k] * values[k][i].
template <int rows>
inline void sum_tile(const float* weights, const float* factors, const float* values, int64_t count, int64_t size, float* sums) {
  for (int64_t i = 0; i < size; i += kLanes) {
    Vector totals[rows];
    for (int r = 0; r < rows; r++) totals[r] = load(sums + r * size + i) * all(factors[r]);
    for (int64_t k = 0; k < count; k++) {
      const Vector value = load(values + k * size + i);
      for (int r = 0; r < rows; r++) totals[r] += all(weights[r * kKeys + k]) * value;
    }
    for (int r = 0; r < rows; r++) store(sums + r * size + i, totals[r]);
  }
}

template <class Function>
inline void for_tiles(int64_t rows, Function function) {
  int64_t row = 0;
  for (; row + kTile <= rows; row += kTile) function.template operator()<kTile>(row);
  for (; row + 2 <= rows; row += 2) function.template operator()<2>(row);
  for (; row < rows; row++) function.template operator()<1>(row);
}

inline void finish(const Head& head, int64_t row, RowSum total, const float* sums, int64_t size) {
  if (head.has_sinks()) {
    const float sink = head.sink(row), now = std::max(sink, total.largest);
    const float factor = std::exp(total.largest - now);
    total = {now, total.total * factor + std::exp(sink - now)};
    for (int64_t i = 0; i < size; i++) head.out(row)[i] = sums[i] * factor / total.total;
    return;
  }
  const float inverse = 1.0f / total.total;
  for (int64_t i = 0; i < size; i++) head.out(row)[i] = sums[i] * inverse;
}

void attend_few(const Attention& a, const Head& head) {
  auto& memory = workspace();
  const int64_t rows = head.rows();
  memory.scores.resize(rows * kKeys);
  memory.sums.assign(rows * a.value_size, 0.0f);
  std::vector<RowSum> totals(rows, RowSum{-FLT_MAX, 0.0f});
  for (int64_t begin = 0; begin < a.length; begin += kKeys) {
    const int64_t count = std::min(kKeys, a.length - begin);
    for (int64_t k = 0; k < count; k++) {
      const float* key = head.key(begin + k);
      for (int64_t r = 0; r < rows; r++) memory.scores[r * kKeys + k] = dot(head.query(r), key, a.size) * a.scale;
    }
    for (int64_t r = 0; r < rows; r++) {
      float* scores = &memory.scores[r * kKeys];
      head.mask(r, begin, count, scores);
      const float factor = weigh(scores, count, totals[r]);
      if (factor != 1.0f) scale_by(&memory.sums[r * a.value_size], factor, a.value_size);
    }
    for (int64_t k = 0; k < count; k++) {
      const float* value = head.value(begin + k);
      for (int64_t r = 0; r < rows; r++) {
        add_scaled(&memory.sums[r * a.value_size], value, memory.scores[r * kKeys + k], a.value_size);
      }
    }
  }
  for (int64_t r = 0; r < rows; r++) finish(head, r, totals[r], &memory.sums[r * a.value_size], a.value_size);
}

// Writes keys [begin, begin + count) as columns, and their values as rows, with zeros up to whole vectors.
void pack(const Attention& a, const Head& head, int64_t begin, int64_t count, Workspace& memory) {
  const int64_t columns = padded(a.value_size), wide = (count + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
  for (int64_t k = 0; k < wide; k += kLanes) {
    for (int64_t i = 0; i < a.size; i++) {
      float* column = &memory.keys[i * kKeys + k];
      for (int64_t lane = 0; lane < kLanes; lane++) column[lane] = k + lane < count ? head.key(begin + k + lane)[i] : 0.0f;
    }
  }
  for (int64_t k = 0; k < count; k++) {
    float* row = &memory.values[k * columns];
    std::copy(head.value(begin + k), head.value(begin + k) + a.value_size, row);
    std::fill(row + a.value_size, row + columns, 0.0f);
  }
}

void attend_many(const Attention& a, const Head& head) {
  auto& memory = workspace();
  const int64_t columns = padded(a.value_size), rows = head.rows();
  memory.queries.resize(kRows * a.size);
  memory.keys.resize(a.size * kKeys);
  memory.values.resize(kKeys * columns);
  memory.scores.resize(kRows * kKeys);
  memory.sums.resize(kRows * columns);
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t count = std::min(kRows, rows - first);
    std::fill(memory.sums.begin(), memory.sums.end(), 0.0f);
    RowSum totals[kRows];
    float factors[kRows];
    int64_t seen = 0;
    for (int64_t r = 0; r < count; r++) {
      totals[r] = {-FLT_MAX, 0.0f};
      const float* query = head.query(first + r);
      for (int64_t i = 0; i < a.size; i++) memory.queries[r * a.size + i] = query[i] * a.scale;
      seen = std::max(seen, head.visible(first + r));
    }
    if (a.mask_kind == MaskKind::causal && seen == 0) seen = a.length;  // rows without any key: as MLX, all alike
    for (int64_t begin = 0; begin < seen; begin += kKeys) {
      const int64_t keys = std::min(kKeys, seen - begin);
      pack(a, head, begin, keys, memory);
      for_tiles(count, [&]<int tile>(int64_t row) {
        score_tile<tile>(&memory.queries[row * a.size], a.size, memory.keys.data(), keys, &memory.scores[row * kKeys]);
      });
      for (int64_t r = 0; r < count; r++) {
        head.mask(first + r, begin, keys, &memory.scores[r * kKeys]);
        factors[r] = weigh(&memory.scores[r * kKeys], keys, totals[r]);
      }
      for_tiles(count, [&]<int tile>(int64_t row) {
        sum_tile<tile>(&memory.scores[row * kKeys], &factors[row], memory.values.data(), keys, columns,
                       &memory.sums[row * columns]);
      });
    }
    for (int64_t r = 0; r < count; r++) finish(head, first + r, totals[r], &memory.sums[r * columns], a.value_size);
  }
}

void attend_heads(const Attention& a, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; index++) {
    const Head head(a, index);
    head.rows() <= kFewRows ? attend_few(a, head) : attend_many(a, head);
  }
}

constexpr LayerKernels layer_kernels() { return {rms_norm_rows, swiglu_values, attend_heads}; }

}  // namespace
}  // namespace mlx_cpu_kernels
