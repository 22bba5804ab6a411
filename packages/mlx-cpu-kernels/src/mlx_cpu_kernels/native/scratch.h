// Working memory of a thread, kept from one product to the next so that none allocates.
#pragma once

#include <cstddef>

namespace mlx_cpu_kernels {

// A kernel that holds several pieces at once takes a slot for each.
enum class Slot {
  x,
  x_scales,
  x_sums,
  x_offsets,
  panels,
  values,
  sums,
  group_scales,
  group_biases,
  words,
  rows,
  count
};

// At least `bytes` bytes, aligned to a cache line, of the calling thread's own; valid until the thread asks for this
// slot again. The content is arbitrary.
void* scratch(Slot slot, size_t bytes);

template <class T>
T* scratch(Slot slot, size_t count) {
  return static_cast<T*>(scratch(slot, count * sizeof(T)));
}

}  // namespace mlx_cpu_kernels
