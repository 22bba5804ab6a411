// MLX's fast operations of a transformer's layers, of the same names and arguments there.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "mlx/mlx.h"

namespace mlx_cpu_kernels {

namespace mx = mlx::core;

// mx::fast::rms_norm
mx::array make_rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float epsilon,
                        mx::StreamOrDevice stream);

// mx::fast::layer_norm
mx::array make_layer_norm(const mx::array& x, const std::optional<mx::array>& weight,
                          const std::optional<mx::array>& bias, float epsilon, mx::StreamOrDevice stream);

// mx::fast::rope
mx::array make_rotated(const mx::array& x, int dims, bool traditional, std::optional<float> base, float scale,
                       const std::variant<int, mx::array>& offset, const std::optional<mx::array>& frequencies,
                       mx::StreamOrDevice stream);

// mx::fast::scaled_dot_product_attention
mx::array make_attention(const mx::array& queries, const mx::array& keys, const mx::array& values, float scale,
                         const std::variant<std::monostate, std::string, mx::array>& mask,
                         const std::optional<mx::array>& sinks, bool force_fused, mx::StreamOrDevice stream);

// mlx_lm.models.base.quantized_scaled_dot_product_attention: keys and values are weights, scales and biases. Nothing
// where the kernels do not apply: MLX has no operation of its own.
std::optional<mx::array> make_quantized_attention(const mx::array& queries, const std::vector<mx::array>& keys,
                                                  const std::vector<mx::array>& values, float scale,
                                                  const std::variant<std::monostate, std::string, mx::array>& mask,
                                                  int group_size, int bits);

// The angles a position that belong to a base, for so many pairs. All layers of a model share them.
mx::array frequencies_of(float base, int pairs, const mx::Stream& stream);

// silu(gate) * up, as mlx_lm.models.activations.swiglu
mx::array make_swiglu(const mx::array& gate, const mx::array& up);

// mlx.nn.gelu_approx, or mlx.nn.gelu_fast_approx
mx::array make_gelu(const mx::array& x, bool by_tanh);

}  // namespace mlx_cpu_kernels
