// Products with quantized matrices, without MLX and without Python.
//
// A quantized matrix is stored as MLX stores it. A row is a stream of bits: value c occupies the bits
// [c * bits, (c + 1) * bits) of the row's words, the lowest bit first. MLX describes 3, 5 and 6 bits as groups of
// bytes, which are the same stream on a little-endian machine. Each `group_size` neighbours of a row share a scale and,
// in the affine mode, a bias: value = scale * q + bias. There q is an integer. In the other modes it is a number with
// a sign, an exponent and a mantissa. e2m1 is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, e4m3 reaches 448.
#pragma once

#include <cstdint>

#include "threads.h"

namespace mlx_cpu_kernels {

// Scales may also be bytes: e8m0 is a power of two, 2^(byte - 127), and e4m3 is as above.
enum class Type { float32, float16, bfloat16, e8m0, e4m3 };

// Meaning of q, and format of the scales of all but the affine mode.
enum class Mode {
  affine,  // integers of 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128
  mxfp4,   // e2m1 in groups of 32, scales e8m0
  nvfp4,   // e2m1 in groups of 16, scales e4m3; an even number of groups
  mxfp8,   // e4m3 in groups of 32, scales e8m0
};

struct Quantized {
  const uint32_t* weights;
  const void* scales;
  const void* biases;  // in the affine mode alone
  Type type;           // of scales and biases
  int bits;
  int group_size;  // along the columns
  int64_t rows;
  int64_t columns;     // a multiple of group_size
  int64_t row_words;   // from a row's first word to the next row's
  int64_t row_groups;  // from a row's first scale (and bias) to the next row's
  Mode mode = Mode::affine;
};

// One product of a Mixture-of-Experts layer: row x_row of x times matrix `expert`, into row y_row of y.
struct GatherPair {
  int64_t x_row;
  int64_t expert;
  int64_t y_row;
};

// Matrices of equal shape, one after another at a fixed distance.
struct Experts {
  Quantized first;
  int64_t words;   // from an expert's first word to the next expert's
  int64_t groups;  // from an expert's first scale (and bias) to the next expert's
};

// All strides are in elements, from row to row; neighbours in a row lie side by side. Sums are float32 or wider, and
// the result has the type of x. x and y do not overlap.

// y[m, n] = sum over k of x[m, k] * w[n, k]; x is [rows, w.columns], y is [rows, w.rows].
void multiply_transposed(const void* x, Type type, int64_t x_stride, int64_t rows, const Quantized& w, void* y,
                         int64_t y_stride, Threads& threads);

// The same for several matrices that one x is multiplied with, such as those of queries, keys and values. x is
// converted once, and the threads meet once.
struct Product {
  Quantized w;
  void* y;
  int64_t y_stride;
};
void multiply_transposed(const void* x, Type type, int64_t x_stride, int64_t rows, const Product* products, int count,
                         Threads& threads);

// y[m, n] = sum over k of x[m, k] * w[k, n]; x is [rows, w.rows], y is [rows, w.columns].
void multiply(const void* x, Type type, int64_t x_stride, int64_t rows, const Quantized& w, void* y, int64_t y_stride,
              Threads& threads);

// The same products for chosen rows and experts. Pairs are taken in the order of their experts, so that the weights of
// an expert are read once for all its rows. No two pairs have the same y_row.
void gather_multiply_transposed(const void* x, Type type, int64_t x_stride, const GatherPair* pairs, int64_t count,
                                const Experts& experts, void* y, int64_t y_stride, Threads& threads);
void gather_multiply(const void* x, Type type, int64_t x_stride, const GatherPair* pairs, int64_t count,
                     const Experts& experts, void* y, int64_t y_stride, Threads& threads);

// Writes rows [row_begin, row_end) of w side by side, `w.columns` values each, as `type`.
void dequantize(const Quantized& w, int64_t row_begin, int64_t row_end, void* out, Type type, Threads& threads);

// The instruction set that the kernels use: the best that this processor has, unless another is set.
enum class InstructionSet { scalar, avx2, avx512, amx, neon };

InstructionSet instruction_set();
const char* name(InstructionSet set);
bool is_available(InstructionSet set);
// Returns false, and changes nothing, where the processor or this build lacks the set. Not during a product.
bool set_instruction_set(InstructionSet set);

}  // namespace mlx_cpu_kernels
