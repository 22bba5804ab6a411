// Operations of a transformer's layers.

#include "extension_layers.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "extension.h"
#include "extension_quantized.h"
#include "fused.h"

namespace mlx_cpu_kernels {
namespace {

constexpr int kMostHeadSize = 256;  // of attention

void allocate(mx::array& out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

class Norm : public CpuPrimitive {
 public:
  Norm(mx::Stream stream, float epsilon) : CpuPrimitive(stream), epsilon_(epsilon) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& y = outputs[0];
    allocate(y);
    if (y.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const auto x = dense(inputs[0], encoder);
    const int64_t size = x.shape(-1);
    RmsNorm norm{
        .rows = static_cast<int64_t>(x.size()) / size,
        .columns = size,
        .x = {x.data<void>(), type_of(x.dtype()), size},
        .weight = nullptr,
        .weight_type = Type::float32,
        .epsilon = epsilon_,
        .y = y.data<void>(),
        .y_stride = size,
    };
    if (inputs.size() > 1) {
      norm.weight = dense(inputs[1], encoder).data<void>();
      norm.weight_type = type_of(inputs[1].dtype());
    }
    encoder.dispatch([norm] { rms_norm(norm, threads()); });
  }

  std::vector<mx::array> stock(const std::vector<mx::array>& inputs) override {
    const auto weight = inputs.size() > 1 ? std::optional(inputs[1]) : std::nullopt;
    return {mx::fast::rms_norm(inputs[0], weight, epsilon_, stream())};
  }

  const char* name() const override { return "CpuRmsNorm"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return epsilon_ == static_cast<const Norm&>(other).epsilon_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override { return {inputs[0].shape()}; }

 private:
  float epsilon_;
};

// x (..., size), then weight and bias (size), or neither.
class LayerNormalization : public CpuPrimitive {
 public:
  LayerNormalization(mx::Stream stream, float epsilon, bool has_weight, bool has_bias)
      : CpuPrimitive(stream), epsilon_(epsilon), has_weight_(has_weight), has_bias_(has_bias) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& y = outputs[0];
    allocate(y);
    if (y.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const auto x = dense(inputs[0], encoder);
    const int64_t size = x.shape(-1);
    LayerNorm norm{
        .rows = static_cast<int64_t>(x.size()) / size,
        .columns = size,
        .x = {x.data<void>(), type_of(x.dtype()), size},
        .weight = nullptr,
        .bias = nullptr,
        .weight_type = type_of(inputs.back().dtype()),
        .epsilon = epsilon_,
        .y = y.data<void>(),
        .y_stride = size,
    };
    if (has_weight_) norm.weight = dense(inputs[1], encoder).data<void>();
    if (has_bias_) norm.bias = dense(inputs.back(), encoder).data<void>();
    encoder.dispatch([norm] { layer_norm(norm, threads()); });
  }

  std::vector<mx::array> stock(const std::vector<mx::array>& inputs) override {
    return {mx::fast::layer_norm(inputs[0], has_weight_ ? std::optional(inputs[1]) : std::nullopt,
                                 has_bias_ ? std::optional(inputs.back()) : std::nullopt, epsilon_, stream())};
  }

  const char* name() const override { return "CpuLayerNorm"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& same = static_cast<const LayerNormalization&>(other);
    return epsilon_ == same.epsilon_ && has_weight_ == same.has_weight_ && has_bias_ == same.has_bias_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override { return {inputs[0].shape()}; }

 private:
  float epsilon_;
  bool has_weight_, has_bias_;
};

mx::array activated(Activation activation, const mx::array& x, const mx::Stream& stream) {
  const auto number = [&](float value) { return mx::array(value, x.dtype()); };
  switch (activation) {
    case Activation::gelu_tanh: {
      const auto cube = mx::multiply(mx::multiply(mx::square(x, stream), x, stream), number(0.044715f), stream);
      const auto inner = mx::multiply(mx::add(x, cube, stream), number(0.7978845608f), stream);
      const auto share = mx::multiply(mx::add(mx::tanh(inner, stream), number(1), stream), number(0.5f), stream);
      return mx::multiply(x, share, stream);
    }
    case Activation::gelu_sigmoid:
      return mx::multiply(x, mx::sigmoid(mx::multiply(x, number(1.702f), stream), stream), stream);
    default:
      return mx::multiply(x, mx::sigmoid(x, stream), stream);
  }
}

// activation(x), or activation(x) * y of two inputs.
class GatedActivation : public CpuPrimitive {
 public:
  GatedActivation(mx::Stream stream, Activation activation) : CpuPrimitive(stream), activation_(activation) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& y = outputs[0];
    allocate(y);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const auto gate = dense(inputs[0], encoder);
    const void* up = inputs.size() > 1 ? dense(inputs[1], encoder).data<void>() : nullptr;
    const int64_t size = y.shape(-1), rows = size ? static_cast<int64_t>(y.size()) / size : 0;
    encoder.dispatch(
        [=, activation = activation_, gate = Matrix{gate.data<void>(), type_of(gate.dtype()), size},
         y = y.data<void>()] { gated_activation(activation, gate, up, size, rows, size, y, size, threads()); });
  }

  std::vector<mx::array> stock(const std::vector<mx::array>& inputs) override {
    const auto result = activated(activation_, inputs[0], stream());
    return {inputs.size() > 1 ? mx::multiply(result, inputs[1], stream()) : result};
  }

  const char* name() const override { return "CpuGatedActivation"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return activation_ == static_cast<const GatedActivation&>(other).activation_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override { return {inputs[0].shape()}; }

 private:
  Activation activation_;
};

struct RotationOptions {
  int dims;
  bool is_traditional;
  float scale;
  bool has_frequencies;  // given by the caller: the reciprocals of those that are used
  float base;
  bool operator==(const RotationOptions&) const = default;
};

// x (batch, heads, tokens, size), frequencies (dims / 2) and offset () or (batch).
class Rotate : public CpuPrimitive {
 public:
  Rotate(mx::Stream stream, RotationOptions options) : CpuPrimitive(stream), options_(options) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& y = outputs[0];
    allocate(y);
    if (y.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const auto x = with_dense_rows(inputs[0], encoder), frequencies = dense(inputs[1], encoder);
    const auto offsets = dense(inputs[2], encoder);
    const Rope rotation{
        .batches = x.shape(0),
        .heads = x.shape(1),
        .length = x.shape(2),
        .head_size = x.shape(3),
        .type = type_of(x.dtype()),
        .x = {x.data<void>(), {x.strides(0), x.strides(1), x.strides(2)}},
        .y = {y.data<void>(), {y.strides(0), y.strides(1), y.strides(2)}},
        .dims = options_.dims,
        .traditional = options_.is_traditional,
        .frequencies = frequencies.data<float>(),
        .scale = options_.scale,
        .offsets = offsets.data<int32_t>(),
        .offset_stride = offsets.size() > 1 ? 1 : 0,
    };
    encoder.dispatch([rotation] { rope(rotation, threads()); });
  }

  std::vector<mx::array> stock(const std::vector<mx::array>& inputs) override {
    const auto periods = mx::reciprocal(inputs[1], stream());
    return {options_.has_frequencies ? mx::fast::rope(inputs[0], options_.dims, options_.is_traditional, std::nullopt,
                                                      options_.scale, inputs[2], periods, stream())
                                     : mx::fast::rope(inputs[0], options_.dims, options_.is_traditional, options_.base,
                                                      options_.scale, inputs[2], std::nullopt, stream())};
  }

  const char* name() const override { return "CpuRotate"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const Rotate&>(other).options_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override { return {inputs[0].shape()}; }

 private:
  RotationOptions options_;
};

// queries (batch, heads, tokens, size), keys and values (batch, KV heads, length, size), then a mask and sinks. Keys
// and values are three inputs each where they are quantized.
class ScaledAttention : public CpuPrimitive {
 public:
  using Mask = Attention::Mask;

  ScaledAttention(mx::Stream stream, float scale, Mask mask, bool has_sinks, std::optional<Quantization> kv = {})
      : CpuPrimitive(stream), scale_(scale), mask_(mask), has_sinks_(has_sinks), kv_(kv) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const auto queries = with_dense_rows(inputs[0], encoder);
    auto& out = outputs[0];
    const int64_t batch = out.shape(0), heads = out.shape(1), tokens = out.shape(2), width = out.shape(3);
    // A token's heads lie side by side, as the layer's next product reads them.
    const mx::Strides strides{tokens * heads * width, width, heads * width, 1};
    const bool is_plain = heads == 1 || tokens == 1;
    out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), strides, {true, is_plain, out.size() <= 1});
    if (out.size() == 0) return;
    Attention attention{
        .batches = batch,
        .heads = heads,
        .kv_heads = inputs[1].shape(1),
        .queries = tokens,
        .keys = inputs[1].shape(2),
        .head_size = queries.shape(3),
        .value_size = width,
        .type = type_of(queries.dtype()),
        .q = heads_of(queries),
        .k = {},
        .v = {},
        .y = {out.data<void>(), {strides[0], strides[1], strides[2]}},
        .scale = scale_,
        .mask = mask_,
    };
    Quantized keys, values;
    if (kv_) {
      keys = add_quantized({inputs.begin() + 1, inputs.begin() + 4}, attention.k, attention.k_group_strides, encoder);
      values = add_quantized({inputs.begin() + 4, inputs.begin() + 7}, attention.v, attention.v_group_strides, encoder);
    } else {
      attention.k = heads_of(with_dense_rows(inputs[1], encoder));
      attention.v = heads_of(with_dense_rows(inputs[2], encoder));
    }
    if (mask_ == Mask::boolean || mask_ == Mask::additive) {
      const auto mask = with_dense_rows(inputs[mask_input()], encoder);
      attention.mask_values = mask.data<void>();
      if (mask_ == Mask::additive) attention.mask_type = type_of(mask.dtype());
      std::copy(mask.strides().begin(), mask.strides().end(), attention.mask_strides);
      attention.mask_strides[3] = 1;  // also where there is one key, whose stride may be any
    }
    if (has_sinks_) attention.sinks = dense(inputs.back(), encoder).data<float>();
    encoder.dispatch([=, is_quantized = kv_.has_value()]() mutable {
      if (is_quantized) {
        attention.k_quantized = &keys;
        attention.v_quantized = &values;
      }
      if (!mlx_cpu_kernels::attention(attention, threads()))
        throw std::logic_error("attention of an unexpected layout");
    });
  }

  std::vector<mx::array> stock(const std::vector<mx::array>& inputs) override {
    const bool has_mask = mask_ == Attention::Mask::boolean || mask_ == Attention::Mask::additive;
    const auto dense = [&](size_t first) {
      if (!kv_) return inputs[first];
      return mx::dequantize(inputs[first], inputs[first + 1], inputs[first + 2], kv_->group_size, kv_->bits, "affine",
                            std::nullopt, inputs[0].dtype(), stream());
    };
    return {mx::fast::scaled_dot_product_attention(
        inputs[0], dense(1), dense(kv_ ? 4 : 2), scale_, mask_ == Attention::Mask::causal ? "causal" : "",
        has_mask ? std::optional(inputs[mask_input()]) : std::nullopt,
        has_sinks_ ? std::optional(inputs.back()) : std::nullopt, false, stream())};
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    auto shape = inputs[0].shape();
    shape.back() = kv_ ? inputs[5].shape(-1) * kv_->group_size : inputs[2].shape(-1);
    return {shape};
  }

  const char* name() const override { return "CpuAttention"; }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& same = static_cast<const ScaledAttention&>(other);
    return scale_ == same.scale_ && mask_ == same.mask_ && has_sinks_ == same.has_sinks_ && kv_ == same.kv_;
  }

 private:
  static Heads heads_of(const mx::array& array) {
    return {array.data<void>(), {array.strides(0), array.strides(1), array.strides(2)}};
  }

  // Keys or values of quantized weights, scales and biases: where each head begins, and the matrix of the first.
  Quantized add_quantized(const std::vector<mx::array>& inputs, Heads& heads, int64_t* group_strides,
                          mx::cpu::CommandEncoder& encoder) const {
    const auto parts = quantized_inputs(inputs, 3, 0, encoder);
    heads = heads_of(parts[0]);
    std::copy_n(parts[1].strides().begin(), 2, group_strides);
    return first_matrix(parts[0], parts[1], parts[2], *kv_);
  }

  size_t mask_input() const { return kv_ ? 7 : 3; }

  float scale_;
  Mask mask_;
  bool has_sinks_;
  std::optional<Quantization> kv_;
};

// Attention of queries over `length` keys, with values of `width` numbers.
mx::array attend(std::vector<mx::array> inputs, int length, int width, float scale, bool is_causal,
                 const mx::array* mask, const std::optional<mx::array>& sinks, const std::optional<Quantization>& kv,
                 const mx::Stream& stream) {
  auto kind = is_causal ? Attention::Mask::causal : Attention::Mask::none;
  const auto type = inputs[0].dtype();
  auto shape = inputs[0].shape();
  if (mask) {
    kind = mask->dtype() != mx::bool_ ? Attention::Mask::additive : Attention::Mask::boolean;
    shape.back() = length;
    inputs.push_back(mask->shape() == shape ? *mask : mx::broadcast_to(*mask, shape, stream));
  }
  if (sinks) inputs.push_back(*sinks);
  shape.back() = width;
  auto attention = std::make_shared<ScaledAttention>(stream, scale, kind, sinks.has_value(), kv);
  return mx::array(std::move(shape), type, std::move(attention), std::move(inputs));
}

// Whether each query sees a key. MLX gives the others the mean of all values.
bool see_keys(bool is_causal, int queries, int keys) { return keys > 0 && (!is_causal || queries <= keys); }

// Whether a mask is one for all heads of each entry, in which mlx-lm's function and MLX's own broadcast alike.
bool is_mask_of_queries(const mx::array& mask, const mx::array& queries) {
  const bool is_known =
      mask.dtype() == mx::bool_ || (is_float(mask.dtype()) && mx::result_type(mask, queries) == queries.dtype());
  return is_known && mask.ndim() >= 1 && mask.ndim() <= 4 && (mask.ndim() < 3 || mask.shape(-3) == 1);
}

}  // namespace

mx::array frequencies_of(float base, int pairs, const mx::Stream& stream) {
  // By the same operations as MLX's.
  static std::mutex lock;
  static std::map<std::pair<float, int>, mx::array> known;
  const std::lock_guard guard(lock);
  auto found = known.find({base, pairs});
  if (found == known.end()) {
    auto steps = mx::arange(0, -pairs, -1, mx::float32, stream);
    auto frequencies = mx::exp(mx::multiply(steps, mx::array(std::log(base) / pairs, mx::float32), stream), stream);
    frequencies.eval();
    found = known.emplace(std::pair(base, pairs), std::move(frequencies)).first;
  }
  return found->second;
}

mx::array make_rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float epsilon,
                        mx::StreamOrDevice where) {
  const auto stream = mx::to_stream(where);
  const bool is_weighted = weight && is_float(weight->dtype()) && mx::result_type(x, *weight) == x.dtype() &&
                           weight->ndim() == 1 && x.ndim() > 0 && weight->shape(0) == x.shape(-1);
  if (!is_on_cpu(stream) || !is_float(x.dtype()) || x.ndim() == 0 || (weight && !is_weighted)) {
    return mx::fast::rms_norm(x, weight, epsilon, stream);
  }
  std::vector<mx::array> inputs{x};
  if (weight) inputs.push_back(*weight);
  return mx::array(x.shape(), x.dtype(), std::make_shared<Norm>(stream, epsilon), std::move(inputs));
}

