// Products of a transformer's layer together with what comes before and after them.

#include "extension_fused.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <utility>

#include "extension.h"
#include "extension_layers.h"
#include "extension_quantized.h"
#include "fused.h"
#include "half.h"

namespace mlx_cpu_kernels {
namespace {

using Arrays = std::vector<mx::array>;

// Memory for as long as an operation computes, aligned to a cache line.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : memory_(std::aligned_alloc(kLine, (bytes + 2 * kLine - 1) / kLine * kLine)) {
    if (!memory_) throw std::bad_alloc();
  }
  void* data() const { return memory_.get(); }

 private:
  static constexpr int64_t kLine = 64;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
};

struct Linear {
  Quantization quantization;
  bool has_addend;
};

// Products of one x (..., K), which is normalized before where an epsilon is given. The inputs are x, the norm's weight,
// then weights, scales, biases and addend of each linear layer, and whatever a derived operation needs.
class FusedProducts : public CpuPrimitive {
 public:
  FusedProducts(mx::Stream stream, std::optional<float> epsilon, std::vector<Linear> linears)
      : CpuPrimitive(stream), epsilon_(epsilon), linears_(std::move(linears)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs);
    if (outputs[0].size() == 0) return;
    const auto x = rows_of(inputs[0], encoder);
    Task task{.rows = static_cast<int64_t>(x.size()) / columns(inputs), .columns = columns(inputs),
              .type = type_of(x.dtype()), .x = x.data<void>()};
    size_t next = 1;
    if (epsilon_) {
      task.epsilon = epsilon_;
      task.norm_type = type_of(inputs[next].dtype());
      task.norm = dense(inputs[next++], encoder).data<void>();
    }
    for (const auto& linear : linears_) {
      const auto parts = quantized_inputs({inputs[next], inputs[next + 1], inputs[next + 2]}, 3, 0, encoder);
      task.products.push_back({first_matrix(parts[0], parts[1], parts[2], linear.quantization), nullptr, 0});
      next += 3;
      task.addends.push_back(linear.has_addend ? dense(inputs[next++], encoder).data<void>() : nullptr);
    }
    finish(std::move(task), Arrays(inputs.begin() + next, inputs.end()), outputs, encoder);
  }

  // By separate operations, whose derivatives are MLX's own.
  Arrays stock(const Arrays& inputs) override {
    size_t next = 1;
    auto x = flat(inputs[0]);
    if (epsilon_) x = make_rms_norm(x, inputs[next++], *epsilon_, stream());
    Arrays products;
    for (const auto& [quantization, has_addend] : linears_) {
      products.push_back(make_product(x, inputs[next], inputs[next + 1], inputs[next + 2], true,
                                      static_cast<int>(quantization.group_size), static_cast<int>(quantization.bits),
                                      "affine", stream()));
      next += 3;
      if (has_addend) products.back() = mx::add(products.back(), inputs[next++], stream());
    }
    return stock_end(std::move(products), Arrays(inputs.begin() + next, inputs.end()));
  }

 protected:
  struct Task {
    int64_t rows, columns;
    Type type;
    const void* x;
    std::optional<float> epsilon = std::nullopt;
    Type norm_type = Type::float32;
    const void* norm = nullptr;
    std::vector<Product> products = {};
    std::vector<const void*> addends = {};

    // Computes the products, whose results have their places by now.
    void multiply() const {
      if (epsilon) {
        const Buffer normalized(rows * columns * size_of(type));
        rms_norm({.rows = rows, .columns = columns, .x = {x, type, columns}, .weight = norm, .weight_type = norm_type,
                  .epsilon = *epsilon, .y = normalized.data(), .y_stride = columns}, threads());
        multiply_all(normalized.data());
      } else {
        multiply_all(x);
      }
    }

   private:
    void multiply_all(const void* from) const {
      multiply_transposed(from, type, columns, rows, products.data(), static_cast<int>(products.size()), threads());
      for (size_t i = 0; i < products.size(); ++i) {
        const auto& [w, y, stride] = products[i];
        if (addends[i]) add_rows({addends[i], type, 0}, rows, w.rows, y, stride, threads());
      }
    }
  };

  virtual void allocate(Arrays& outputs) const {
    for (auto& out : outputs) out.set_data(mx::allocator::malloc(out.nbytes()));
  }
  // x with rows of K numbers, one behind the other.
  virtual mx::array rows_of(const mx::array& x, mx::cpu::CommandEncoder& encoder) const { return dense(x, encoder); }
  // The same for MLX's own operations.
  virtual mx::array flat(const mx::array& x) { return x; }
  virtual void finish(Task task, const Arrays& others, Arrays& outputs, mx::cpu::CommandEncoder& encoder) const = 0;
  virtual Arrays stock_end(Arrays products, const Arrays& others) = 0;

  // The rows of linear layer `index`'s weights.
  int rows_of_weights(const Arrays& inputs, size_t index) const {
    size_t next = epsilon_ ? 2 : 1;
    for (size_t i = 0; i < index; ++i) next += linears_[i].has_addend ? 4 : 3;
    return inputs[next].shape(0);
  }

 private:
  int64_t columns(const Arrays& inputs) const {
    return static_cast<int64_t>(inputs[epsilon_ ? 3 : 2].shape(-1)) * linears_[0].quantization.group_size;
  }

  std::optional<float> epsilon_;
  std::vector<Linear> linears_;
};

