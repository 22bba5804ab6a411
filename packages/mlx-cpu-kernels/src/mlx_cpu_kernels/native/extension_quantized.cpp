// Primitives of products with quantized weights and of dequantization, and the functions that build them.

#include "extension_quantized.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "extension.h"
#include "quantized.h"

namespace mlx_cpu_kernels {
namespace {

// MLX's names of the modes, and their bits and groups where none are given.
struct NamedMode {
  const char* name;
  Quantization defaults;
};
constexpr NamedMode kModes[] = {
    {"affine", {4, 64, Mode::affine}},
    {"mxfp4", {4, 32, Mode::mxfp4}},
    {"nvfp4", {4, 16, Mode::nvfp4}},
    {"mxfp8", {8, 32, Mode::mxfp8}},
};

const NamedMode* find_mode(const std::string& name) {
  const auto found = std::find_if(std::begin(kModes), std::end(kModes), [&](auto& mode) { return name == mode.name; });
  return found == std::end(kModes) ? nullptr : found;
}

std::string name_of(Mode mode) {
  return std::find_if(std::begin(kModes), std::end(kModes), [&](auto& each) { return each.defaults.mode == mode; })
      ->name;
}

bool is_supported(const Quantization& quantization, const Quantization& defaults) {
  if (quantization.mode != Mode::affine) return quantization == defaults;
  const auto [bits, size, mode] = quantization;
  return (bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8) &&
         (size == 32 || size == 64 || size == 128);
}

bool have_types(const mx::array& scales, const std::optional<mx::array>& biases, Mode mode) {
  if (mode != Mode::affine) return scales.dtype() == mx::uint8 && !biases;
  return biases && is_float(scales.dtype()) && scales.dtype() == biases->dtype() && scales.shape() == biases->shape();
}

// The product's type: in the affine mode, the scales' takes part.
mx::Dtype product_type(const mx::array& x, const mx::array& scales, const Quantization& quantization) {
  return quantization.mode == Mode::affine ? mx::result_type(x, scales) : x.dtype();
}

std::vector<mx::array> inputs_of(const mx::array& weights, const mx::array& scales,
                                 const std::optional<mx::array>& biases) {
  std::vector<mx::array> inputs{weights, scales};
  if (biases) inputs.push_back(*biases);
  return inputs;
}

// The biases among inputs of which the first part is the `first`th, as MLX's own operations take them.
std::optional<mx::array> biases_of(const std::vector<mx::array>& inputs, size_t first,
                                   const Quantization& quantization) {
  return quantization.parts() == 3 ? std::optional(inputs[first + 2]) : std::nullopt;
}

}  // namespace

std::optional<Quantization> applicable(const mx::Stream& stream, const mx::array& weights, const mx::array& scales,
                                       const std::optional<mx::array>& biases, std::optional<int> group_size,
                                       std::optional<int> bits, const std::string& mode) {
  const auto* named = find_mode(mode);
  if (!named) return std::nullopt;
  const auto& defaults = named->defaults;
  const Quantization quantization{bits.value_or(defaults.bits), group_size.value_or(defaults.group_size),
                                  defaults.mode};
  const bool applies =
      is_on_cpu(stream) && is_supported(quantization, defaults) && have_types(scales, biases, quantization.mode) &&
      weights.dtype() == mx::uint32 && weights.ndim() >= 2 && scales.ndim() == weights.ndim() &&
      std::equal(weights.shape().begin(), weights.shape().end() - 1, scales.shape().begin()) &&
      int64_t{weights.shape(-1)} * 32 == int64_t{scales.shape(-1)} * quantization.group_size * quantization.bits &&
      int64_t{scales.shape(-1)} * quantization.group_size % 32 == 0;
  return applies ? std::optional(quantization) : std::nullopt;
}

std::vector<mx::array> quantized_inputs(const std::vector<mx::array>& inputs, size_t count, size_t first,
                                        mx::cpu::CommandEncoder& encoder) {
  std::vector<mx::array> rows;
  for (size_t input = 0; input < count; ++input) rows.push_back(with_dense_rows(inputs[input], encoder));
  if (count < first + 3) return rows;
  auto &scales = rows[first + 1], &biases = rows[first + 2];
  if (scales.strides() != biases.strides()) {
    scales = dense(scales, encoder);
    biases = dense(biases, encoder);
  }
  return rows;
}

Quantized first_matrix(const mx::array& weights, const mx::array& scales, const std::optional<mx::array>& biases,
                       const Quantization& quantization) {
  const Type byte = quantization.mode == Mode::nvfp4 ? Type::e4m3 : Type::e8m0;
  return {
      .weights = weights.data<uint32_t>(),
      .scales = scales.data<char>(),
      .biases = biases ? biases->data<char>() : nullptr,
      .type = scales.dtype() == mx::uint8 ? byte : type_of(scales.dtype()),
      .bits = quantization.bits,
      .group_size = quantization.group_size,
      .rows = weights.shape(-2),
      .columns = static_cast<int64_t>(scales.shape(-1)) * quantization.group_size,
      .row_words = weights.strides(-2),
      .row_groups = scales.strides(-2),
      .mode = quantization.mode,
  };
}

namespace {

// True if the rows of all leading axes lie one behind the other, `stride` elements apart.
bool has_even_rows(const mx::array& x, int64_t& stride) {
  stride = x.ndim() > 1 ? x.strides(-2) : x.shape(-1);
  int64_t expected = stride;
  bool is_first = true;
  for (int axis = x.ndim() - 2; axis >= 0; --axis) {
    if (x.shape(axis) == 1) continue;
    if (is_first) {
      stride = expected = x.strides(axis);
      is_first = false;
    } else if (x.strides(axis) != expected) {
      return false;
    }
    expected *= x.shape(axis);
  }
  return true;
}

mx::Shape leading_axes(const mx::array& array) { return {array.shape().begin(), array.shape().end() - 2}; }

// Strides of the first `axes` axes of an array, as those of `leading`, to which it is broadcast.
mx::Strides spread(const mx::array& array, int axes, const mx::Shape& leading) {
  mx::Strides strides(leading.size(), 0);
  for (int axis = 0, at = static_cast<int>(leading.size()) - axes; axis < axes; ++axis, ++at) {
    if (array.shape(axis) != 1) strides[at] = array.strides(axis);
  }
  return strides;
}

Offsets leading_offsets(const mx::array& array, const mx::Shape& leading) {
  return {leading, spread(array, array.ndim() - 2, leading), static_cast<int>(leading.size())};
}

// Weights, scales and biases of one matrix, the `index`th of the axes to which theirs are broadcast. They are the
// inputs from the `first`th on.
class Matrices {
 public:
  Matrices(const std::vector<mx::array>& inputs, size_t first, const Quantization& quantization,
           const mx::Shape& leading)
      : first_(first_matrix(inputs[first], inputs[first + 1], biases_of(inputs, first, quantization), quantization)),
        weights_(leading_offsets(inputs[first], leading)),
        scales_(leading_offsets(inputs[first + 1], leading)),
        biases_(leading_offsets(inputs[first + quantization.parts() - 1], leading)),
        size_(inputs[first + 1].itemsize()) {}

