// MLX's operations on quantized weights, of the same names and arguments there.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "extension.h"
#include "quantized.h"

namespace mlx_cpu_kernels {

struct Quantization {
  int bits;
  int group_size;
  Mode mode = Mode::affine;
  bool operator==(const Quantization&) const = default;

  // Number of arrays: weights, scales and, in the affine mode, biases.
  int parts() const { return mode == Mode::affine ? 3 : 2; }
};

// How weights are quantized if the kernels apply on `stream`. MLX's defaults are those of the mode: groups of 64 and
// 4 bits in the affine one.
std::optional<Quantization> applicable(const mx::Stream& stream, const mx::array& weights, const mx::array& scales,
                                       const std::optional<mx::array>& biases, std::optional<int> group_size,
                                       std::optional<int> bits, const std::string& mode);

// Inputs with dense rows, of which those from `first` on are weights, scales and biases, if any. Scales and biases lie
// alike in memory.
std::vector<mx::array> quantized_inputs(const std::vector<mx::array>& inputs, size_t count, size_t first,
                                        mx::cpu::CommandEncoder& encoder);

// The first matrix of weights, scales and, in the affine mode, biases of further leading axes.
Quantized first_matrix(const mx::array& weights, const mx::array& scales, const std::optional<mx::array>& biases,
                       const Quantization& quantization);

// mx::quantized_matmul
mx::array make_product(const mx::array& x, const mx::array& weights, const mx::array& scales,
                       const std::optional<mx::array>& biases, bool transpose, std::optional<int> group_size,
                       std::optional<int> bits, const std::string& mode, mx::StreamOrDevice stream);

// mx::gather_qmm
mx::array make_gathered_product(const mx::array& x, const mx::array& weights, const mx::array& scales,
                                const std::optional<mx::array>& biases, const std::optional<mx::array>& lhs_indices,
                                const std::optional<mx::array>& rhs_indices, bool transpose,
                                std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
                                const std::optional<mx::array>& global_scale, bool sorted_indices,
                                mx::StreamOrDevice stream);

// mx::dequantize
mx::array make_dequantized(const mx::array& weights, const mx::array& scales, const std::optional<mx::array>& biases,
                           std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
                           const std::optional<mx::array>& global_scale, std::optional<mx::Dtype> dtype,
                           mx::StreamOrDevice stream);

}  // namespace mlx_cpu_kernels
