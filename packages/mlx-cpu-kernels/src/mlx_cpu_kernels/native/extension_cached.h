// Operations on planes: arrays (slots, heads, capacity, size) of a cache, which hold the keys or values of a sequence
// in each slot.
//
// Planes are changed in place: their owner reads a slot only up to what was appended, and through the array returned
// last. MLX would copy a plane whenever an operation that reads it has not ended, which in decode is always.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <variant>
#include <vector>

#include "extension_fused.h"
#include "mlx/distributed/distributed.h"

namespace mlx_cpu_kernels {

// `plane` with `rows` (slots, heads, tokens, size) in its slots from `slot` on, from position `begin` on. Throws
// std::invalid_argument where they do not fit.
mx::array make_appended(const mx::array& plane, const mx::array& rows, int slot, int begin);

// Planes of keys and values, the first slot, and the position of each row's token.
using Places = std::tuple<mx::array, mx::array, int, std::vector<int>>;

// The norm of a gated layer, and its linear layers: gate, up and down.
using Gated = std::tuple<NormLayer, LinearLayer, LinearLayer, LinearLayer>;

// The arguments of make_heads for one token, the output layer, the scale of attention, and a gated layer that may
// follow.
struct TokenLayer {
  std::optional<NormLayer> norm;
  std::vector<LinearLayer> linears;
  std::vector<int> heads;
  std::vector<NormLayer> head_norms;
  std::optional<Rotation> rotation;
  LinearLayer output;
  float scale;
  std::optional<Gated> gated;
};

// x + output(attention(norm(x))), of one token a row, x (batch, 1, K), and the planes with its keys and values. A row
// sees its slot up to its token. A gated layer may follow, as of make_gated_layer. Nothing where the kernels do not
// apply.
std::optional<std::vector<mx::array>> make_attended_token(const mx::array& x, const TokenLayer& layer,
                                                          const std::variant<int, mx::array>& offset,
                                                          const Places& places);

// A layer with a gated layer, whose arrays are checked and held: no operation has to take them as its inputs.
class PreparedLayer;

// A group whose ranks each have some heads and hidden units of a layer.
using Ranks = mx::distributed::Group;

// The layer for any x of this type. With ranks, the output layer and the last of the gated layer are parts. The layer
// sums them over the ranks, and adds their addends to the sums. Nothing where the kernels do not apply, or an array is
// not evaluated or not dense.
std::shared_ptr<const PreparedLayer> prepare_layer(const mx::array& x, const TokenLayer& layer,
                                                   std::optional<Ranks> ranks);

// Results of layers that compute x one after another, and their planes: keys and values of the first, then of the next.
// All have the same slots, begins, offset and ranks. Nothing where the kernels do not apply, or gradients may be taken.
std::optional<std::vector<mx::array>> make_attended_layers(const mx::array& x,
                                                           std::vector<std::shared_ptr<const PreparedLayer>> layers,
                                                           const std::vector<mx::array>& planes, int slot,
                                                           const std::vector<int>& begins,
                                                           const std::variant<int, mx::array>& offset);

}  // namespace mlx_cpu_kernels
