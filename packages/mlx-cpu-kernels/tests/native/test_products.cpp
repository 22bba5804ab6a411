// Compares the products of every instruction set with the scalar reference, over random shapes, bits, groups, strides,
// numbers of rows and types.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "random_matrix.h"

using namespace mlx_cpu_kernels;

namespace {

constexpr int kBits[] = {2, 3, 4, 5, 6, 8};
constexpr int kGroups[] = {32, 64, 128};

constexpr Mode kModes[] = {Mode::affine, Mode::affine, Mode::affine, Mode::mxfp4, Mode::nvfp4, Mode::mxfp8};

struct Case {
  Random random;
  Mode mode;
  int bits, group_size, threads;
  Type type, x_type;
  int64_t rows, n, k, word_gap, group_gap, x_gap, y_gap;

  explicit Case(uint64_t seed) : random(seed) {
    mode = kModes[pick(random, 0, 5)];
    bits = kBits[pick(random, 0, 5)];
    group_size = kGroups[pick(random, 0, 2)];
    type = kTypes[pick(random, 0, 2)];
    if (mode != Mode::affine) {
      auto fixed = fixed_format(mode);
      bits = fixed.bits;
      group_size = fixed.group_size;
      type = fixed.type;
    }
    x_type = kTypes[pick(random, 0, 2)];
    threads = pick(random, 0, 3) ? 1 : int(pick(random, 2, 3));
    rows = pick(random, 0, 4) ? pick(random, 1, 17) : pick(random, 18, 80);
    n = pick(random, 1, 200);
    k = std::max(group_size, 32) * pick(random, 1, 1100 / std::max(group_size, 32));
    word_gap = pick(random, 0, 1) * pick(random, 0, 5);
    group_gap = pick(random, 0, 1) * pick(random, 0, 5);
    x_gap = pick(random, 0, 1) * pick(random, 0, 9);
    y_gap = pick(random, 0, 1) * pick(random, 0, 9);
  }

