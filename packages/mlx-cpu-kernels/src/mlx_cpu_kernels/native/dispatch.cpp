// The public functions: they pass on to the table of the instruction set in use.
#include <algorithm>
#include <atomic>
#include <vector>

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mlx_cpu_kernels {
namespace {

#if defined(__x86_64__)
// Whether the processor has AMX for bytes, and the system allows it to this process. Its registers take 8 kB of every
// thread that uses them, so Linux is asked first (Documentation/arch/x86/xstate.rst).
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kTileAndInt8 = 3u << 24;  // CPUID leaf 7, EDX
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTileAndInt8) == kTileAndInt8 &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

const Kernels* amx_kernels() {
  static const Kernels kernels = [] {
    Kernels value = avx512_kernels;
    value.multiply_transposed = multiply_transposed_by_amx;
    return value;
  }();
  return &kernels;
}
#endif

const Kernels* find_kernels(InstructionSet set) {
  switch (set) {
    case InstructionSet::scalar:
      return &scalar_kernels;
#if defined(__x86_64__)
    case InstructionSet::avx2: {
      bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
      return has ? &avx2_kernels : nullptr;
    }
    case InstructionSet::avx512: {  // as Ice Lake and Zen 4 brought it together
      bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
      return has ? &avx512_kernels : nullptr;
    }
    case InstructionSet::amx: {
      static const bool has = find_kernels(InstructionSet::avx512) && has_amx();
      return has ? amx_kernels() : nullptr;
    }
#elif defined(__aarch64__)
    case InstructionSet::neon:
      return &neon_kernels;
#endif
    default:
      return nullptr;
  }
}

InstructionSet best_instruction_set() {
  using enum InstructionSet;
  for (InstructionSet set : {amx, avx512, avx2, neon})
    if (find_kernels(set)) return set;
  return InstructionSet::scalar;
}

struct Selected {
  InstructionSet set = best_instruction_set();
  const Kernels* kernels = find_kernels(set);
};

Selected& selected() {
  static Selected value;
  return value;
}

void multiply_one_transposed(const Rows& x, const Quantized& w, const MutableRows& y, Threads& threads) {
  RowsProduct product{w, y};
  selected().kernels->multiply_transposed(x, &product, 1, threads);
}

using Multiply = void (*)(const Rows&, const Quantized&, const MutableRows&, Threads&);

void gather(Multiply multiply, const Rows& x, const GatherPair* pairs, int64_t count, const Experts& experts,
            const MutableRows& y, Threads& threads) {
  std::vector<GatherPair> ordered(pairs, pairs + count);
  std::stable_sort(ordered.begin(), ordered.end(), [](auto& a, auto& b) { return a.expert < b.expert; });
  std::vector<int64_t> x_rows(count), y_rows(count);
  for (int64_t i = 0; i < count; i++) {
    x_rows[i] = ordered[i].x_row;
    y_rows[i] = ordered[i].y_row;
  }
  for (int64_t begin = 0, end; begin < count; begin = end) {
    int64_t expert = ordered[begin].expert;
    for (end = begin + 1; end < count && ordered[end].expert == expert;) end++;
    Quantized w = experts.first;
    w.weights += expert * experts.words;
    w.scales = at(w.scales, w.type, expert * experts.groups);
    if (w.biases) w.biases = at(w.biases, w.type, expert * experts.groups);
    multiply({x.values, x.type, x.stride, end - begin, &x_rows[begin]}, w,
             {y.values, y.type, y.stride, end - begin, &y_rows[begin]}, threads);
  }
}

}  // namespace

InstructionSet instruction_set() { return selected().set; }

const char* name(InstructionSet set) {
  switch (set) {
    case InstructionSet::avx2:
      return "AVX2";
    case InstructionSet::avx512:
      return "AVX-512";
    case InstructionSet::amx:
      return "AMX";
    case InstructionSet::neon:
      return "NEON";
    default:
      return "scalar";
  }
}

bool is_available(InstructionSet set) { return find_kernels(set) != nullptr; }

bool set_instruction_set(InstructionSet set) {
  const Kernels* kernels = find_kernels(set);
  if (kernels) selected() = {set, kernels};
  return kernels != nullptr;
}

void multiply_transposed(const void* x, Type type, int64_t x_stride, int64_t rows, const Quantized& w, void* y,
                         int64_t y_stride, Threads& threads) {
  multiply_one_transposed({x, type, x_stride, rows}, w, {y, type, y_stride, rows}, threads);
}

void multiply_transposed(const void* x, Type type, int64_t x_stride, int64_t rows, const Product* products, int count,
                         Threads& threads) {
  std::vector<RowsProduct> all(count);
  for (int i = 0; i < count; i++) all[i] = {products[i].w, {products[i].y, type, products[i].y_stride, rows}};
  selected().kernels->multiply_transposed({x, type, x_stride, rows}, all.data(), count, threads);
}

void multiply(const void* x, Type type, int64_t x_stride, int64_t rows, const Quantized& w, void* y, int64_t y_stride,
              Threads& threads) {
  selected().kernels->multiply({x, type, x_stride, rows}, w, {y, type, y_stride, rows}, threads);
}

void gather_multiply_transposed(const void* x, Type type, int64_t x_stride, const GatherPair* pairs, int64_t count,
                                const Experts& experts, void* y, int64_t y_stride, Threads& threads) {
  gather(multiply_one_transposed, {x, type, x_stride, count}, pairs, count, experts, {y, type, y_stride, count},
         threads);
}

void gather_multiply(const void* x, Type type, int64_t x_stride, const GatherPair* pairs, int64_t count,
                     const Experts& experts, void* y, int64_t y_stride, Threads& threads) {
  gather(selected().kernels->multiply, {x, type, x_stride, count}, pairs, count, experts, {y, type, y_stride, count},
         threads);
}

void dequantize(const Quantized& w, int64_t row_begin, int64_t row_end, void* out, Type type, Threads& threads) {
  selected().kernels->dequantize(w, row_begin, row_end, out, type, threads);
}

void rms_norm(const RmsNorm& norm, Threads& threads) { selected().kernels->rms_norm(norm, threads); }

void layer_norm(const LayerNorm& norm, Threads& threads) { selected().kernels->layer_norm(norm, threads); }

void gated_activation(Activation activation, Matrix gate, const void* up, int64_t up_stride, int64_t rows,
                      int64_t columns, void* y, int64_t y_stride, Threads& threads) {
  selected().kernels->gated_activation(activation, gate, {up, gate.type, up_stride}, rows, columns, y, y_stride,
                                       threads);
}

void add_rows(Matrix added, int64_t rows, int64_t columns, void* y, int64_t y_stride, Threads& threads) {
  selected().kernels->add_rows(added, rows, columns, y, y_stride, threads);
}

void rope(const Rope& rope, Threads& threads) { selected().kernels->rope(rope, threads); }

bool attention(const Attention& a, Threads& threads) {
  bool has_mask = a.mask == Attention::Mask::boolean || a.mask == Attention::Mask::additive;
  if (a.head_size > 256 || a.value_size > 256 || (has_mask && a.mask_strides[3] != 1)) return false;
  selected().kernels->attention(a, threads);
  return true;
}

}  // namespace mlx_cpu_kernels
