// The vector operations that the kernels are written in, by AVX2 with FMA and F16C. avx512_vector.h describes them.
#pragma once

#include <immintrin.h>

#include "half.h"

namespace mlx_cpu_kernels {
namespace {

struct Avx2 {
  using Float = __m256;
  using Int = __m256i;
  static constexpr int kLanes = 8;
  // 6 rows times 2 vectors take 12 of the 16 registers for sums.
  static constexpr int kTileRows = 6;
  static constexpr int kPanelVectors = 2;

  static Float zero() { return _mm256_setzero_ps(); }
  static Float broadcast(float value) { return _mm256_set1_ps(value); }
  static Float load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Float value) { _mm256_storeu_ps(to, value); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float multiply(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float multiply_add(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float divide(Float a, Float b) { return _mm256_div_ps(a, b); }
  static Float minimum(Float a, Float b) { return _mm256_min_ps(a, b); }
  static Float round(Float a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // n is a whole number from -126 to 127.
  static Float multiply_by_power_of_two(Float a, Float n) {
    Int exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  static Float maximum(Float a, Float b) { return _mm256_max_ps(a, b); }
  static Float absolute(Float a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), a); }
  static Float zero_where_below(Float a, Float x, Float limit) {
    return _mm256_and_ps(a, _mm256_cmp_ps(x, limit, _CMP_NLT_UQ));
  }
  static float sum(Float a) {
    float sums[4];
    store_sums(sums, a, a, a, a);
    return sums[0];
  }
  static void store_sums(float* to, Float a, Float b, Float c, Float d) {
    Float abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
  }
  static float largest(Float a) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  static Int load_words(const void* from) { return _mm256_loadu_si256(static_cast<const Int*>(from)); }
  static void store_words(void* to, Int value) { _mm256_storeu_si256(static_cast<Int*>(to), value); }
  static Int zero_words() { return _mm256_setzero_si256(); }
  static Int add_words(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static Int subtract_words(Int a, Int b) { return _mm256_sub_epi32(a, b); }
  static Int and_words(Int a, Int b) { return _mm256_and_si256(a, b); }
  static Int or_words(Int a, Int b) { return _mm256_or_si256(a, b); }
  static Int broadcast_word(uint32_t value) { return _mm256_set1_epi32(int(value)); }
  template <int n>
  static Int shift_left(Int a) {
    return _mm256_slli_epi32(a, n);
  }
  template <int n>
  static Int shift_right_signed(Int a) {
    return _mm256_srai_epi32(a, n);
  }
  static Int load_some_words(const void* from, int64_t count) {
    return _mm256_maskload_epi32(static_cast<const int*>(from), first(count));
  }
  static Int load_bytes(const void* from) { return load_some_bytes(from, kLanes); }
  static Int load_some_bytes(const void* from, int64_t count) {
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(first_bytes(from, count))));
  }

  static Float load_values(const void* from, Type type, int64_t i) {
    if (type == Type::float32) return _mm256_loadu_ps(static_cast<const float*>(from) + i);
    auto halves = static_cast<const uint16_t*>(from) + i;
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)), type);
  }
  static Float load_some_values(const void* from, Type type, int64_t i, int64_t count) {
    if (type == Type::float32) return _mm256_maskload_ps(static_cast<const float*>(from) + i, first(count));
    const char* halves = static_cast<const char*>(from) + 2 * i;
    if (count <= 4) return widen(_mm_cvtsi64_si128(int64_t(first_bytes(halves, 2 * count))), type);
    uint64_t last = first_bytes(halves + 2 * count - 8, 8) >> 16 * (8 - count);
    return widen(_mm_set_epi64x(int64_t(last), int64_t(first_bytes(halves, 8))), type);
  }
  static void store_values(void* to, Type type, int64_t i, Float value) {
    if (type == Type::float32) return _mm256_storeu_ps(static_cast<float*>(to) + i, value);
    auto halves = static_cast<uint16_t*>(to) + i;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(halves), narrow(value, type));
  }
  static void store_some_values(void* to, Type type, int64_t i, Float value, int64_t count) {
    if (type == Type::float32) return _mm256_maskstore_ps(static_cast<float*>(to) + i, first(count), value);
    alignas(16) uint16_t halves[kLanes];
    _mm_store_si128(reinterpret_cast<__m128i*>(halves), narrow(value, type));
    for (int64_t lane = 0; lane < count; lane++) static_cast<uint16_t*>(to)[i + lane] = halves[lane];
  }

  static Int round_to_words(Float a) { return _mm256_cvtps_epi32(a); }
  static Float float_of_words(Int a) { return _mm256_cvtepi32_ps(a); }
  static Int words_of_float(Float a) { return _mm256_castps_si256(a); }
  static Float float_of_bits(Int a) { return _mm256_castsi256_ps(a); }
  static void store_low_bytes(int8_t* to, Int a) {
    const Int low_bytes = _mm256_set1_epi32(0x0c080400);
    Int packed = _mm256_shuffle_epi8(a, low_bytes);
    uint32_t halves[2] = {uint32_t(_mm256_extract_epi32(packed, 0)), uint32_t(_mm256_extract_epi32(packed, 4))};
    std::memcpy(to, halves, sizeof halves);
  }

  template <int bits, int shift>
  static Int field(Int words, Int next) {
    Int moved = words;
    if constexpr (shift + bits > 32) {
      moved = _mm256_or_si256(_mm256_srli_epi32(words, shift), _mm256_slli_epi32(next, 32 - shift));
    } else if constexpr (shift > 0) {
      moved = _mm256_srli_epi32(words, shift);
    }
    return moved;
  }

  template <int bits>
  static Float value_of_low_bits(Int words) {
    if constexpr (bits <= 3) {  // looked up: the permutation ignores the bits above
      constexpr int m = (1 << bits) - 1;
      const Float values = _mm256_setr_ps(0, 1, 2 & m, 3 & m, 4 & m, 5 & m, 6 & m, 7 & m);
      return _mm256_permutevar8x32_ps(values, words);
    } else {
      return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32((1 << bits) - 1)));
    }
  }

  static Float e2m1_of_low_bits(Int words) {
    Float magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), words);
    Float sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(words, 28)), _mm256_set1_ps(-0.f));
    return _mm256_or_ps(magnitude, sign);
  }

  template <int bits, class F>
  static void unpack_in_order(const uint32_t* from, F&& f) {
    const Int lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    Int words = bits < kLanes ? load_some_words(from, bits) : load_words(from);
    for (int i = 0; i < 4; i++) {
      Int bit = _mm256_mullo_epi32(_mm256_add_epi32(lane, _mm256_set1_epi32(i * kLanes)), _mm256_set1_epi32(bits));
      Int index = _mm256_srli_epi32(bit, 5), shift = _mm256_and_si256(bit, _mm256_set1_epi32(31));
      Int moved = _mm256_srlv_epi32(_mm256_permutevar8x32_epi32(words, index), shift);
      if constexpr (32 % bits != 0) {
        Int next = _mm256_permutevar8x32_epi32(words, _mm256_add_epi32(index, _mm256_set1_epi32(1)));
        moved = _mm256_or_si256(moved, _mm256_sllv_epi32(next, _mm256_sub_epi32(_mm256_set1_epi32(32), shift)));
      }
      f(i, moved);
    }
  }

  // ---- bytes ----------------------------------------------------------------------------------------------------
  static constexpr int64_t most_byte_rows(Mode mode, int bits) {
    if (mode == Mode::affine && bits == 4) return 12;  // by spans
    return bits == 2 || bits == 4 ? 4 : bits == 8 ? 3 : 2;
  }
  // Two products of 8 bits do not fit into 16, and 3, 5 and 6 bits take too long to unpack into bytes.
  static constexpr bool has_wide_digits(int bits) { return bits != 2 && bits != 4; }

  // The sums of a block's pairs are less than 2^15: of four weights of 2 bits, or two of up to 24, and signed bytes.
  static constexpr bool kSumsPairs = true;
  static Int multiply_pairs(Int a, Int b) { return _mm256_maddubs_epi16(a, b); }
  static Int add_halves(Int a, Int b) { return _mm256_add_epi16(a, b); }
  // (high * 256 + middle) * 256 + low, of both pairs of a lane together.
  static Int join_planes(Int high, Int middle, Int low) {
    const Int one = _mm256_set1_epi16(1), above = _mm256_set1_epi16(256);
    Int upper = _mm256_add_epi32(_mm256_madd_epi16(high, above), _mm256_madd_epi16(middle, one));
    return _mm256_add_epi32(_mm256_slli_epi32(upper, 8), _mm256_madd_epi16(low, one));
  }

  template <int bits, class Vectors>
  static void unpack_bytes(Int words, Vectors& out) {
    const Int mask = _mm256_set1_epi8((1 << bits) - 1);
    out[0] = _mm256_and_si256(words, mask);
    out[1] = _mm256_and_si256(_mm256_srli_epi32(words, bits), mask);
    if constexpr (bits == 2) {
      out[2] = _mm256_and_si256(_mm256_srli_epi32(words, 4), mask);
      out[3] = _mm256_and_si256(_mm256_srli_epi32(words, 6), mask);
    }
  }

  // The same, of 24 bits each, as floats.
  static Float float_of_planes(Int high, Int middle, Int low) {
    const Int one = _mm256_set1_epi16(1), above = _mm256_set1_epi16(256);
    Int upper = _mm256_add_epi32(_mm256_madd_epi16(high, above), _mm256_madd_epi16(middle, one));
    Float lower = _mm256_cvtepi32_ps(_mm256_madd_epi16(low, one));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(upper), _mm256_set1_ps(256), lower);
  }

  // Ends the terms of three sums, which the compiler would add up in another order, out of registers.
  static void keep_order(Int& a, Int& b, Int& c) { asm("" : "+x"(a), "+x"(b), "+x"(c)); }

  // Both nibbles of each vector of a span: see span_product.h.
  template <int vectors>
  static void unpack_quarters(const uint32_t* from, Int (&out)[2 * vectors]) {
    Int words[vectors] = {load_words(from)};
    if constexpr (vectors > 1) {
      Int a = words[0], b = load_words(from + 8);
      words[0] = _mm256_unpacklo_epi64(a, b);
      words[1] = _mm256_unpackhi_epi64(a, b);
    }
    if constexpr (vectors == 4) {
      Int c = load_words(from + 16), d = load_words(from + 24);
      Int even = _mm256_unpacklo_epi64(c, d), odd = _mm256_unpackhi_epi64(c, d);
      words[2] = _mm256_permute2x128_si256(words[0], even, 0x31);
      words[3] = _mm256_permute2x128_si256(words[1], odd, 0x31);
      words[0] = _mm256_permute2x128_si256(words[0], even, 0x20);
      words[1] = _mm256_permute2x128_si256(words[1], odd, 0x20);
    }
    const Int mask = _mm256_set1_epi8(15);
    for (int v = 0; v < vectors; v++) {
      out[2 * v] = _mm256_and_si256(words[v], mask);
      out[2 * v + 1] = _mm256_and_si256(_mm256_srli_epi32(words[v], 4), mask);
    }
  }

  // 16 bytes: those with even numbers, and the others.
  static void store_apart(const int8_t* from, int8_t* even, int8_t* odd) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    __m128i apart = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), order);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(even), apart);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(odd), _mm_unpackhi_epi64(apart, apart));
  }

  // One, two or four values, each in the lanes whose order names it.
  template <int count>
  static Float spread(const float* from, Int order) {
    if constexpr (count == 1) return _mm256_broadcast_ss(from);
    if constexpr (count == 2) {
      double both;
      std::memcpy(&both, from, sizeof both);
      return _mm256_permutevar_ps(_mm256_castpd_ps(_mm256_set1_pd(both)), order);
    }
    if constexpr (count == 4) {
      return _mm256_permutevar_ps(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(from)), order);
    }
  }

  static constexpr int kE2m1Offset = 12;

  template <class Vectors>
  static void unpack_e2m1(Int words, Vectors& out) {
    const __m128i twice = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    const Int values = _mm256_broadcastsi128_si256(twice);
    unpack_bytes<4>(words, out);
    out[0] = _mm256_shuffle_epi8(values, out[0]);
    out[1] = _mm256_shuffle_epi8(values, out[1]);
  }

  // ---- 16 bits --------------------------------------------------------------------------------------------------
  static void store_low_halves(int16_t* to, Int a) {
    Int packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, a), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  }

  // Adds to each lane of 32 bits its two products of 16 bits.
  static Int multiply_add_halves(Int sums, Int a, Int b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }

  // The first `count` words of a block, so that each half of a lane ends with the `values` that it holds. With 3, 5 and
  // 6 bits it fetches the two bytes in which they are, and is shifted up.
  template <int bits, int values>
  static void load_halves(const uint32_t* from, int64_t count, Int (&out)[1]) {
    if constexpr (bits == 8) {
      out[0] = load_words(from);
    } else {
      static constexpr Fetch<bits, values> fetch;
      constexpr int second = fetch.kSecond;
      const Int order = _mm256_setr_epi32(0, 1, 2, 3, second, second + 1, second + 2, second + 3);
      Int words = _mm256_permutevar8x32_epi32(load_some_words(from, count), order);
      Int halves = _mm256_shuffle_epi8(words, _mm256_load_si256(reinterpret_cast<const Int*>(fetch.bytes)));
      out[0] = _mm256_mullo_epi16(halves, _mm256_load_si256(reinterpret_cast<const Int*>(fetch.factors)));
    }
  }
  // Value i of each half.
  template <int bits, int values, int i>
  static Int value_of_halves(Int halves) {
    Int moved = halves;
    if constexpr (values * bits - i * bits < 16) moved = _mm256_srli_epi16(halves, 16 - (values - i) * bits);
    if constexpr (i < values - 1) moved = _mm256_and_si256(moved, _mm256_set1_epi16((1 << bits) - 1));
    return moved;
  }

  template <int count>
  static Float choose(const float* from, Int index) {
    static_assert(count <= 4);
    if constexpr (count == 1) return _mm256_broadcast_ss(from);
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), index);
  }

  // ---- transposition --------------------------------------------------------------------------------------------
  static void transpose(Int (&v)[8]) {
    Int t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
      t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      v[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
      v[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
      v[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
      v[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      t[i] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x20);
      t[i + 4] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) v[i] = t[i];
  }

 private:
  // Where the halves of a vector come from: two bytes each, and 2^n that moves their values up to the end.
  template <int bits, int values>
  struct Fetch {
    static constexpr int kSecond = 8 * values * bits / 32;  // the word from which the second 128 bits are taken
    alignas(32) uint8_t bytes[32] = {};
    alignas(32) uint16_t factors[16] = {};

    constexpr Fetch() {
      for (int i = 0; i < 16; i++) {
        int bit = i * values * bits - (i < 8 ? 0 : 32 * kSecond);
        for (int byte = 0; byte < 2; byte++) bytes[2 * i + byte] = uint8_t(bit / 8 + byte);
        factors[i] = uint16_t(1 << (16 - values * bits - bit % 8));
      }
    }
  };

  // The first `count` bytes, then zeros, by loads that overlap. A copy byte by byte would be stored first, and a load
  // of the whole would wait for it.
  static uint64_t first_bytes(const void* from, int64_t count) {
    auto overlapping = [&]<class T>(T) {
      T begin, end;
      std::memcpy(&begin, from, sizeof(T));
      std::memcpy(&end, static_cast<const char*>(from) + count - sizeof(T), sizeof(T));
      return begin | uint64_t{end} << 8 * (count - int64_t(sizeof(T)));
    };
    if (count == 8) return overlapping(uint64_t{});
    if (count >= 4) return overlapping(uint32_t{});
    if (count >= 2) return overlapping(uint16_t{});
    return count ? *static_cast<const uint8_t*>(from) : 0;
  }

  static Int first(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  static Float widen(__m128i halves, Type type) {
    if (type == Type::float16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }

  static __m128i narrow(Float value, Type type) {
    if (type == Type::float16) return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Int bits = _mm256_castps_si256(value);
    Int odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    Int rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    Int nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
    Int high = _mm256_srli_epi32(rounded, 16);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08));
  }
};

}  // namespace
}  // namespace mlx_cpu_kernels
