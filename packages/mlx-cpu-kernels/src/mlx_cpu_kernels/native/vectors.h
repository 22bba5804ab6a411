// Sixteen floats at a time by the compiler's own vectors: one register of AVX-512, two of AVX2, four of NEON or SSE.
#pragma once

#include <cstdint>

// Vectors are passed between functions of one file only, which are inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace mlx_cpu_kernels {
namespace {  // each instruction set's file has a copy of its own

constexpr int kLanes = 16;
typedef float Vector __attribute__((vector_size(64)));
typedef float UnalignedVector __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(64)));

inline Vector load(const float* values) { return *reinterpret_cast<const UnalignedVector*>(values); }
inline void store(float* values, Vector vector) { *reinterpret_cast<UnalignedVector*>(values) = vector; }
inline Vector all(float value) { return Vector{} + value; }

template <class Function>
inline float reduce(Vector vector, Function function) {
  float value = vector[0];
  for (int lane = 1; lane < kLanes; lane++) value = function(value, vector[lane]);
  return value;
}

inline float sum(Vector v) {
  typedef float Half __attribute__((vector_size(32)));
  typedef float Quarter __attribute__((vector_size(16)));
  Half half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  Quarter quarter = __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

inline float largest(Vector v) {
  return reduce(v, [](float a, float b) { return a > b ? a : b; });
}

// e^x within two units of the last place; 0 below -87.3, where float32 has only subnormal numbers left.
inline Vector exponential(Vector x) {
  const Vector low = all(-87.3f), high = all(88.7f);
  const Integers vanishes = x < low;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Vector shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vector count = x * all(1.44269504f) + shift - shift;
  // ln 2 in two parts, the first of few bits, so that its multiples are exact.
  Vector rest = x - count * all(0.693359375f);
  rest = rest + count * all(2.12194440e-4f);
  Vector power = all(1.9875691500e-4f);  // the polynomial of Cephes's expf
  power = power * rest + all(1.3981999507e-3f);
  power = power * rest + all(8.3334519073e-3f);
  power = power * rest + all(4.1665795894e-2f);
  power = power * rest + all(1.6666665459e-1f);
  power = power * rest + all(5.0000001201e-1f);
  power = power * rest * rest + rest + all(1.0f);
  const Integers exponent = (__builtin_convertvector(count, Integers) + 127) << 23;
  const Vector result = power * (Vector)exponent;  // the same bits
  return vanishes ? Vector{} : result;
}

}  // namespace
}  // namespace mlx_cpu_kernels
