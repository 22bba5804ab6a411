// Values of x as integers of 24 bits with a scale for each group, and as their three signed digits of a byte.
//
// Within a group, x is an integer times a scale: as fine as float32 is for the group's largest value. The integer is
// (high * 256 + middle) * 256 + low. Each digit is multiplied by the weights as they are packed, without an error.
//
// A value that is far smaller than its group's largest one loses digits. That matters where the few large values meet
// weights of zero, and so leave no trace in float32. Rows with outliers are therefore not multiplied so.
#pragma once

#include "kernels.h"
#include "panels.h"

namespace mlx_cpu_kernels {
namespace {

// The largest integer whose digits fit: 127 * 65536 + 127 * 256 + 127, less what rounding may add. As two digits it is
// 2040 * 4096, so that four products with 6 bits are less than 2^31.
constexpr float kLargest = 8355000.f;
// Sizes of a row's largest number between which the digits' scales, their sums and inverses stay within float32.
constexpr float kTiny = 0x1p-60f, kHuge = 0x1p90f;
// A group without a larger number is zero: its inverse would not be finite, and the row has far larger numbers.
constexpr float kLeast = 0x1p-100f;
// Values below a 256th of the largest one are small. An error of 2^-24 of the largest is 2^-16 of such a value at
// least, and may exceed 1e-5 of a result.
constexpr float kSmall = 1 / 256.f;
// Values that are not small are outliers, where they are an eighth of all at most.
constexpr int64_t kOutlierShare = 8;

// Whether `count` magnitudes, the largest of which is `largest`, are small ones beside outliers. load(i) gives a
// vector of them.
template <class V, class F>
inline bool find_outliers(int64_t count, float largest, F&& load) {
  const auto one = V::broadcast(1), limit = V::broadcast(largest * kSmall), least = V::broadcast(0x1p-126f);
  auto others = V::zero(), numbers = V::zero();  // numbers of values that are not small, and that are not zero
  for (int64_t i = 0; i < count; i += V::kLanes) {
    auto magnitude = load(i);
    others = V::add(others, V::zero_where_below(one, magnitude, limit));
    numbers = V::add(numbers, V::zero_where_below(one, magnitude, least));
  }
  const float outliers = V::sum(others);
  return outliers <= float(larger(count / kOutlierShare, 1)) && V::sum(numbers) > outliers;
}

// The largest magnitude of a group of `count` values from `first` on; negative where the group has outliers.
template <class V>
inline float largest_of_group(const void* x, Type type, int64_t first, int64_t count) {
  auto magnitude = [&](int64_t i) { return V::absolute(V::load_values(x, type, first + i)); };
  auto most = V::zero(), magnitudes = V::zero();
  for (int64_t i = 0; i < count; i += V::kLanes) {
    most = V::maximum(most, magnitude(i));
    magnitudes = V::add(magnitudes, magnitude(i));
  }
  const float largest = V::largest(most);
  // Outliers and small values have a mean below a seventh of the largest one, which few groups have.
  if (V::sum(magnitudes) * 7 < largest * float(count) && find_outliers<V>(count, largest, magnitude)) return -1;
  return largest;
}

template <class V>
inline float sum_of_group(const void* x, Type type, int64_t first, int64_t count) {
  auto sum = V::zero();
  for (int64_t i = 0; i < count; i += V::kLanes) sum = V::add(sum, V::load_values(x, type, first + i));
  return V::sum(sum);
}

// The value of 1 in the integers of a group with this largest magnitude, and its inverse.
inline float scale_of_group(float largest) { return (largest < kLeast ? 0 : largest) / kLargest; }
inline float integers_of_group(float largest) { return largest >= kLeast ? kLargest / largest : 0; }

// Whether digits hold a row whose groups have these largest magnitudes; beyond the end they are zero. A row of tiny or
// of huge numbers does not fit. NaN does, the sums of its groups keep it. Where weights have a bias, a weight of zero
// is the sum of two numbers, and so are the sums of groups. Then there must be no outliers among the groups, either.
template <class V>
inline bool row_fits(const float* magnitudes, int64_t groups, bool has_biases) {
  float largest = 0;
  for (int64_t g = 0; g < groups; g++) largest = magnitudes[g] > largest ? magnitudes[g] : largest;
  if ((largest > 0 && largest < kTiny) || largest > kHuge) return false;
  return !(has_biases && find_outliers<V>(groups, largest, [&](int64_t g) { return V::load(magnitudes + g); }));
}

// Writes the digits of `count` values from `first` on, the high ones to to[0].
template <class V>
inline void store_digits(const void* x, Type type, int64_t first, int64_t count, float integers, int8_t* const* to) {
  const auto factor = V::broadcast(integers);
  const auto half = V::broadcast_word(128);
  for (int64_t i = 0; i < count; i += V::kLanes) {
    auto low = V::round_to_words(V::multiply(V::load_values(x, type, first + i), factor));
    auto middle = V::template shift_right_signed<8>(V::add_words(low, half));
    auto high = V::template shift_right_signed<8>(V::add_words(middle, half));
    V::store_low_bytes(to[0] + i, high);
    V::store_low_bytes(to[1] + i, middle);
    V::store_low_bytes(to[2] + i, low);
  }
}

}  // namespace
}  // namespace mlx_cpu_kernels