mx::array make_rotated(const mx::array& x, int dims, bool traditional, std::optional<float> base, float scale,
                       const std::variant<int, mx::array>& offset, const std::optional<mx::array>& frequencies,
                       mx::StreamOrDevice where) {
  const auto stream = mx::to_stream(where);
  const auto* position = std::get_if<mx::array>(&offset);
  const bool is_known =
      !position ||
      (mx::issubdtype(position->dtype(), mx::integer) &&
       (position->size() == 1 || (position->ndim() == 1 && x.ndim() > 0 && position->shape(0) == x.shape(0))));
  const bool applies = is_on_cpu(stream) && is_float(x.dtype()) && x.ndim() == 4 && dims > 0 && dims % 2 == 0 &&
                       dims <= x.shape(3) && is_known && base.has_value() != frequencies.has_value() &&
                       (!frequencies || (frequencies->dtype() == mx::float32 && frequencies->ndim() == 1 &&
                                         frequencies->shape(0) == dims / 2));
  if (!applies) {
    return position ? mx::fast::rope(x, dims, traditional, base, scale, *position, frequencies, stream)
                    : mx::fast::rope(x, dims, traditional, base, scale, std::get<int>(offset), frequencies, stream);
  }
  const RotationOptions options{dims, traditional, scale, frequencies.has_value(), base.value_or(0)};
  const auto used = frequencies ? mx::reciprocal(*frequencies, stream) : frequencies_of(*base, dims / 2, stream);
  const auto first = position ? mx::astype(*position, mx::int32, stream) : mx::array(std::get<int>(offset), mx::int32);
  return mx::array(x.shape(), x.dtype(), std::make_shared<Rotate>(stream, options), {x, used, first});
}

