// float16, bfloat16 and scales of a byte as single values: for the scalar reference, and for the few values that no
// vector covers.
#pragma once

#include <cstdint>
#include <cstring>

#include "quantized.h"

namespace mlx_cpu_kernels {

static inline bool is_byte(Type type) { return type == Type::e8m0 || type == Type::e4m3; }

static inline int64_t size_of(Type type) { return type == Type::float32 ? 4 : is_byte(type) ? 1 : 2; }

// Internal linkage gives each instruction set's file a copy of its own. So the linker cannot put one that was compiled
// for a later processor in place of another.
namespace {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of_bfloat16(uint16_t half) { return float_of_bits(uint32_t{half} << 16); }

inline uint16_t bfloat16_of_float(float value) {  // to the nearest, ties to even
  uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);  // a NaN stays one
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float float_of_float16(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff;
  if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  // Shifted into place, the exponent is 112 too small; the multiplication corrects it, for subnormal values too.
  float value = float_of_bits(magnitude << 13) * float_of_bits(0x77800000u);
  return float_of_bits(sign | bits_of_float(value));
}

inline uint16_t float16_of_float(float value) {  // to the nearest, ties to even
  uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00);  // from half a unit above the largest, infinity
  if (magnitude < 0x38800000u) {  // subnormal: the addition of 0.5 rounds at the last place that float16 has
    return uint16_t(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u));
  }
  return uint16_t(sign | (magnitude - 0x38000000u + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

inline float float_of_e8m0(uint8_t byte) { return float_of_bits(byte ? uint32_t{byte} << 23 : 0x00400000u); }

inline float float_of_e4m3(uint8_t byte) {
  uint32_t magnitude = byte & 0x7f, sign = uint32_t{byte} << 24 & 0x80000000u;
  if (magnitude == 0x7f) return float_of_bits(sign | 0x7fc00000u);
  // Shifted into place, the exponent is 120 too small; the multiplication corrects it, for subnormal values too.
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 20) * float_of_bits(0x7b800000u)));
}

inline float load_value(const void* values, Type type, int64_t i) {
  if (type == Type::float32) return static_cast<const float*>(values)[i];
  if (is_byte(type)) {
    uint8_t byte = static_cast<const uint8_t*>(values)[i];
    return type == Type::e8m0 ? float_of_e8m0(byte) : float_of_e4m3(byte);
  }
  uint16_t half = static_cast<const uint16_t*>(values)[i];
  return type == Type::float16 ? float_of_float16(half) : float_of_bfloat16(half);
}

inline void store_value(void* values, Type type, int64_t i, float value) {
  if (type == Type::float32)
    static_cast<float*>(values)[i] = value;
  else
    static_cast<uint16_t*>(values)[i] = type == Type::float16 ? float16_of_float(value) : bfloat16_of_float(value);
}

inline const void* at(const void* values, Type type, int64_t i) {
  return static_cast<const char*>(values) + i * size_of(type);
}

inline void* at(void* values, Type type, int64_t i) { return static_cast<char*>(values) + i * size_of(type); }

}  // namespace
}  // namespace mlx_cpu_kernels