  Matrices(const std::vector<mx::array>& inputs, size_t first, const Quantization& quantization)
      : Matrices(inputs, first, quantization, leading_axes(inputs[first])) {}

  Quantized operator[](int64_t index) const {
    Quantized matrix = first_;
    matrix.weights += weights_[index];
    matrix.scales = static_cast<const char*>(matrix.scales) + scales_[index] * size_;
    if (matrix.biases) matrix.biases = static_cast<const char*>(matrix.biases) + biases_[index] * size_;
    return matrix;
  }

 private:
  Quantized first_;
  Offsets weights_, scales_, biases_;
  int64_t size_;
};

// x (..., M, K) times quantized weights (N, K), or (K, N) where not transposed; each may have further leading axes.
class QuantizedProduct : public CpuPrimitive {
 public:
  QuantizedProduct(mx::Stream stream, Quantization quantization, bool transpose)
      : CpuPrimitive(stream), quantization_(quantization), transpose_(transpose) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& y = outputs[0];
    y.set_data(mx::allocator::malloc(y.nbytes()));
    if (y.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const auto dense = quantized_inputs(inputs, 1 + quantization_.parts(), 1, encoder);
    const auto& x = dense[0];
    const auto& weights = dense[1];
    if (x.shape(-1) == 0) {  // sums of nothing
      encoder.dispatch([y = y.data<char>(), size = y.nbytes()] { std::memset(y, 0, size); });
      return;
    }
    const int64_t columns = y.shape(-1), type_size = y.itemsize();
    const auto type = type_of(y.dtype());
    int64_t stride = 0;
    if (weights.ndim() == 2 && has_even_rows(x, stride)) {
      const Matrices matrices(dense, 1, quantization_);
      encoder.dispatch([=, transpose = transpose_, x = x.data<void>(), y = y.data<void>(),
                        rows = static_cast<int64_t>(y.size()) / columns] {
        compute(transpose, x, type, stride, rows, matrices[0], y, columns);
      });
      return;
    }
    // One product for each combination of the leading axes. Axes that share a matrix are joined to its rows.
    const auto leading = leading_axes(y);
    const Matrices matrices(dense, 1, quantization_, leading);
    const auto x_strides = spread(x, x.ndim() - 2, leading);
    int axes = static_cast<int>(leading.size());
    int64_t rows = x.shape(-2);
    stride = x.shape(-2) == 1 && axes > 0 ? x_strides[axes - 1] : x.strides(-2);
    while (axes > 0 && is_shared(dense, leading, axes - 1) &&
           (leading[axes - 1] == 1 || x_strides[axes - 1] == rows * stride)) {
      rows *= leading[--axes];
    }
    if (x.shape(-2) == 1 && rows == 1) stride = x.shape(-1);
    const int64_t count = static_cast<int64_t>(y.size()) / (rows * columns);
    encoder.dispatch([=, transpose = transpose_, x = x.data<char>(), y = y.data<char>(),
                      x_offsets = Offsets(leading, x_strides, axes), matrix_step = matrix_step(leading, axes)] {
      for (int64_t index = 0; index < count; ++index) {
        compute(transpose, x + x_offsets[index] * type_size, type, stride, rows, matrices[index * matrix_step],
                y + index * rows * columns * type_size, columns);
      }
    });
  }

