// Compares normalization, activations, rotary embedding and attention of every instruction set with the scalar
// reference.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "fused.h"
#include "random_matrix.h"

using namespace mlx_cpu_kernels;

namespace {

int failures = 0;

// Runs `call` with the reference and with each set, and compares what it writes.
void compare(const std::string& text, Type type, int64_t values, int threads,
             const std::function<void(void*, Threads&)>& call, double tolerance = 4e-6) {
  Values expected(type, values);
  Threads one(1), several(threads);
  set_instruction_set(InstructionSet::scalar);
  call(expected.data(), one);
  for (InstructionSet set : kVectorSets) {
    if (!set_instruction_set(set)) continue;
    Values got(type, values);
    call(got.data(), several);
    double e = error(got, expected, values);
    if (e <= tolerance) continue;
    std::printf("%s, %s, type %d: wrong by %g of the largest value\n", name(set), text.c_str(), int(type), e);
    failures++;
  }
}

void test_rows(uint64_t seed) {
  Random random(seed);
  Type type = kTypes[pick(random, 0, 2)], weight_type = kTypes[pick(random, 0, 2)];
  int64_t rows = pick(random, 1, 40), columns = pick(random, 1, 1300), gap = pick(random, 0, 7);
  int64_t stride = columns + gap, size = rows * stride - gap;
  int threads = int(pick(random, 1, 3));
  Values x(random, type, size), other(random, type, size), weight(random, weight_type, columns),
      bias(random, weight_type, columns);
  const void* no_weight = nullptr;
  std::string text = std::to_string(rows) + " rows of " + std::to_string(columns);

  compare("RMS norm, " + text, type, size, threads, [&](void* y, Threads& pool) {
    rms_norm(
        {rows, columns, {x.data(), type, stride}, seed % 5 ? weight.data() : no_weight, weight_type, 1e-5f, y, stride},
        pool);
  });
  compare("sum and RMS norm, " + text, type, 2 * size, threads, [&](void* y, Threads& pool) {
    void* sums = static_cast<char*>(y) + size * size_of(type);
    rms_norm({rows,
              columns,
              {x.data(), type, stride},
              weight.data(),
              weight_type,
              1e-5f,
              y,
              stride,
              other.data(),
              stride,
              sums,
              stride},
             pool);
  });
  compare("layer norm, " + text, type, size, threads, [&](void* y, Threads& pool) {
    layer_norm({rows,
                columns,
                {x.data(), type, stride},
                weight.data(),
                seed % 3 ? bias.data() : no_weight,
                weight_type,
                1e-5f,
                y,
                stride},
               pool);
  });
  for (int64_t added_stride : {int64_t{0}, stride}) {
    compare("sum, " + text, type, size, threads, [&](void* y, Threads& pool) {
      std::memcpy(y, x.data(), size * size_of(type));
      add_rows({other.data(), type, added_stride}, rows, columns, y, stride, pool);
    });
  }
  for (Activation activation : {Activation::silu, Activation::gelu_tanh, Activation::gelu_sigmoid}) {
    compare("activation, " + text, type, size, threads, [&](void* y, Threads& pool) {
      gated_activation(activation, {x.data(), type, stride}, seed % 4 ? other.data() : no_weight, stride, rows, columns,
                       y, stride, pool);
    });
  }
}

// A tensor [batch, head, position, element] in the order of `seed`: heads before positions, or positions before heads.
struct HeadStrides {
  int64_t values[3], size;

  HeadStrides(Random& random, int64_t batches, int64_t heads, int64_t length, int64_t row) {
    row += pick(random, 0, 1) * pick(random, 0, 8);
    bool heads_first = pick(random, 0, 1);
    values[0] = heads * length * row;
    values[1] = heads_first ? length * row : row;
    values[2] = heads_first ? row : heads * row;
    size = batches * values[0];
  }

