// MLX's operations on quantized weights, of the same names and arguments there.
#pragma once

#include <optional>
#include <string>

#include "mlx/mlx.h"

namespace mlx_cpu_kernels {

namespace mx = mlx::core;

// mx::quantized_matmul
mx::array make_product(
    const mx::array& x, const mx::array& weights, const mx::array& scales, const std::optional<mx::array>& biases,
    bool transpose, std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
    mx::StreamOrDevice stream);

// mx::gather_qmm
mx::array make_gathered_product(
    const mx::array& x, const mx::array& weights, const mx::array& scales, const std::optional<mx::array>& biases,
    const std::optional<mx::array>& lhs_indices, const std::optional<mx::array>& rhs_indices, bool transpose,
    std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
    const std::optional<mx::array>& global_scale, bool sorted_indices, mx::StreamOrDevice stream);

// mx::dequantize
mx::array make_dequantized(
    const mx::array& weights, const mx::array& scales, const std::optional<mx::array>& biases,
    std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
    const std::optional<mx::array>& global_scale, std::optional<mx::Dtype> dtype, mx::StreamOrDevice stream);

}  // namespace mlx_cpu_kernels