  std::vector<mx::array> stock(const std::vector<mx::array>& inputs) override {
    return {mx::quantized_matmul(inputs[0], inputs[1], inputs[2], biases_of(inputs, 1, quantization_), transpose_,
                                 quantization_.group_size, quantization_.bits, name_of(quantization_.mode), stream())};
  }

  const char* name() const override { return "QuantizedProduct"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& same = static_cast<const QuantizedProduct&>(other);
    return quantization_ == same.quantization_ && transpose_ == same.transpose_;
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    const auto &x = inputs[0], &weights = inputs[1];
    auto shape = x.shape();
    if (weights.ndim() > 2) {
      shape = mx::broadcast_shapes(leading_axes(x), leading_axes(weights));
      shape.insert(shape.end(), {x.shape(-2), 0});
    }
    shape.back() = transpose_ ? weights.shape(-2) : inputs[2].shape(-1) * quantization_.group_size;
    return {shape};
  }

  static void compute(bool transpose, const void* x, Type type, int64_t stride, int64_t rows, const Quantized& matrix,
                      void* y, int64_t y_stride) {
    if (transpose) {
      multiply_transposed(x, type, stride, rows, matrix, y, y_stride, threads());
    } else {
      multiply(x, type, stride, rows, matrix, y, y_stride, threads());
    }
  }

 private:
  static bool is_shared(const std::vector<mx::array>& inputs, const mx::Shape& leading, int axis) {
    return std::all_of(inputs.begin() + 1, inputs.end(), [&](auto& input) {
      return leading[axis] == 1 || spread(input, input.ndim() - 2, leading)[axis] == 0;
    });
  }

  // Number of matrices from one combination of the first `axes` axes to the next.
  static int64_t matrix_step(const mx::Shape& leading, int axes) {
    int64_t step = 1;
    for (size_t axis = axes; axis < leading.size(); ++axis) step *= leading[axis];
    return step;
  }