struct HeadOptions {
  std::vector<int> heads;                 // of queries, keys and values
  std::vector<float> epsilons;            // of the norms of queries and keys
  std::optional<int> dims = std::nullopt;  // rotated elements
  bool is_traditional = false;
  std::optional<float> base = std::nullopt;
  float scale = 1;
  int offset = 0;
  bool has_offsets = false;  // given by an array
};

// Further inputs: weights of the norms by head, frequencies (dims / 2), and offsets () or (batch).
class HeadProducts : public FusedProducts {
 public:
  HeadProducts(mx::Stream stream, std::optional<float> epsilon, std::vector<Linear> linears, HeadOptions options)
      : FusedProducts(stream, epsilon, std::move(linears)), options_(std::move(options)) {}

  int output_count() const override { return static_cast<int>(options_.heads.size()); }
  const char* name() const override { return "CpuHeadProducts"; }
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const auto& x = inputs[0];
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i < options_.heads.size(); ++i) {
      const int heads = options_.heads[i];
      shapes.push_back({x.shape(0), heads, x.shape(1), rows_of_weights(inputs, i) / heads});
    }
    return shapes;
  }

 protected:
  // A token's heads lie side by side, as the product writes them.
  void allocate(Arrays& outputs) const override {
    for (auto& out : outputs) {
      const int64_t heads = out.shape(1), tokens = out.shape(2), size = out.shape(3);
      const bool is_plain = heads == 1 || tokens == 1;
      out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), {tokens * heads * size, size, heads * size, 1},
                   {true, is_plain, out.size() <= 1});
    }
  }

  void finish(Task task, const Arrays& others, Arrays& outputs, mx::cpu::CommandEncoder& encoder) const override {
    std::vector<RmsNorm> norms;
    std::vector<Rope> rotations;
    std::vector<float> frequencies;
    const int64_t normed = static_cast<int64_t>(options_.epsilons.size());
    mx::array offsets = options_.has_offsets ? dense(others.back(), encoder) : mx::array(0);
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto& out = outputs[i];
      const int64_t size = out.shape(3), width = out.shape(1) * size;
      task.products[i].y = out.data<void>();
      task.products[i].y_stride = width;
      if (i == 2) break;  // values
      if (normed) {
        norms.push_back({.rows = task.rows * out.shape(1), .columns = size, .x = {out.data<void>(), task.type, size},
                         .weight = dense(others[i], encoder).data<void>(), .weight_type = type_of(others[i].dtype()),
                         .epsilon = options_.epsilons[i], .y = out.data<void>(), .y_stride = size});
      }
      if (options_.dims) {
        rotations.push_back({.batches = out.shape(0), .heads = out.shape(1), .length = out.shape(2), .head_size = size,
                             .type = task.type,
                             .x = {out.data<void>(), {out.strides(0), out.strides(1), out.strides(2)}},
                             .y = {out.data<void>(), {out.strides(0), out.strides(1), out.strides(2)}},
                             .dims = *options_.dims, .traditional = options_.is_traditional, .base = 0,
                             .frequencies = options_.dims ? dense(others[normed], encoder).data<float>() : nullptr,
                             .scale = options_.scale,
                             .offsets = options_.has_offsets ? offsets.data<int32_t>() : nullptr,
                             .offset_stride = options_.has_offsets && offsets.size() > 1 ? 1 : 0});
      }
    }
    encoder.dispatch([task = std::move(task), norms = std::move(norms), rotations = std::move(rotations),
                      offset = static_cast<int32_t>(options_.offset), is_inverse = !options_.base]() {
      task.multiply();
      for (const auto& norm : norms) rms_norm(norm, threads());
      std::vector<float> frequencies;
      for (auto rotation : rotations) {
        if (is_inverse) {  // given ones are the reciprocals of those that are used
          if (frequencies.empty()) {
            frequencies.assign(rotation.frequencies, rotation.frequencies + rotation.dims / 2);
            for (auto& frequency : frequencies) frequency = 1 / frequency;
          }
          rotation.frequencies = frequencies.data();
        }
        if (!rotation.offsets) rotation.offsets = &offset;
        rope(rotation, threads());
      }
    });
  }

  Arrays stock_end(Arrays products, const Arrays& others) override {
    Arrays results;
    for (size_t i = 0; i < products.size(); ++i) {
      auto shape = products[i].shape();
      auto heads = mx::reshape(products[i], {shape[0], shape[1], options_.heads[i], -1}, stream());
      if (i < options_.epsilons.size()) heads = mx::fast::rms_norm(heads, others[i], options_.epsilons[i], stream());
      heads = mx::transpose(heads, {0, 2, 1, 3}, stream());
      if (i < 2 && options_.dims) heads = stock_rotated(heads, others);
      results.push_back(std::move(heads));
    }
    return results;
  }

 private:
  mx::array stock_rotated(const mx::array& heads, const Arrays& others) {
    const auto offset = options_.has_offsets ? others.back() : mx::array(options_.offset, mx::int32);
    const auto frequencies = options_.base ? std::nullopt : std::optional(others[options_.epsilons.size()]);
    return mx::fast::rope(heads, *options_.dims, options_.is_traditional, options_.base, options_.scale, offset,
                          frequencies, stream());
  }

  HeadOptions options_;
};

