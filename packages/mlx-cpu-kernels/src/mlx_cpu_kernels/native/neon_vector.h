// The vector operations that the kernels are written in, by NEON as every aarch64 has it. avx512_vector.h describes
// them.
#pragma once

#include <arm_neon.h>

#include "half.h"

namespace mlx_cpu_kernels {
namespace {

struct Neon {
  using Float = float32x4_t;
  using Int = int32x4_t;
  static constexpr int kLanes = 4;
  // 6 rows times 4 vectors take 24 of the 32 registers for sums.
  static constexpr int kTileRows = 6;
  static constexpr int kPanelVectors = 4;

  static Float zero() { return vdupq_n_f32(0); }
  static Float broadcast(float value) { return vdupq_n_f32(value); }
  static Float load(const float* from) { return vld1q_f32(from); }
  static void store(float* to, Float value) { vst1q_f32(to, value); }
  static Float add(Float a, Float b) { return vaddq_f32(a, b); }
  static Float multiply(Float a, Float b) { return vmulq_f32(a, b); }
  static Float multiply_add(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static Float divide(Float a, Float b) { return vdivq_f32(a, b); }
  static Float minimum(Float a, Float b) { return vminq_f32(a, b); }
  static Float maximum(Float a, Float b) { return vmaxq_f32(a, b); }
  static Float absolute(Float a) { return vabsq_f32(a); }
  static Float round(Float a) { return vrndnq_f32(a); }
  // n is a whole number from -126 to 127.
  static Float multiply_by_power_of_two(Float a, Float n) {
    Int exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
  }
  static Float zero_where_below(Float a, Float x, Float limit) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(x, limit)));
  }
  static float sum(Float a) { return vaddvq_f32(a); }
  static void store_sums(float* to, Float a, Float b, Float c, Float d) {
    vst1q_f32(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
  }
  static float largest(Float a) { return vmaxnmvq_f32(a); }

  static Int load_words(const void* from) { return vld1q_s32(static_cast<const int32_t*>(from)); }
  static void store_words(void* to, Int value) { vst1q_s32(static_cast<int32_t*>(to), value); }
  static Int zero_words() { return vdupq_n_s32(0); }
  static Int add_words(Int a, Int b) { return vaddq_s32(a, b); }
  static Int subtract_words(Int a, Int b) { return vsubq_s32(a, b); }
  static Int and_words(Int a, Int b) { return vandq_s32(a, b); }
  static Int or_words(Int a, Int b) { return vorrq_s32(a, b); }
  static Int broadcast_word(uint32_t value) { return vdupq_n_s32(int32_t(value)); }
  template <int n>
  static Int shift_left(Int a) {
    return vshlq_n_s32(a, n);
  }
  template <int n>
  static Int shift_right_signed(Int a) {
    return vshrq_n_s32(a, n);
  }
  static Int load_some_words(const void* from, int64_t count) {
    int32_t words[kLanes] = {};
    std::memcpy(words, from, count < kLanes ? count * sizeof *words : sizeof words);
    return vld1q_s32(words);
  }
  static Int load_bytes(const void* from) { return load_some_bytes(from, kLanes); }
  static Int load_some_bytes(const void* from, int64_t count) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, from, count);
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes)))));
  }

  static Float load_values(const void* from, Type type, int64_t i) {
    if (type == Type::float32) return vld1q_f32(static_cast<const float*>(from) + i);
    return widen(vld1_u16(static_cast<const uint16_t*>(from) + i), type);
  }
  static Float load_some_values(const void* from, Type type, int64_t i, int64_t count) {
    float values[kLanes] = {};
    for (int64_t lane = 0; lane < count; lane++) values[lane] = load_value(from, type, i + lane);
    return vld1q_f32(values);
  }
  static void store_values(void* to, Type type, int64_t i, Float value) {
    if (type == Type::float32) return vst1q_f32(static_cast<float*>(to) + i, value);
    vst1_u16(static_cast<uint16_t*>(to) + i, narrow(value, type));
  }
  static void store_some_values(void* to, Type type, int64_t i, Float value, int64_t count) {
    float values[kLanes];
    vst1q_f32(values, value);
    for (int64_t lane = 0; lane < count; lane++) store_value(to, type, i + lane, values[lane]);
  }

  static Int round_to_words(Float a) { return vcvtnq_s32_f32(a); }
  static Float float_of_words(Int a) { return vcvtq_f32_s32(a); }
  static Int words_of_float(Float a) { return vreinterpretq_s32_f32(a); }
  static Float float_of_bits(Int a) { return vreinterpretq_f32_s32(a); }
  static void store_low_bytes(int8_t* to, Int a) {
    int16x4_t halves = vmovn_s32(a);
    int8x8_t bytes = vmovn_s16(vcombine_s16(halves, halves));
    uint32_t word = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
    std::memcpy(to, &word, sizeof word);
  }

  template <int bits, int shift>
  static Int field(Int words, Int next) {
    uint32x4_t moved = vreinterpretq_u32_s32(words);
    if constexpr (shift > 0) moved = vshrq_n_u32(moved, shift);
    if constexpr (shift + bits > 32) moved = vorrq_u32(moved, vshlq_n_u32(vreinterpretq_u32_s32(next), 32 - shift));
    return vreinterpretq_s32_u32(moved);
  }

  template <int bits>
  static Float value_of_low_bits(Int words) {
    return vcvtq_f32_s32(vandq_s32(words, vdupq_n_s32((1 << bits) - 1)));
  }

  // In place as float32, the exponent is 126 too small; the multiplication corrects it, for 0.5 too.
  static Float e2m1_of_low_bits(Int words) {
    Int magnitude = vshlq_n_s32(vandq_s32(words, vdupq_n_s32(7)), 22);
    Int sign = vshlq_n_s32(vandq_s32(words, vdupq_n_s32(8)), 28);
    Int value = vreinterpretq_s32_f32(vmulq_n_f32(vreinterpretq_f32_s32(magnitude), 0x1p126f));
    return vreinterpretq_f32_s32(vorrq_s32(value, sign));
  }

  // Each lane fetches the four bytes from its first one on, and shifts them by less than a byte: a value spans at most
  // two.
  template <int bits, class F>
  static void unpack_in_order(const uint32_t* from, F&& f) {
    static constexpr Fetch<bits> fetch;
    uint8_t bytes[32] = {};
    std::memcpy(bytes, from, bits * 4);
    const uint8x16x2_t table = {vld1q_u8(bytes), vld1q_u8(bytes + 16)};
    for (int i = 0; i < 8; i++) {
      uint32x4_t fetched = vreinterpretq_u32_u8(vqtbl2q_u8(table, vld1q_u8(fetch.index[i])));
      f(i, vreinterpretq_s32_u32(vshlq_u32(fetched, vld1q_s32(fetch.shift[i]))));
    }
  }

  // ---- bytes ----------------------------------------------------------------------------------------------------
  static constexpr int64_t most_byte_rows(Mode, int bits) { return bits == 2 || bits == 4 ? 4 : bits == 8 ? 3 : 2; }
  // The products are of signed bytes, which 8 bits without a sign are not; 3, 5 and 6 bits take too long to unpack.
  static constexpr bool has_wide_digits(int bits) { return bits != 2 && bits != 4; }

  static constexpr bool kSumsPairs = false;  // see avx2_vector.h
  static Int multiply_add_bytes(Int sums, Int a, Int b) {
    int8x16_t weights = vreinterpretq_s8_s32(a), x = vreinterpretq_s8_s32(b);
    int16x8_t low = vmull_s8(vget_low_s8(weights), vget_low_s8(x)), high = vmull_high_s8(weights, x);
    return vpadalq_s16(sums, vpaddq_s16(low, high));
  }

  template <int bits, class Vectors>
  static void unpack_bytes(Int words, Vectors& out) {
    const uint8x16_t mask = vdupq_n_u8((1 << bits) - 1), bytes = vreinterpretq_u8_s32(words);
    out[0] = vreinterpretq_s32_u8(vandq_u8(bytes, mask));
    out[1] = vreinterpretq_s32_u8(vandq_u8(vshrq_n_u8(bytes, bits), mask));
    if constexpr (bits == 2) {
      out[2] = vreinterpretq_s32_u8(vandq_u8(vshrq_n_u8(bytes, 4), mask));
      out[3] = vreinterpretq_s32_u8(vshrq_n_u8(bytes, 6));
    }
  }

  static constexpr int kE2m1Offset = 0;  // weights have a sign

  template <class Vectors>
  static void unpack_e2m1(Int words, Vectors& out) {
    static constexpr int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int8x16_t values = vld1q_s8(kTwice);
    unpack_bytes<4>(words, out);
    out[0] = vreinterpretq_s32_s8(vqtbl1q_s8(values, vreinterpretq_u8_s32(out[0])));
    out[1] = vreinterpretq_s32_s8(vqtbl1q_s8(values, vreinterpretq_u8_s32(out[1])));
  }

  // ---- 16 bits: see avx2_vector.h -------------------------------------------------------------------------------
  static void store_low_halves(int16_t* to, Int a) { vst1_s16(to, vmovn_s32(a)); }

  static Int multiply_add_halves(Int sums, Int a, Int b) {
    int16x8_t weights = vreinterpretq_s16_s32(a), x = vreinterpretq_s16_s32(b);
    sums = vmlal_s16(sums, vget_low_s16(weights), vget_low_s16(x));
    return vmlal_high_s16(sums, weights, x);
  }

  // Blocks are whole here: 16 or 32 columns. One of 5 bits is 20 bytes, two vectors of halves that overlap in memory.
  template <int bits, int values, int vectors>
  static void load_halves(const uint32_t* from, int64_t, Int (&out)[vectors]) {
    if constexpr (bits == 8) {
      out[0] = load_words(from);
    } else {
      static constexpr Pairs<bits, values> pairs;
      for (int v = 0; v < vectors; v++) {
        uint32x4_t words;
        if constexpr (bits == 5)
          words = vld1q_u32(from + v);
        else
          words = vcombine_u32(vld1_u32(from), vld1_dup_u32(from + 2));
        uint8x16_t halves = vqtbl1q_u8(vreinterpretq_u8_u32(words), vld1q_u8(pairs.index[v]));
        out[v] = vreinterpretq_s32_u16(vshlq_u16(vreinterpretq_u16_u8(halves), vld1q_s16(pairs.shift)));
      }
    }
  }
  template <int bits, int values, int i>
  static Int value_of_halves(Int halves) {
    uint16x8_t moved = vreinterpretq_u16_s32(halves);
    if constexpr ((values - i) * bits < 16) moved = vshrq_n_u16(moved, 16 - (values - i) * bits);
    if constexpr (i < values - 1) moved = vandq_u16(moved, vdupq_n_u16((1 << bits) - 1));
    return vreinterpretq_s32_u16(moved);
  }

  template <int count>
  static Float choose(const float* from, Int index) {
    static_assert(count <= 2);
    if constexpr (count == 1) return vdupq_n_f32(from[0]);
    return vbslq_f32(vceqzq_s32(index), vdupq_n_f32(from[0]), vdupq_n_f32(from[1]));
  }

  // ---- transposition --------------------------------------------------------------------------------------------
  static void transpose(Int (&v)[4]) {
    Int a = vtrn1q_s32(v[0], v[1]), b = vtrn2q_s32(v[0], v[1]);
    Int c = vtrn1q_s32(v[2], v[3]), d = vtrn2q_s32(v[2], v[3]);
    v[0] = join_low(a, c);
    v[1] = join_low(b, d);
    v[2] = join_high(a, c);
    v[3] = join_high(b, d);
  }

 private:
  template <int bits>
  struct Fetch {
    uint8_t index[8][16] = {};
    int32_t shift[8][4] = {};

    constexpr Fetch() {
      for (int i = 0; i < 32; i++) {
        for (int byte = 0; byte < 4; byte++) index[i / 4][i % 4 * 4 + byte] = uint8_t(i * bits / 8 + byte);
        shift[i / 4][i % 4] = -(i * bits % 8);
      }
    }
  };

  // Where the halves of a vector come from: two bytes each, and how far their values are moved up to the end.
  template <int bits, int values>
  struct Pairs {
    uint8_t index[2][16] = {};
    int16_t shift[8] = {};

    constexpr Pairs() {
      for (int i = 0; i < 16; i++) {
        int bit = i * values * bits - (i < 8 ? 0 : 32);  // the second vector of 5 bits begins a word later
        for (int byte = 0; byte < 2; byte++) index[i / 8][i % 8 * 2 + byte] = uint8_t(bit / 8 + byte);
        shift[i % 8] = int16_t(16 - values * bits - bit % 8);
      }
    }
  };

  static Int join_low(Int a, Int b) { return vcombine_s32(vget_low_s32(a), vget_low_s32(b)); }
  static Int join_high(Int a, Int b) { return vcombine_s32(vget_high_s32(a), vget_high_s32(b)); }

  static Float widen(uint16x4_t halves, Type type) {
    if (type == Type::float16) return vcvt_f32_f16(vreinterpret_f16_u16(halves));
    return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
  }

  static uint16x4_t narrow(Float value, Type type) {
    if (type == Type::float16) return vreinterpret_u16_f16(vcvt_f16_f32(value));
    uint32x4_t bits = vreinterpretq_u32_f32(value);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint32x4_t number = vceqq_f32(value, value);  // a NaN stays one
    return vshrn_n_u32(vbslq_u32(number, rounded, vorrq_u32(bits, vdupq_n_u32(0x400000))), 16);
  }
};

}  // namespace
}  // namespace mlx_cpu_kernels
