// The vector operations that the kernels are written in, by AVX-512 (F, BW, DQ, VL) with VNNI and VBMI.
#pragma once

#include <immintrin.h>

#include "half.h"

namespace mlx_cpu_kernels {
namespace {

struct Avx512 {
  using Float = __m512;
  using Int = __m512i;
  static constexpr int kLanes = 16;
  // A tile of the product of panels has 12 rows of x and 2 vectors of columns. It takes 24 of the 32 registers for
  // sums, 2 for the panel's vectors and one for the value of x.
  static constexpr int kTileRows = 12;
  static constexpr int kPanelVectors = 2;

  static Float zero() { return _mm512_setzero_ps(); }
  static Float broadcast(float value) { return _mm512_set1_ps(value); }
  static Float load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Float value) { _mm512_storeu_ps(to, value); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float multiply(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float multiply_add(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float divide(Float a, Float b) { return _mm512_div_ps(a, b); }
  static Float minimum(Float a, Float b) { return _mm512_min_ps(a, b); }
  static Float round(Float a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Float multiply_by_power_of_two(Float a, Float n) { return _mm512_scalef_ps(a, n); }
  static Float maximum(Float a, Float b) { return _mm512_max_ps(a, b); }
  static Float absolute(Float a) { return _mm512_abs_ps(a); }
  static float sum(Float a) { return _mm512_reduce_add_ps(a); }
  // a, but zero in the lanes in which x is below `limit`.
  static Float zero_where_below(Float a, Float x, Float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), a);
  }
  // The sums of the lanes of four vectors, as four neighbouring values.
  static void store_sums(float* to, Float a, Float b, Float c, Float d) {
    Float ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    Float cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    Float abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
  static float largest(Float a) { return _mm512_reduce_max_ps(a); }

  static Int load_words(const void* from) { return _mm512_loadu_si512(from); }
  static void store_words(void* to, Int value) { _mm512_storeu_si512(to, value); }
  static Int zero_words() { return _mm512_setzero_si512(); }
  static Int add_words(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static Int subtract_words(Int a, Int b) { return _mm512_sub_epi32(a, b); }
  static Int and_words(Int a, Int b) { return _mm512_and_si512(a, b); }
  static Int or_words(Int a, Int b) { return _mm512_or_si512(a, b); }
  static Int broadcast_word(uint32_t value) { return _mm512_set1_epi32(int(value)); }
  template <int n>
  static Int shift_left(Int a) {
    return _mm512_slli_epi32(a, n);
  }
  template <int n>
  static Int shift_right_signed(Int a) {
    return _mm512_srai_epi32(a, n);
  }

  // The first `count` < kLanes words, then zeros; reads nothing beyond them.
  static Int load_some_words(const void* from, int64_t count) { return _mm512_maskz_loadu_epi32(first(count), from); }

  // kLanes bytes, each as a word; and the first `count` < kLanes of them, then zeros.
  static Int load_bytes(const void* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
  static Int load_some_bytes(const void* from, int64_t count) {
    return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first(count), from));
  }

  // Values [i, i + kLanes) of an array of any type, as float32.
  static Float load_values(const void* from, Type type, int64_t i) {
    if (type == Type::float32) return _mm512_loadu_ps(static_cast<const float*>(from) + i);
    __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(from) + i));
    return widen(halves, type);
  }
  // The first `count` < kLanes of them, then zeros; reads nothing beyond them.
  static Float load_some_values(const void* from, Type type, int64_t i, int64_t count) {
    __mmask16 mask = first(count);
    if (type == Type::float32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(from) + i);
    return widen(_mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(from) + i), type);
  }
  static void store_values(void* to, Type type, int64_t i, Float value) { store_masked(to, type, i, value, 0xffff); }
  static void store_some_values(void* to, Type type, int64_t i, Float value, int64_t count) {
    store_masked(to, type, i, value, first(count));
  }

