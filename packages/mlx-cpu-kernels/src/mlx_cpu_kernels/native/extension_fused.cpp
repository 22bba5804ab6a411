// Parts of a decoder layer for any number of tokens.

#include "extension_fused.h"

#include <memory>
#include <utility>

#include "fused_products.h"

namespace mlx_cpu_kernels {
namespace {

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

  void finish(ProductTask task, const Arrays& others, Arrays& outputs,
              mx::cpu::CommandEncoder& encoder) const override {
    HeadTask heads(std::move(task), outputs[0].shape(0), options_, others, encoder);
    encoder.dispatch([heads = std::move(heads), q = outputs[0].data<void>(), k = outputs[1].data<void>(),
                      v = outputs[2].data<void>()]() mutable {
      void* const results[] = {q, k, v};
      heads.compute(results);
    });
  }

  Arrays stock_end(Arrays products, const Arrays& others) override {
    for (size_t i = 0; i < products.size(); ++i) products[i] = stock_heads(products[i], options_, i, others, stream());
    return products;
  }

 private:
  HeadOptions options_;
};

// Linear layers: gate and up. Further inputs: the parts of the layer down, and x again.
class GatedLayer : public FusedProducts {
 public:
  GatedLayer(mx::Stream stream, std::optional<float> epsilon, std::vector<Linear> linears, Linear down,
             bool has_residual)
      : FusedProducts(stream, epsilon, std::move(linears)), down_(down), has_residual_(has_residual) {}

  const char* name() const override { return "CpuGatedLayer"; }
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override { return {inputs[0].shape()}; }

 protected:
  void finish(ProductTask task, const Arrays& others, Arrays& outputs,
              mx::cpu::CommandEncoder& encoder) const override {
    ProductTask down{.rows = task.rows, .columns = task.products[0].w.rows, .type = task.type};
    size_t next = 0;
    down.add(down_, others, next, encoder);
    encoder.dispatch([x = task.x, gated = GatedTask{std::move(task), std::move(down)}, y = outputs[0].data<void>(),
                      has_residual = has_residual_]() mutable { gated.compute(x, y, has_residual); });
  }

  Arrays stock_end(Arrays products, const Arrays& others) override {
    const auto& gate = products[0];
    size_t next = 0;
    const auto result = stock_product(down_, gate * mx::sigmoid(gate, stream()) * products[1], others, next);
    return {has_residual_ ? mx::add(others[next], result, stream()) : result};
  }

 private:
  Linear down_;
  bool has_residual_;
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

  void finish(ProductTask task, const Arrays& others, Arrays& outputs,
              mx::cpu::CommandEncoder& encoder) const override {
    const auto residual = dense(others[0], encoder);
    encoder.dispatch([task = std::move(task), residual = residual.data<void>(), y = outputs[0].data<void>()]() mutable {
      task.multiply_and_add(residual, y);
    });
  }

  Arrays stock_end(Arrays products, const Arrays& others) override {
    return {mx::add(others[0], products[0], stream())};
  }
};

// Sets the rotation, and adds its inputs. False if it is none of the kernels'.
bool add_rotation(const Rotation& rotation, const std::variant<int, mx::array>& offset, int size,
                  const mx::Stream& stream, HeadOptions& options, Arrays& arrays) {
  const auto& [dims, is_traditional, base, scale, frequencies] = rotation;
  const auto* offsets = std::get_if<mx::array>(&offset);
  const int batch = arrays[0].shape(0);
  if (dims <= 0 || dims % 2 || dims > size || base.has_value() == frequencies.has_value()) return false;
  if (frequencies &&
      (frequencies->dtype() != mx::float32 || frequencies->ndim() != 1 || frequencies->shape(0) != dims / 2)) {
    return false;
  }
  if (offsets && !are_offsets(*offsets, batch)) return false;
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

std::optional<HeadOptions> add_heads(const mx::Stream& stream, const std::vector<LinearLayer>& linears,
                                     const std::vector<int>& heads, const std::vector<NormLayer>& head_norms,
                                     const std::optional<Rotation>& rotation,
                                     const std::variant<int, mx::array>& offset, Arrays& arrays) {
  if (linears.size() != 3 || heads.size() != 3 || (!head_norms.empty() && head_norms.size() != 2)) return std::nullopt;
  int sizes[3];
  for (size_t i = 0; i < 3; ++i) {
    const int rows = std::get<0>(linears[i]).shape(0);
    if (heads[i] < 1 || rows % heads[i]) return std::nullopt;
    sizes[i] = rows / heads[i];
  }
  HeadOptions options{.heads = heads, .epsilons = {}};
  for (size_t i = 0; i < head_norms.size(); ++i) {
    if (!is_norm_of(head_norms[i], sizes[i], arrays[0].dtype())) return std::nullopt;
    arrays.push_back(std::get<0>(head_norms[i]));
    options.epsilons.push_back(std::get<1>(head_norms[i]));
  }
  if (rotation && (sizes[0] != sizes[1] || !add_rotation(*rotation, offset, sizes[0], stream, options, arrays))) {
    return std::nullopt;
  }
  return options;
}

std::optional<std::vector<mx::array>> make_heads(const mx::array& x, const std::optional<NormLayer>& norm,
                                                 const std::vector<LinearLayer>& linears, const std::vector<int>& heads,
                                                 const std::vector<NormLayer>& head_norms,
                                                 const std::optional<Rotation>& rotation,
                                                 const std::variant<int, mx::array>& offset) {
  const auto stream = mx::to_stream({});
  if (x.ndim() != 3) return std::nullopt;
  auto inputs = gather(stream, x, x.shape(-1), norm, linears);
  if (!inputs) return std::nullopt;
  auto options = add_heads(stream, linears, heads, head_norms, rotation, offset, inputs->arrays);
  if (!options) return std::nullopt;
  auto products =
      std::make_shared<HeadProducts>(stream, inputs->epsilon, std::move(inputs->linears), std::move(*options));
  auto shapes = products->output_shapes(inputs->arrays);
  return mx::array::make_arrays(std::move(shapes), {3, x.dtype()}, products, std::move(inputs->arrays));
}

std::optional<mx::array> make_gated_layer(const mx::array& x, const std::optional<NormLayer>& norm,
                                          const LinearLayer& gate, const LinearLayer& up, const LinearLayer& down,
                                          bool has_residual) {
  const auto stream = mx::to_stream({});
  const int width = std::get<0>(gate).shape(0);
  if (x.ndim() < 1 || width == 0 || std::get<0>(up).shape(0) != width || std::get<0>(down).shape(0) != x.shape(-1)) {
    return std::nullopt;
  }
  auto inputs = gather(stream, x, x.shape(-1), norm, {gate, up});
  if (!inputs || !inputs->add(stream, down, width, x.dtype())) return std::nullopt;
  const auto last = inputs->linears.back();
  inputs->linears.pop_back();
  if (has_residual) inputs->arrays.push_back(x);
  return mx::array(
      x.shape(), x.dtype(),
      std::make_shared<GatedLayer>(stream, inputs->epsilon, std::move(inputs->linears), last, has_residual),
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