  Heads of(const void* data) const { return {data, {values[0], values[1], values[2]}}; }
  MutableHeads of(void* data, int) const { return {data, {values[0], values[1], values[2]}}; }
};

void test_rope(uint64_t seed) {
  Random random(seed);
  Type type = kTypes[pick(random, 0, 2)];
  int64_t batches = pick(random, 1, 3), heads = pick(random, 1, 5), length = pick(random, 1, 20);
  int64_t head_size = 2 * pick(random, 1, 80),
          dims = pick(random, 0, 1) ? head_size : 2 * pick(random, 1, head_size / 2);
  HeadStrides in(random, batches, heads, length, head_size), out(random, batches, heads, length, head_size);
  Values x(random, type, in.size);
  std::vector<float> frequencies(dims / 2);
  for (auto& frequency : frequencies) frequency = 1 + float(pick(random, 0, 1000));
  std::vector<int32_t> offsets(batches);
  for (auto& offset : offsets) offset = int32_t(pick(random, 0, 3000));
  bool traditional = pick(random, 0, 1), given = pick(random, 0, 1);
  int64_t offset_stride = pick(random, 0, 1);
  compare("rope of " + std::to_string(dims) + " of " + std::to_string(head_size), type, out.size,
          int(pick(random, 1, 3)), [&](void* y, Threads& pool) {
            rope({batches, heads, length, head_size, type, in.of(x.data()), out.of(y, 0), dims, traditional, 10000.f,
                  given ? frequencies.data() : nullptr, 0.5f, offsets.data(), offset_stride},
                 pool);
          });
}

void test_attention(uint64_t seed) {
  Random random(seed);
  Type type = kTypes[pick(random, 0, 2)], mask_type = pick(random, 0, 1) ? type : Type::float32;
  int64_t batches = pick(random, 1, 2), kv_heads = pick(random, 1, 3), heads = kv_heads * pick(random, 1, 4);
  bool decoding = pick(random, 0, 1), quantized = pick(random, 0, 2) == 0;
  int64_t queries = decoding ? pick(random, 1, 3) : pick(random, 4, 150), keys = queries + pick(random, 0, 600);
  int64_t head_size = quantized ? 32 * pick(random, 1, 4) : pick(random, 1, 256);
  int64_t value_size = quantized ? 32 * pick(random, 1, 4) : pick(random, 0, 1) ? head_size : pick(random, 1, 256);
  HeadStrides q_strides(random, batches, heads, queries, head_size),
      k_strides(random, batches, kv_heads, keys, head_size), v_strides(random, batches, kv_heads, keys, value_size),
      y_strides(random, batches, heads, queries, value_size);
  Values q(random, type, q_strides.size), k(random, type, k_strides.size), v(random, type, v_strides.size);
  int bits = pick(random, 0, 1) ? 4 : 8;
  RandomMatrix k_words(random, keys, head_size, bits, 32, type, 0, 0, batches * kv_heads);
  RandomMatrix v_words(random, keys, value_size, bits, 32, type, 0, 0, batches * kv_heads);
  Values mask(random, mask_type, batches * heads * queries * keys);
  std::vector<uint8_t> seen(batches * heads * queries * keys);
  for (auto& value : seen) value = pick(random, 0, 2) > 0;
  for (int64_t i = 0; i < keys; i++) seen[i] = 0;  // one query sees nothing
  std::vector<float> sinks(heads, 0.5f);

  Attention a{batches,
              heads,
              kv_heads,
              queries,
              keys,
              head_size,
              value_size,
              type,
              q_strides.of(q.data()),
              k_strides.of(k.data()),
              v_strides.of(v.data()),
              {},
              1 / std::sqrt(float(head_size))};
  a.mask = Attention::Mask(pick(random, 0, 3));
  bool boolean = a.mask == Attention::Mask::boolean;
  a.mask_values = boolean ? static_cast<const void*>(seen.data()) : mask.data();
  a.mask_type = mask_type;
  bool shared = pick(random, 0, 1);
  int64_t mask_strides[] = {shared ? 0 : heads * queries * keys, shared ? 0 : queries * keys, keys, 1};
  for (int i = 0; i < 4; i++) a.mask_strides[i] = mask_strides[i];
  if (pick(random, 0, 3) == 0) a.sinks = sinks.data();
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < batches; i++) lengths.push_back(pick(random, 1, keys));
  if (a.mask == Attention::Mask::none && pick(random, 0, 1)) a.lengths = lengths.data();
  if (quantized) {
    auto set = [&](RandomMatrix& words, Heads& strides, int64_t* group_strides, const Quantized** to) {
      const Quantized& one = words.quantized;
      strides = {nullptr, {kv_heads * keys * one.row_words, keys * one.row_words, one.row_words}};
      group_strides[0] = kv_heads * keys * one.row_groups;
      group_strides[1] = keys * one.row_groups;
      *to = &one;
    };
    set(k_words, a.k, a.k_group_strides, &a.k_quantized);
    set(v_words, a.v, a.v_group_strides, &a.v_quantized);
  }
  char text[200];
  std::snprintf(
      text, sizeof text,
      "attention %ld: batches %ld, heads %ld/%ld, queries %ld, keys %ld, sizes %ld %ld, mask %d, quantized %d",
      long(seed), long(batches), long(heads), long(kv_heads), long(queries), long(keys), long(head_size),
      long(value_size), int(a.mask), quantized);
  // Scores are rounded to float32 before they become exponents: with large ones the difference grows.
  compare(
      text, type, y_strides.size, int(pick(random, 1, 3)),
      [&](void* y, Threads& pool) {
        a.y = y_strides.of(y, 0);
        if (!attention(a, pool)) failures++;
      },
      quantized ? 3e-5 : 5e-6);
}

}  // namespace

int main(int count, char** arguments) {
  uint64_t cases = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 60;
  for (uint64_t seed = 0; seed < cases && failures < 20; seed++) {
    test_rows(seed);
    test_rope(seed);
    test_attention(seed);
  }
  std::printf("%llu cases, %d failures\n", static_cast<unsigned long long>(cases), failures);
  return failures ? 1 : 0;
}