  std::string text() const {
    char text[200];
    std::snprintf(text, sizeof text,
                  "mode %d, %d bits, groups of %d, scales %d, x %d, %ld rows, n %ld, k %ld, %d threads", int(mode),
                  bits, group_size, int(type), int(x_type), long(rows), long(n), long(k), threads);
    return text;
  }
};

int failures = 0;

void expect(bool holds, const Case& c, InstructionSet set, const char* what, double error) {
  if (holds) return;
  std::printf("%s, %s: %s is wrong by %g of the largest value\n", name(set), c.text().c_str(), what, error);
  failures++;
}

template <class Product>
void compare(const Case& c, const char* what, int64_t y_values, double tolerance, Product product) {
  Values expected(c.x_type, y_values);
  set_instruction_set(InstructionSet::scalar);
  Threads one(1), several(c.threads);
  product(expected.data(), one);
  for (InstructionSet set : kVectorSets) {
    if (!set_instruction_set(set)) continue;
    Values got(c.x_type, y_values);
    product(got.data(), several);
    double e = error(got, expected, y_values);
    expect(e <= tolerance, c, set, what, e);
  }
}

// The reference adds up in float64: this allows for the rounding of float32 over k terms.
constexpr double kProductTolerance = 4e-6;

void test_transposed(Case c) {
  RandomMatrix w(c.random, c.n, c.k, c.bits, c.group_size, c.type, c.word_gap, c.group_gap, 1, c.mode);
  int64_t x_stride = c.k + c.x_gap, y_stride = c.n + c.y_gap;
  Values x(c.random, c.x_type, c.rows * x_stride - c.x_gap);
  if (c.x_type != Type::float16) {  // whose numbers are neither as small nor as large
    constexpr float kSizes[] = {1, 1, 0x1p-110f, 0x1p-70f, 0x1p70f, 0x1p105f};
    const float size = kSizes[pick(c.random, 0, 5)];
    for (int64_t i = 0; i < c.rows * x_stride - c.x_gap; i++) store_value(x.data(), c.x_type, i, size * x.at(i));
  }
  compare(c, "multiply_transposed", c.rows * y_stride - c.y_gap, kProductTolerance, [&](void* y, Threads& threads) {
    multiply_transposed(x.data(), c.x_type, x_stride, c.rows, w.quantized, y, y_stride, threads);
  });
}

// Multiplies one x with several matrices at once: three of one format, and one of another.
void test_several(Case c) {
  std::vector<RandomMatrix> matrices;
  int64_t columns = 0;
  for (int i = 0; i < 4; i++) {
    int64_t rows = pick(c.random, 1, 150);
    if (i < 3)
      matrices.emplace_back(c.random, rows, c.k, c.bits, c.group_size, c.type, c.word_gap, c.group_gap, 1, c.mode);
    else
      matrices.emplace_back(c.random, rows, c.k, 8, 32, Type::float16, c.word_gap, c.group_gap);
    columns += rows;
  }
  Values x(c.random, c.x_type, c.rows * c.k);
  compare(c, "several products", c.rows * columns, kProductTolerance, [&](void* y, Threads& threads) {
    std::vector<Product> products;
    int64_t first = 0;
    for (auto& matrix : matrices) {
      products.push_back({matrix.quantized, at(y, c.x_type, first), columns});
      first += matrix.quantized.rows;
    }
    multiply_transposed(x.data(), c.x_type, c.k, c.rows, products.data(), int(products.size()), threads);
  });
}

void test_straight(Case c) {
  std::swap(c.n, c.k);
  RandomMatrix w(c.random, c.k, c.n, c.bits, c.group_size, c.type, c.word_gap, c.group_gap, 1, c.mode);
  int64_t x_stride = c.k + c.x_gap, y_stride = c.n + c.y_gap;
  Values x(c.random, c.x_type, c.rows * x_stride - c.x_gap);
  compare(c, "multiply", c.rows * y_stride - c.y_gap, kProductTolerance, [&](void* y, Threads& threads) {
    multiply(x.data(), c.x_type, x_stride, c.rows, w.quantized, y, y_stride, threads);
  });
}

void test_gather(Case c, bool transposed) {
  if (!transposed) std::swap(c.n, c.k);
  constexpr int64_t kExperts = 5;
  RandomMatrix w(c.random, transposed ? c.n : c.k, transposed ? c.k : c.n, c.bits, c.group_size, c.type, 0, 0, kExperts,
                 c.mode);
  Values x(c.random, c.x_type, c.rows * c.k);
  std::vector<GatherPair> pairs;
  for (int64_t i = 0; i < 2 * c.rows; i++)
    pairs.push_back({pick(c.random, 0, c.rows - 1), pick(c.random, 0, kExperts - 1), 2 * c.rows - 1 - i});
  Experts experts{w.quantized, w.quantized.rows * w.quantized.row_words, w.quantized.rows * w.quantized.row_groups};
  auto product = transposed ? gather_multiply_transposed : gather_multiply;
  compare(c, "a gathered product", 2 * c.rows * c.n, kProductTolerance, [&](void* y, Threads& threads) {
    product(x.data(), c.x_type, c.k, pairs.data(), int64_t(pairs.size()), experts, y, c.n, threads);
  });
}

void test_dequantize(Case c) {
  RandomMatrix w(c.random, c.n, c.k, c.bits, c.group_size, c.type, c.word_gap, c.group_gap, 1, c.mode);
  int64_t begin = pick(c.random, 0, c.n - 1), end = pick(c.random, begin, c.n);
  // One rounding instead of two: the fused multiplication and addition differs from the reference's.
  compare(c, "dequantize", (end - begin) * c.k, 2e-7,
          [&](void* out, Threads& threads) { dequantize(w.quantized, begin, end, out, c.x_type, threads); });
}

// Checks that NaN in a row of x makes all of its products NaN, and none of another row's.
void test_not_finite(Case c) {
  RandomMatrix w(c.random, c.n, c.k, c.bits, c.group_size, c.type, 0, 0, 1, c.mode);
  Values x(c.random, c.x_type, c.rows * c.k);
  store_value(x.data(), c.x_type, pick(c.random, 0, c.k - 1), NAN);
  for (InstructionSet set : kVectorSets) {
    if (!set_instruction_set(set)) continue;
    Values y(c.x_type, c.rows * c.n);
    Threads one(1);
    multiply_transposed(x.data(), c.x_type, c.k, c.rows, w.quantized, y.data(), c.n, one);
    for (int64_t n = 0; n < c.n; n++) expect(std::isnan(y.at(n)), c, set, "a product of NaN", 0);
    for (int64_t i = c.n; i < c.rows * c.n; i++) expect(!std::isnan(y.at(i)), c, set, "a row beside one with NaN", 0);
  }
}

void test_halves() {
  for (uint32_t i = 0; i < 0x10000; i++) {
    float value = float_of_float16(uint16_t(i)), wide = float_of_bfloat16(uint16_t(i));
    bool same =
        std::isnan(value) ? std::isnan(float_of_float16(float16_of_float(value))) : float16_of_float(value) == i;
    bool wide_same =
        std::isnan(wide) ? std::isnan(float_of_bfloat16(bfloat16_of_float(wide))) : bfloat16_of_float(wide) == i;
    if (!same || !wide_same) {
      std::printf("16-bit value %x does not survive\n", i);
      failures++;
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  uint64_t cases = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 300;
  test_halves();
  for (uint64_t seed = 0; seed < cases && failures < 20; seed++) {
    test_transposed(Case(seed));
    test_straight(Case(seed + 1'000'000));
    if (seed % 2) test_several(Case(seed + 5'000'000));
    test_gather(Case(seed + 2'000'000), seed % 2);
    test_dequantize(Case(seed + 3'000'000));
    if (seed % 8 == 0) test_not_finite(Case(seed + 4'000'000));
  }
  std::printf("%llu cases, %d failures\n", static_cast<unsigned long long>(cases), failures);
  return failures ? 1 : 0;
}