// Linear layers: gate and up.
class GatedProducts : public FusedProducts {
 public:
  using FusedProducts::FusedProducts;

  const char* name() const override { return "CpuGatedProducts"; }
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    auto shape = inputs[0].shape();
    shape.back() = rows_of_weights(inputs, 0);
    return {shape};
  }

 protected:
  void finish(Task task, const Arrays&, Arrays& outputs, mx::cpu::CommandEncoder& encoder) const override {
    auto* y = outputs[0].data<void>();
    const int64_t width = outputs[0].shape(-1);
    for (auto& product : task.products) product.y_stride = width;
    task.products[1].y = y;
    encoder.dispatch([task = std::move(task), y, width]() mutable {
      const Buffer gate(task.rows * width * size_of(task.type));
      task.products[0].y = gate.data();
      task.multiply();
      gated_activation(Activation::silu, {gate.data(), task.type, width}, y, width, task.rows, width, y, width,
                       threads());
    });
  }

  Arrays stock_end(Arrays products, const Arrays&) override {
    const auto& gate = products[0];
    return {gate * mx::sigmoid(gate, stream()) * products[1]};
  }
};

// Further input: the residual, of the result's shape.
class AddedProduct : public FusedProducts {
 public:
  using FusedProducts::FusedProducts;

  const char* name() const override { return "CpuAddedProduct"; }
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override { return {inputs.back().shape()}; }