  static Int round_to_words(Float a) { return _mm512_cvtps_epi32(a); }
  static Float float_of_words(Int a) { return _mm512_cvtepi32_ps(a); }
  static void store_low_bytes(int8_t* to, Int a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(a));
  }

  // Each lane, moved down so that the `bits` bits from bit `shift` on are its lowest. Those beyond bit 31 come from
  // `next`.
  template <int bits, int shift>
  static Int field(Int words, Int next) {
    Int moved = words;
    if constexpr (shift + bits > 32) {
      moved = _mm512_or_si512(_mm512_srli_epi32(words, shift), _mm512_slli_epi32(next, 32 - shift));
    } else if constexpr (shift > 0) {
      moved = _mm512_srli_epi32(words, shift);
    }
    return moved;
  }

  // The integer in the lowest bits of each lane. Up to 5 bits it is looked up: the permutation itself ignores the bits
  // above, and needs no conversion.
  template <int bits>
  static Float value_of_low_bits(Int words) {
    if constexpr (bits <= 4) {
      constexpr int m = (1 << bits) - 1;
      const Float values = _mm512_setr_ps(0, 1, 2 & m, 3 & m, 4 & m, 5 & m, 6 & m, 7 & m, 8 & m, 9 & m, 10 & m, 11 & m,
                                          12 & m, 13 & m, 14 & m, 15 & m);
      return _mm512_permutexvar_ps(words, values);
    } else if constexpr (bits == 5) {
      const Float low = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const Float high = _mm512_setr_ps(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
      return _mm512_permutex2var_ps(low, words, high);
    } else {
      return _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32((1 << bits) - 1)));
    }
  }

  // The e2m1 in the lowest four bits of each lane.
  static Float e2m1_of_low_bits(Int words) {
    const Float values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return _mm512_permutexvar_ps(words, values);
  }

  // Calls f(i, vector) for the two vectors of 32 values that begin at a whole word, in their order and in the lowest
  // bits. Each lane fetches its word, and the next where values cross words, and shifts it as far as it needs.
  template <int bits, class F>
  static void unpack_in_order(const uint32_t* from, F&& f) {
    const Int lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    Int words = load_some_words(from, bits);
    for (int i = 0; i < 2; i++) {
      Int bit = _mm512_mullo_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(i * kLanes)), _mm512_set1_epi32(bits));
      Int index = _mm512_srli_epi32(bit, 5), shift = _mm512_and_si512(bit, _mm512_set1_epi32(31));
      Int moved = _mm512_srlv_epi32(_mm512_permutexvar_epi32(index, words), shift);
      if constexpr (32 % bits != 0) {
        Int next = _mm512_permutexvar_epi32(_mm512_add_epi32(index, _mm512_set1_epi32(1)), words);
        moved = _mm512_or_si512(moved, _mm512_sllv_epi32(next, _mm512_sub_epi32(_mm512_set1_epi32(32), shift)));
      }
      f(i, moved);
    }
  }

  // ---- bytes ----------------------------------------------------------------------------------------------------
  // Rows of x up to which products of bytes are faster. 8 bits need a second conversion for each product.
  static constexpr int64_t most_byte_rows(Mode, int bits) { return bits < 8 ? 24 : 12; }

  // Whether weights become 16 bits, and x two digits: see avx2_vector.h.
  static constexpr bool has_wide_digits(int) { return false; }

  // Adds to each lane the products of its four unsigned bytes of a and its four signed bytes of b.
  static constexpr bool kSumsPairs = false;  // see avx2_vector.h
  static Int multiply_add_bytes(Int sums, Int a, Int b) { return _mm512_dpbusd_epi32(sums, a, b); }

  // The weights of a block as bytes. Bits 2, 4, 8: vector i has value i of every byte. Bits 3, 5, 6: 64 values in order
  // from 8 * bits bytes: each 8 values are moved into a lane of 64 bits, and every byte takes its bits from there.
  template <int bits, class Vectors>
  static void unpack_bytes(Int words, Vectors& out) {
    if constexpr (bits == 8) {
      out[0] = words;
    } else if constexpr (bits == 4) {
      const Int mask = _mm512_set1_epi8(15);
      out[0] = _mm512_and_si512(words, mask);
      out[1] = _mm512_and_si512(_mm512_srli_epi32(words, 4), mask);
    } else if constexpr (bits == 2) {
      const Int mask = _mm512_set1_epi8(3);
      out[0] = _mm512_and_si512(words, mask);
      out[1] = _mm512_and_si512(_mm512_srli_epi32(words, 2), mask);
      out[2] = _mm512_and_si512(_mm512_srli_epi32(words, 4), mask);
      out[3] = _mm512_and_si512(_mm512_srli_epi32(words, 6), mask);
    } else {
      Int spread = _mm512_permutexvar_epi8(eight_values_a_lane(bits), words);
      Int moved = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(shifts_of_eight(bits)), spread);
      out[0] = _mm512_and_si512(moved, _mm512_set1_epi8((1 << bits) - 1));
    }
  }

  // e2m1 as bytes: twice the values are integers, and this is added to each, since weights have no sign here.
  static constexpr int kE2m1Offset = 12;

  // Vector i has value i of every byte. The permutation ignores the two highest bits of a byte, and its table repeats
  // itself for the two below.
  template <class Vectors>
  static void unpack_e2m1(Int words, Vectors& out) {
    const Int values = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    out[0] = _mm512_permutexvar_epi8(words, values);
    out[1] = _mm512_permutexvar_epi8(_mm512_srli_epi32(words, 4), values);
  }

  // Lane i takes value index[i] of the `count` <= 8 at `from`. Reads no more than needed: what was just stored by two
  // instructions cannot be forwarded to one load.
  template <int count>
  static Float choose(const float* from, Int index) {
    if constexpr (count <= 4) return _mm512_permutexvar_ps(index, _mm512_castps128_ps512(_mm_loadu_ps(from)));
    return _mm512_permutexvar_ps(index, _mm512_castps256_ps512(_mm256_loadu_ps(from)));
  }

  // ---- transposition --------------------------------------------------------------------------------------------
  // Makes vector i of 16 the i-th lanes of them all, in four rounds that exchange blocks of 1, 2, 4 and 8 lanes.
  static void transpose(Int (&v)[16]) {
    Int t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
      t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
      v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
  }
  static Int words_of_float(Float a) { return _mm512_castps_si512(a); }
  static Float float_of_bits(Int a) { return _mm512_castsi512_ps(a); }

 private:
  static __mmask16 first(int64_t count) { return __mmask16((1u << count) - 1); }

  static Float widen(__m256i halves, Type type) {
    if (type == Type::float16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }

  static void store_masked(void* to, Type type, int64_t i, Float value, __mmask16 mask) {
    if (type == Type::float32) {
      _mm512_mask_storeu_ps(static_cast<float*>(to) + i, mask, value);
    } else {
      __m256i halves = type == Type::float16 ? _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
                                             : narrow_to_bfloat16(value);
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(to) + i, mask, halves);
    }
  }

  static __m256i narrow_to_bfloat16(Float value) {  // to the nearest, ties to even; a NaN stays one
    Int bits = _mm512_castps_si512(value);
    Int odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    Int rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }

  static Int eight_values_a_lane(int bits) {  // byte b of the 64-bit lane i is byte i * bits + b of the stream
    const Int byte = _mm512_set1_epi64(0x0706050403020100);
    const Int lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    Int start = _mm512_mullo_epi64(lane, _mm512_set1_epi64(bits * 0x0101010101010101));
    return _mm512_add_epi8(byte, start);
  }

  static constexpr int64_t shifts_of_eight(int bits) {
    uint64_t shifts = 0;
    for (int i = 7; i >= 0; i--) shifts = shifts << 8 | uint64_t(i * bits);
    return int64_t(shifts);
  }
};

}  // namespace
}  // namespace mlx_cpu_kernels
