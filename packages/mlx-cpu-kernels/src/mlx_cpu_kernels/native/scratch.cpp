#include "scratch.h"

#include <cstdlib>
#include <new>

namespace mlx_cpu_kernels {
namespace {

constexpr size_t kLine = 64;

struct Piece {
  void* memory = nullptr;
  size_t size = 0;

  ~Piece() { std::free(memory); }

  void grow(size_t bytes) {
    std::free(memory);
    size = 0;
    // A margin lets whole vectors be read and written at the end.
    memory = std::aligned_alloc(kLine, (bytes + 2 * kLine - 1) / kLine * kLine);
    if (!memory) throw std::bad_alloc();
    size = bytes;
  }
};

thread_local Piece pieces[int(Slot::count)];

}  // namespace

void* scratch(Slot slot, size_t bytes) {
  Piece& piece = pieces[int(slot)];
  if (bytes > piece.size || !piece.memory) piece.grow(bytes);
  return piece.memory;
}

}  // namespace mlx_cpu_kernels