 protected:
  mx::array rows_of(const mx::array& x, mx::cpu::CommandEncoder& encoder) const override {
    if (x.ndim() != 4) return dense(x, encoder);
    mx::array heads(mx::Shape{x.shape(0), x.shape(2), x.shape(1), x.shape(3)}, x.dtype(), nullptr, {});
    const mx::Strides strides{x.strides(0), x.strides(2), x.strides(1), x.strides(3)};
    bool is_dense = true;
    int64_t expected = 1;
    for (int axis = 3; axis >= 0; --axis) {
      is_dense = is_dense && (heads.shape(axis) == 1 || strides[axis] == expected);
      expected *= heads.shape(axis);
    }
    auto flags = x.flags();
    flags.row_contiguous = is_dense;
    heads.copy_shared_buffer(x, strides, flags, x.data_size());
    return dense(heads, encoder);
  }

  mx::array flat(const mx::array& x) override {
    if (x.ndim() != 4) return x;
    return mx::reshape(mx::transpose(x, {0, 2, 1, 3}, stream()), {x.shape(0), x.shape(2), -1}, stream());
  }

  void finish(Task task, const Arrays& others, Arrays& outputs, mx::cpu::CommandEncoder& encoder) const override {
    const auto residual = dense(others[0], encoder);
    const int64_t width = outputs[0].shape(-1);
    task.products[0].y = outputs[0].data<void>();
    task.products[0].y_stride = width;
    encoder.dispatch([task = std::move(task), width, residual = residual.data<void>()] {
      task.multiply();
      add_rows({residual, task.type, width}, task.rows, width, task.products[0].y, width, threads());
    });
  }

  Arrays stock_end(Arrays products, const Arrays& others) override {
    return {mx::add(others[0], products[0], stream())};
  }
};

// The inputs that FusedProducts takes, if the kernels apply to all.
struct Inputs {
  Arrays arrays;
  std::optional<float> epsilon = std::nullopt;
  std::vector<Linear> linears = {};
};

bool is_norm_of(const NormLayer& norm, int64_t columns, mx::Dtype type) {
  const auto& weight = std::get<0>(norm);
  return weight.ndim() == 1 && weight.shape(0) == columns && is_float(weight.dtype()) &&
         mx::promote_types(weight.dtype(), type) == type;
}

std::optional<Inputs> gather(const mx::Stream& stream, const mx::array& x, int64_t columns,
                             const std::optional<NormLayer>& norm, const std::vector<LinearLayer>& linears) {
  if (!is_on_cpu(stream) || columns == 0 || !is_float(x.dtype()) || (norm && !is_norm_of(*norm, columns, x.dtype()))) return std::nullopt;
  Inputs inputs{.arrays = {x}};
  inputs.arrays.reserve(4 * linears.size() + 6);
  if (norm) {
    inputs.epsilon = std::get<1>(*norm);
    inputs.arrays.push_back(std::get<0>(*norm));
  }
  for (const auto& [weights, scales, biases, addend, group_size, bits] : linears) {
    const auto quantization = applicable(stream, weights, scales, biases, group_size, bits, "affine");
    if (!quantization || weights.ndim() != 2 ||
        int64_t{scales.shape(-1)} * group_size != columns || mx::promote_types(x.dtype(), scales.dtype()) != x.dtype()) {
      return std::nullopt;
    }
    inputs.arrays.insert(inputs.arrays.end(), {weights, scales, biases});
    if (addend) {
      if (addend->dtype() != x.dtype() || addend->ndim() != 1 || addend->shape(0) != weights.shape(0)) return std::nullopt;
      inputs.arrays.push_back(*addend);
    }
    inputs.linears.push_back({*quantization, addend.has_value()});
  }
  return inputs;
}

// Sets the rotation, and adds its inputs. False if it is none of the kernels'.
bool add_rotation(const Rotation& rotation, const std::variant<int, mx::array>& offset, int batch, int size,
                  const mx::Stream& stream, HeadOptions& options, Arrays& arrays) {
  const auto& [dims, is_traditional, base, scale, frequencies] = rotation;
  const auto* offsets = std::get_if<mx::array>(&offset);
  if (dims <= 0 || dims % 2 || dims > size || base.has_value() == frequencies.has_value()) return false;
  if (frequencies && (frequencies->dtype() != mx::float32 || frequencies->ndim() != 1 || frequencies->shape(0) != dims / 2)) {
    return false;
  }
  if (offsets && (offsets->dtype() != mx::int32 ||
                  !(offsets->size() == 1 || (offsets->ndim() == 1 && offsets->shape(0) == batch)))) {
    return false;
  }
  options.dims = dims;
  options.is_traditional = is_traditional;
  options.base = base;
  options.scale = scale;
  options.has_offsets = offsets != nullptr;
  options.offset = offsets ? 0 : std::get<int>(offset);
  arrays.push_back(frequencies ? *frequencies : frequencies_of(*base, dims / 2, stream));
  if (offsets) arrays.push_back(*offsets);
  return true;
}

}  // namespace

