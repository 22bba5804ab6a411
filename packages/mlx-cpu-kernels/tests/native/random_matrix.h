// Random quantized matrices and rows, for the tests and the bench.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "half.h"

namespace mlx_cpu_kernels {

using Random = std::mt19937_64;

inline int64_t pick(Random& random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random);
}

// Values of any type in memory that ends with them, so that a sanitizer sees what reads beyond.
struct Values {
  Type type;
  std::vector<char> bytes;

  Values(Type type, int64_t count) : type(type), bytes(count * size_of(type)) {}

  Values(Random& random, Type type, int64_t count, float scale = 1) : Values(type, count) {
    if (is_byte(type)) {  // scales: powers of two around 2^-6, or any sign and size below 1.5
      for (auto& byte : bytes)
        byte = char(type == Type::e8m0 ? pick(random, 118, 124) : pick(random, 0, 60) + 128 * pick(random, 0, 1));
      return;
    }
    std::normal_distribution<float> normal(0, scale);
    for (int64_t i = 0; i < count; i++) store_value(bytes.data(), type, i, normal(random));
  }

  float at(int64_t i) const { return load_value(bytes.data(), type, i); }
  void* data() { return bytes.data(); }
};

// Bits, group and type of scales of a mode that has no choice.
struct FixedFormat {
  int bits, group_size;
  Type type;
};
inline FixedFormat fixed_format(Mode mode) {
  if (mode == Mode::nvfp4) return {4, 16, Type::e4m3};
  return {mode == Mode::mxfp8 ? 8 : 4, 32, Type::e8m0};
}

struct RandomMatrix {
  std::vector<uint32_t> words;
  Values scales, biases;
  Quantized quantized;

  // `word_gap` and `group_gap` lie between rows; `count` matrices follow one another. Bits, group and type are the
  // mode's.
  RandomMatrix(Random& random, int64_t rows, int64_t columns, int bits, int group_size, Type type, int64_t word_gap = 0,
               int64_t group_gap = 0, int64_t count = 1, Mode mode = Mode::affine)
      : words(count * rows * (columns * bits / 32 + word_gap) - word_gap),
        scales(random, type, count * rows * (columns / group_size + group_gap) - group_gap, 0.02f),
        biases(random, mode == Mode::affine ? type : Type::float32,
               mode == Mode::affine ? count * rows * (columns / group_size + group_gap) - group_gap : 0, 0.1f) {
    for (auto& word : words) word = uint32_t(random());
    if (mode == Mode::mxfp8)  // the largest number of a byte is none
      for (auto& word : words) word &= ~0x01010101u;
    quantized = {words.data(),
                 scales.data(),
                 mode == Mode::affine ? biases.data() : nullptr,
                 type,
                 bits,
                 group_size,
                 rows,
                 columns,
                 columns * bits / 32 + word_gap,
                 columns / group_size + group_gap,
                 mode};
  }
};

constexpr Type kTypes[] = {Type::float32, Type::float16, Type::bfloat16};
constexpr InstructionSet kVectorSets[] = {InstructionSet::avx2, InstructionSet::avx512, InstructionSet::amx,
                                          InstructionSet::neon};

inline double unit_in_last_place(Type type, double value) {
  int exponent;
  std::frexp(value, &exponent);
  return std::ldexp(1.0, exponent - (type == Type::float16 ? 11 : 8));
}

// The largest difference over the largest value, beyond what the rounding to a type of 16 bits allows.
inline double error(const Values& got, const Values& expected, int64_t count) {
  double largest = 0, worst = 0;
  for (int64_t i = 0; i < count; i++) largest = std::fmax(largest, std::fabs(expected.at(i)));
  for (int64_t i = 0; i < count; i++) {
    double difference = std::fabs(double(got.at(i)) - expected.at(i));
    if (std::isnan(got.at(i)) != std::isnan(expected.at(i))) return INFINITY;
    if (expected.type != Type::float32) difference -= unit_in_last_place(expected.type, expected.at(i));
    worst = std::fmax(worst, difference / largest);
  }
  return worst;
}

}  // namespace mlx_cpu_kernels