  Quantization quantization_;
  bool transpose_;
};

// Products of a Mixture of Experts: each row of x (..., 1, K) times the matrix that its index names. The weights are
// (E, N, K), or (E, K, N) where not transposed.
// The result without its last two axes has the shape to which indices and x are broadcast.
class GatheredProduct : public CpuPrimitive {
 public:
  GatheredProduct(mx::Stream stream, Quantization quantization, bool transpose)
      : CpuPrimitive(stream), quantization_(quantization), transpose_(transpose) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& y = outputs[0];
    y.set_data(mx::allocator::malloc(y.nbytes()));
    if (y.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    if (inputs[0].shape(-1) == 0) {  // sums of nothing
      encoder.dispatch([y = y.data<char>(), size = y.nbytes()] { std::memset(y, 0, size); });
      return;
    }
    const auto dense = quantized_inputs(inputs, 1 + quantization_.parts(), 1, encoder);
    const auto& x = dense[0];
    const auto& indices = inputs.back();
    const Matrices matrices(dense, 1, quantization_);
    const auto leading = leading_axes(y);
    const Experts experts{matrices[0], dense[1].strides(0), dense[2].strides(0)};
    const auto multiply = transpose_ ? gather_multiply_transposed : gather_multiply;
    encoder.dispatch(
        [=, x = x.data<void>(), y = y.data<void>(), type = type_of(y.dtype()), columns = y.shape(-1),
         rows = y.size() / y.shape(-1), indices = indices.data<uint32_t>(), count = dense[1].shape(0),
         x_offsets = leading_offsets(x, leading),
         at = Offsets(leading, spread(indices, indices.ndim(), leading), static_cast<int>(leading.size()))] {
          std::vector<GatherPair> pairs(rows);
          for (size_t row = 0; row < rows; ++row) {
            const auto expert = static_cast<int64_t>(indices[at[row]]);
            if (expert >= count)
              throw std::out_of_range("gather_qmm: no matrix has the index " + std::to_string(expert));
            pairs[row] = {x_offsets[row], expert, static_cast<int64_t>(row)};  // with a stride of 1, an offset is a row
          }
          multiply(x, type, 1, pairs.data(), rows, experts, y, columns, threads());
        });
  }

  std::vector<mx::array> stock(const std::vector<mx::array>& inputs) override {
    return {mx::gather_qmm(inputs[0], inputs[1], inputs[2], biases_of(inputs, 1, quantization_), std::nullopt,
                           inputs.back(), transpose_, quantization_.group_size, quantization_.bits,
                           name_of(quantization_.mode), std::nullopt, false, stream())};
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    auto shape = mx::broadcast_shapes(leading_axes(inputs[0]), inputs.back().shape());
    shape.push_back(1);
    shape.push_back(transpose_ ? inputs[1].shape(-2) : inputs[2].shape(-1) * quantization_.group_size);
    return {shape};
  }

  const char* name() const override { return "GatheredProduct"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& same = static_cast<const GatheredProduct&>(other);
    return quantization_ == same.quantization_ && transpose_ == same.transpose_;
  }

 private:
  Quantization quantization_;
  bool transpose_;
};

// The numbers of quantized weights (..., K).
class Dequantization : public CpuPrimitive {
 public:
  Dequantization(mx::Stream stream, Quantization quantization, mx::Dtype type)
      : CpuPrimitive(stream), quantization_(quantization), type_(type) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& y = outputs[0];
    y.set_data(mx::allocator::malloc(y.nbytes()));
    if (y.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const auto dense = quantized_inputs(inputs, quantization_.parts(), 0, encoder);
    const Matrices matrices(dense, 0, quantization_);
    const int64_t size = static_cast<int64_t>(y.shape(-2)) * y.shape(-1);
    encoder.dispatch([=, count = static_cast<int64_t>(y.size()) / size, type = type_of(y.dtype()),
                      bytes = size * static_cast<int64_t>(y.itemsize()), y = y.data<char>()] {
      for (int64_t index = 0; index < count; ++index) {
        const auto matrix = matrices[index];
        dequantize(matrix, 0, matrix.rows, y + index * bytes, type, threads());
      }
    });
  }

  std::vector<mx::array> stock(const std::vector<mx::array>& inputs) override {
    return {mx::dequantize(inputs[0], inputs[1], biases_of(inputs, 0, quantization_), quantization_.group_size,
                           quantization_.bits, name_of(quantization_.mode), std::nullopt, type_, stream())};
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    auto shape = inputs[0].shape();
    shape.back() = inputs[1].shape(-1) * quantization_.group_size;
    return {shape};
  }

