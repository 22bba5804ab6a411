// Operations on planes: arrays (slots, heads, capacity, size) of a cache, which hold the keys or values of a sequence in
// each slot.
//
// Planes are changed in place: their owner reads a slot only up to what was appended, and through the array returned last.
// MLX would copy a plane whenever an operation that reads it has not ended, which in decode is always.
#pragma once

#include <optional>
#include <tuple>
#include <variant>
#include <vector>

#include "extension_fused.h"

namespace mlx_cpu_kernels {

// `plane` with `rows` (slots, heads, tokens, size) in its slots from `slot` on, from position `begin` on. Throws
// std::invalid_argument where they do not fit.
mx::array make_appended(const mx::array& plane, const mx::array& rows, int slot, int begin);

// Planes of keys and values, the first slot, and the position of each row's token.
using Places = std::tuple<mx::array, mx::array, int, std::vector<int>>;

// The norm of a gated layer, and its linear layers: gate, up and down.
using Gated = std::tuple<NormLayer, LinearLayer, LinearLayer, LinearLayer>;

// x + output(attention(norm(x))), of one token a row, x (batch, 1, K), and the planes with its keys and values. A row sees
// its slot up to its token. A gated layer may follow, as of make_gated_layer. Further arguments are those of make_heads.
// Nothing where the kernels do not apply.
std::optional<std::vector<mx::array>> make_attended_token(
    const mx::array& x, const std::optional<NormLayer>& norm, const std::vector<LinearLayer>& linears,
    const std::vector<int>& heads, const std::vector<NormLayer>& head_norms, const std::optional<Rotation>& rotation,
    const std::variant<int, mx::array>& offset, const LinearLayer& output, float scale, const Places& places,
    const std::optional<Gated>& gated);

}  // namespace mlx_cpu_kernels