mx::array make_attention(const mx::array& queries, const mx::array& keys, const mx::array& values, float scale,
                         const std::variant<std::monostate, std::string, mx::array>& mask,
                         const std::optional<mx::array>& sinks, bool force_fused, mx::StreamOrDevice where) {
  const auto stream = mx::to_stream(where);
  const auto* mode = std::get_if<std::string>(&mask);
  const auto* given = std::get_if<mx::array>(&mask);
  const auto is_alike = [&](const mx::array& array) { return array.dtype() == queries.dtype() && array.ndim() == 4; };
  const bool applies =
      is_on_cpu(stream) && !force_fused && is_float(queries.dtype()) && is_alike(queries) && is_alike(keys) &&
      is_alike(values) && (!mode || *mode == "causal") &&
      (!given || ((given->dtype() == mx::bool_ || given->dtype() == queries.dtype()) && given->ndim() <= 4)) &&
      keys.shape(0) == queries.shape(0) && values.shape(0) == queries.shape(0) && keys.shape(1) == values.shape(1) &&
      keys.shape(1) > 0 && queries.shape(1) % keys.shape(1) == 0 && keys.shape(2) == values.shape(2) &&
      see_keys(mode != nullptr, queries.shape(2), keys.shape(2)) && keys.shape(3) == queries.shape(3) &&
      queries.shape(3) <= kMostHeadSize && values.shape(3) <= kMostHeadSize &&
      (!sinks || (sinks->dtype() == mx::float32 && sinks->ndim() == 1 && sinks->shape(0) == queries.shape(1)));
  if (!applies) {
    return mx::fast::scaled_dot_product_attention(queries, keys, values, scale, mode ? *mode : "",
                                                  given ? std::optional(*given) : std::nullopt, sinks, force_fused,
                                                  stream);
  }
  return attend({queries, keys, values}, keys.shape(2), values.shape(3), scale, mode != nullptr, given, sinks, {},
                stream);
}