  const char* name() const override { return "Dequantization"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& same = static_cast<const Dequantization&>(other);
    return quantization_ == same.quantization_ && type_ == same.type_;
  }

 private:
  Quantization quantization_;
  mx::Dtype type_;
};

}  // namespace

mx::array make_product(const mx::array& x, const mx::array& weights, const mx::array& scales,
                       const std::optional<mx::array>& biases, bool transpose, std::optional<int> group_size,
                       std::optional<int> bits, const std::string& mode, mx::StreamOrDevice stream_or_device) {
  const auto stream = mx::to_stream(stream_or_device);
  const auto quantization = applicable(stream, weights, scales, biases, group_size, bits, mode);
  const bool is_plain = quantization && is_float(x.dtype()) && x.ndim() >= 1 && (weights.ndim() == 2 || x.ndim() > 2);
  if (!is_plain) return mx::quantized_matmul(x, weights, scales, biases, transpose, group_size, bits, mode, stream);
  const int columns = scales.shape(-1) * quantization->group_size;
  if (x.shape(-1) != (transpose ? columns : weights.shape(-2))) {  // MLX's own error
    return mx::quantized_matmul(x, weights, scales, biases, transpose, group_size, bits, mode, stream);
  }
  const auto type = product_type(x, scales, *quantization);
  auto inputs = inputs_of(weights, scales, biases);
  inputs.insert(inputs.begin(), mx::astype(x, type, stream));
  auto product = std::make_shared<QuantizedProduct>(stream, *quantization, transpose);
  auto shape = product->output_shapes(inputs)[0];
  return mx::array(std::move(shape), type, std::move(product), std::move(inputs));
}

mx::array make_gathered_product(const mx::array& x, const mx::array& weights, const mx::array& scales,
                                const std::optional<mx::array>& biases, const std::optional<mx::array>& lhs_indices,
                                const std::optional<mx::array>& rhs_indices, bool transpose,
                                std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
                                const std::optional<mx::array>& global_scale, bool sorted_indices,
                                mx::StreamOrDevice stream_or_device) {
  const auto stream = mx::to_stream(stream_or_device);
  const auto quantization = applicable(stream, weights, scales, biases, group_size, bits, mode);
  const int columns = quantization ? scales.shape(-1) * quantization->group_size : 0;
  const bool is_plain = quantization && !lhs_indices && rhs_indices && !global_scale && is_float(x.dtype()) &&
                        weights.ndim() == 3 && x.ndim() >= 2 && x.shape(-2) == 1 &&
                        mx::issubdtype(rhs_indices->dtype(), mx::integer) &&
                        x.shape(-1) == (transpose ? columns : weights.shape(-2));
  if (!is_plain) {
    return mx::gather_qmm(x, weights, scales, biases, lhs_indices, rhs_indices, transpose, group_size, bits, mode,
                          global_scale, sorted_indices, stream);
  }
  const auto type = product_type(x, scales, *quantization);
  auto inputs = inputs_of(weights, scales, biases);
  inputs.insert(inputs.begin(), mx::astype(x, type, stream));
  inputs.push_back(mx::astype(*rhs_indices, mx::uint32, stream));
  auto product = std::make_shared<GatheredProduct>(stream, *quantization, transpose);
  auto shape = product->output_shapes(inputs)[0];
  return mx::array(std::move(shape), type, std::move(product), std::move(inputs));
}

mx::array make_dequantized(const mx::array& weights, const mx::array& scales, const std::optional<mx::array>& biases,
                           std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
                           const std::optional<mx::array>& global_scale, std::optional<mx::Dtype> dtype,
                           mx::StreamOrDevice stream_or_device) {
  const auto stream = mx::to_stream(stream_or_device);
  const auto quantization = applicable(stream, weights, scales, biases, group_size, bits, mode);
  const auto type = dtype.value_or(mode == "affine" ? scales.dtype() : mx::bfloat16);
  if (!quantization || global_scale || !is_float(type)) {
    return mx::dequantize(weights, scales, biases, group_size, bits, mode, global_scale, dtype, stream);
  }
  auto shape = weights.shape();
  shape.back() = scales.shape(-1) * quantization->group_size;
  return mx::array(std::move(shape), type, std::make_shared<Dequantization>(stream, *quantization, type),
                   inputs_of(weights, scales, biases));
}

}  // namespace mlx_cpu_kernels