std::optional<std::vector<mx::array>> make_heads(
    const mx::array& x, const std::optional<NormLayer>& norm, const std::vector<LinearLayer>& linears,
    const std::vector<int>& heads, const std::vector<NormLayer>& head_norms, const std::optional<Rotation>& rotation,
    const std::variant<int, mx::array>& offset) {
  const auto stream = mx::to_stream({});
  if (x.ndim() != 3 || linears.size() != 3 || heads.size() != 3 || (!head_norms.empty() && head_norms.size() != 2)) {
    return std::nullopt;
  }
  auto inputs = gather(stream, x, x.shape(-1), norm, linears);
  if (!inputs) return std::nullopt;
  std::vector<mx::Shape> shapes;
  for (size_t i = 0; i < 3; ++i) {
    const int rows = std::get<0>(linears[i]).shape(0);
    if (heads[i] < 1 || rows % heads[i]) return std::nullopt;
    shapes.push_back({x.shape(0), heads[i], x.shape(1), rows / heads[i]});
  }
  HeadOptions options{.heads = heads, .epsilons = {}};
  for (size_t i = 0; i < head_norms.size(); ++i) {
    if (!is_norm_of(head_norms[i], shapes[i][3], x.dtype())) return std::nullopt;
    inputs->arrays.push_back(std::get<0>(head_norms[i]));
    options.epsilons.push_back(std::get<1>(head_norms[i]));
  }
  if (rotation && (shapes[0][3] != shapes[1][3] ||
                   !add_rotation(*rotation, offset, x.shape(0), shapes[0][3], stream, options, inputs->arrays))) {
    return std::nullopt;
  }
  auto products = std::make_shared<HeadProducts>(stream, inputs->epsilon, std::move(inputs->linears), std::move(options));
  return mx::array::make_arrays(std::move(shapes), {3, x.dtype()}, products, std::move(inputs->arrays));
}

std::optional<mx::array> make_gated(const mx::array& x, const std::optional<NormLayer>& norm, const LinearLayer& gate,
                                    const LinearLayer& up) {
  const auto stream = mx::to_stream({});
  if (x.ndim() < 1 || std::get<0>(gate).shape(0) != std::get<0>(up).shape(0)) return std::nullopt;
  auto inputs = gather(stream, x, x.shape(-1), norm, {gate, up});
  if (!inputs) return std::nullopt;
  auto shape = x.shape();
  shape.back() = std::get<0>(gate).shape(0);
  return mx::array(std::move(shape), x.dtype(),
                   std::make_shared<GatedProducts>(stream, inputs->epsilon, std::move(inputs->linears)),
                   std::move(inputs->arrays));
}

std::optional<mx::array> make_added(const mx::array& x, const LinearLayer& linear, const mx::array& residual) {
  const auto stream = mx::to_stream({});
  if (x.ndim() < 1) return std::nullopt;
  auto shape = x.ndim() == 4 ? mx::Shape{x.shape(0), x.shape(2), x.shape(1) * x.shape(3)} : x.shape();
  const int64_t columns = shape.back();
  shape.back() = std::get<0>(linear).shape(0);
  if (residual.shape() != shape || residual.dtype() != x.dtype()) return std::nullopt;
  auto inputs = gather(stream, x, columns, std::nullopt, {linear});
  if (!inputs) return std::nullopt;
  inputs->arrays.push_back(residual);
  return mx::array(std::move(shape), x.dtype(),
                   std::make_shared<AddedProduct>(stream, std::nullopt, std::move(inputs->linears)),
                   std::move(inputs->arrays));
}

}  // namespace mlx_cpu_kernels