std::optional<mx::array> make_quantized_attention(const mx::array& queries, const std::vector<mx::array>& keys,
                                                  const std::vector<mx::array>& values, float scale,
                                                  const std::variant<std::monostate, std::string, mx::array>& mask,
                                                  int group_size, int bits) {
  const auto stream = mx::to_stream({});
  const auto* mode = std::get_if<std::string>(&mask);
  const auto* given = std::get_if<mx::array>(&mask);
  const auto is_known = [&](const std::vector<mx::array>& parts) {
    return parts.size() == 3 && parts[0].ndim() == 4 && mx::result_type(queries, parts[1]) == queries.dtype() &&
           parts[0].shape(0) == queries.shape(0) && parts[1].shape(3) * group_size <= kMostHeadSize &&
           applicable(stream, parts[0], parts[1], parts[2], group_size, bits, "affine");
  };
  if (!is_float(queries.dtype()) || queries.ndim() != 4 || !is_known(keys) || !is_known(values)) return std::nullopt;
  const int heads = queries.shape(1), kv_heads = keys[0].shape(1), length = keys[0].shape(2);
  const bool applies = kv_heads > 0 && heads % kv_heads == 0 && values[0].shape(1) == kv_heads &&
                       see_keys(mode != nullptr, queries.shape(2), length) && values[0].shape(2) == length &&
                       keys[1].shape(3) * group_size == queries.shape(3) && (!mode || *mode == "causal") &&
                       (!given || is_mask_of_queries(*given, queries));
  if (!applies) return std::nullopt;
  std::vector<mx::array> inputs{queries};
  for (const auto* parts : {&keys, &values}) inputs.insert(inputs.end(), parts->begin(), parts->end());
  const int width = values[1].shape(3) * group_size;
  return attend(std::move(inputs), length, width, scale, mode != nullptr, given, {}, Quantization{bits, group_size},
                stream);
}

