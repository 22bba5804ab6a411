// Products of a transformer's layer together with the steps before and after them, each in one operation. Decode of a
// small model takes longer for an operation's own costs than for its weights.
#pragma once

#include <optional>
#include <tuple>
#include <variant>
#include <vector>

#include "mlx/mlx.h"

namespace mlx_cpu_kernels {

namespace mx = mlx::core;

// Weights (N, K), scales, biases, what is added to the product (N), group size and bits.
using LinearLayer = std::tuple<mx::array, mx::array, mx::array, std::optional<mx::array>, int, int>;

// Weight and epsilon of an RMS norm.
using NormLayer = std::tuple<mx::array, float>;

// Rotated elements, whether pairs are neighbours, base, scale, frequencies, as of mx::fast::rope.
using Rotation = std::tuple<int, bool, std::optional<float>, float, std::optional<mx::array>>;

// Each function returns nothing where the kernels do not apply to its arguments.

// Queries, keys and values (batch, heads, tokens, size) of x (batch, tokens, K), which is normalized before. Queries
// and keys are then normalized by head, and rotated from `offset` on, where a norm and a rotation are given.
std::optional<std::vector<mx::array>> make_heads(const mx::array& x, const std::optional<NormLayer>& norm,
                                                 const std::vector<LinearLayer>& linears, const std::vector<int>& heads,
                                                 const std::vector<NormLayer>& head_norms,
                                                 const std::optional<Rotation>& rotation,
                                                 const std::variant<int, mx::array>& offset);

// x + down(silu(gate(y)) * up(y)), of x (..., K), where y is x normalized; without the residual, no x is added.
std::optional<mx::array> make_gated_layer(const mx::array& x, const std::optional<NormLayer>& norm,
                                          const LinearLayer& gate, const LinearLayer& up, const LinearLayer& down,
                                          bool has_residual);

// residual + linear(x), of x (..., K). Heads (batch, heads, tokens, size) are taken side by side as K.
std::optional<mx::array> make_added(const mx::array& x, const LinearLayer& linear, const mx::array& residual);

}  // namespace mlx_cpu_kernels
