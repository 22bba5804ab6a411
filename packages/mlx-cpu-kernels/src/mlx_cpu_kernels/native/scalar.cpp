// The reference: plain loops that state what each kernel computes. The other instruction sets are tested against it,
// and processors that have none of them use it.
#include "scalar.h"

namespace mlx_cpu_kernels {
namespace {

uint32_t quantized_value(const uint32_t* row, int bits, int64_t column) {
  int64_t bit = column * bits;
  const uint32_t* word = row + bit / 32;
  int shift = int(bit % 32);
  uint64_t pair = word[0];
  if (shift + bits > 32) pair |= uint64_t{word[1]} << 32;
  return uint32_t(pair >> shift) & ((1u << bits) - 1);
}

}  // namespace

float scalar_value(const Quantized& w, int64_t row, int64_t column) {
  constexpr float kE2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  int64_t group = row * w.row_groups + column / w.group_size;
  float scale = load_value(w.scales, w.type, group);
  uint32_t q = quantized_value(w.weights + row * w.row_words, w.bits, column);
  if (w.mode == Mode::affine) return scale * float(q) + load_value(w.biases, w.type, group);
  return scale * (w.mode == Mode::mxfp8 ? float_of_e4m3(uint8_t(q)) : kE2m1[q]);
}

namespace {

void multiply_transposed(const Rows& x, const RowsProduct* products, int count, Threads& threads) {
  for (int i = 0; i < count; i++) {
    const auto& [w, y] = products[i];
    threads.parallel_for(w.rows, 1, [&, &w = w, &y = y](int64_t begin, int64_t end) {
      for (int64_t m = 0; m < x.count; m++) {
        for (int64_t n = begin; n < end; n++) {
          double sum = 0;
          for (int64_t k = 0; k < w.columns; k++)
            sum += double(load_value(x.row(m), x.type, k)) * scalar_value(w, n, k);
          store_value(y.row(m), y.type, n, float(sum));
        }
      }
    });
  }
}

void multiply(const Rows& x, const Quantized& w, const MutableRows& y, Threads& threads) {
  threads.parallel_for(w.columns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < x.count; m++) {
      for (int64_t n = begin; n < end; n++) {
        double sum = 0;
        for (int64_t k = 0; k < w.rows; k++) sum += double(load_value(x.row(m), x.type, k)) * scalar_value(w, k, n);
        store_value(y.row(m), y.type, n, float(sum));
      }
    }
  });
}

void dequantize_rows(const Quantized& w, int64_t row_begin, int64_t row_end, void* out, Type type, Threads& threads) {
  threads.parallel_for(row_end - row_begin, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      for (int64_t column = 0; column < w.columns; column++)
        store_value(out, type, row * w.columns + column, scalar_value(w, row_begin + row, column));
  });
}

}  // namespace

const Kernels scalar_kernels = {multiply_transposed, multiply,          dequantize_rows,
                                scalar_rms_norm,     scalar_layer_norm, scalar_gated_activation,
                                scalar_add_rows,     scalar_rope,       scalar_attention};

}  // namespace mlx_cpu_kernels