mx::array make_layer_norm(const mx::array& x, const std::optional<mx::array>& weight,
                          const std::optional<mx::array>& bias, float epsilon, mx::StreamOrDevice where) {
  const auto stream = mx::to_stream(where);
  const auto is_known = [&](const std::optional<mx::array>& one) {
    return !one || (is_float(one->dtype()) && mx::result_type(x, *one) == x.dtype() && one->ndim() == 1 &&
                    one->shape(0) == x.shape(-1) && (!weight || one->dtype() == weight->dtype()));
  };
  if (!is_on_cpu(stream) || !is_float(x.dtype()) || x.ndim() == 0 || !is_known(weight) || !is_known(bias)) {
    return mx::fast::layer_norm(x, weight, bias, epsilon, stream);
  }
  std::vector<mx::array> inputs{x};
  for (const auto& one : {weight, bias}) {
    if (one) inputs.push_back(*one);
  }
  auto norm = std::make_shared<LayerNormalization>(stream, epsilon, weight.has_value(), bias.has_value());
  return mx::array(x.shape(), x.dtype(), std::move(norm), std::move(inputs));
}

mx::array make_swiglu(const mx::array& gate, const mx::array& up) {
  const auto stream = mx::to_stream({});
  if (!is_on_cpu(stream) || !is_float(gate.dtype()) || up.dtype() != gate.dtype() || gate.shape() != up.shape() ||
      gate.ndim() == 0) {
    return gate * mx::sigmoid(gate, stream) * up;
  }
  return mx::array(gate.shape(), gate.dtype(), std::make_shared<GatedActivation>(stream, Activation::silu), {gate, up});
}

mx::array make_gelu(const mx::array& x, bool by_tanh) {
  const auto stream = mx::to_stream({});
  const auto activation = by_tanh ? Activation::gelu_tanh : Activation::gelu_sigmoid;
  if (!is_on_cpu(stream) || !is_float(x.dtype()) || x.ndim() == 0) return activated(activation, x, stream);
  return mx::array(x.shape(), x.dtype(), std::make_shared<GatedActivation>(stream, activation), {x});
}

}  // namespace mlx_cpu_kernels
