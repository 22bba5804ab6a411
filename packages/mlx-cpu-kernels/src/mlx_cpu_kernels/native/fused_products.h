// Products of linear layers with one x, and what comes before and after them in one operation.
#pragma once

#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "extension.h"
#include "extension_fused.h"
#include "extension_layers.h"
#include "extension_quantized.h"
#include "fused.h"
#include "half.h"

namespace mlx_cpu_kernels {

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

// At most N values, in place: what holds them is copied at once.
template <class T, size_t N>
class Few {
 public:
  void push_back(const T& value) { values_.at(count_++) = value; }
  size_t size() const { return count_; }
  T* data() { return values_.data(); }
  const T* data() const { return values_.data(); }
  T* begin() { return data(); }
  T* end() { return data() + count_; }
  T& operator[](size_t i) { return values_[i]; }
  const T& operator[](size_t i) const { return values_[i]; }

 private:
  std::array<T, N> values_{};
  size_t count_ = 0;
};

struct Linear {
  Quantization quantization;
  bool has_addend;
};

// Products of rows x (rows, columns), which is normalized before where an epsilon is given.
struct ProductTask {
  int64_t rows, columns;
  Type type;
  const void* x = nullptr;
  std::optional<float> epsilon = std::nullopt;
  Type norm_type = Type::float32;
  const void* norm = nullptr;
  Few<Product, 3> products = {};
  Few<const void*, 3> addends = {};

  // Takes weights, scales, biases and addend from the inputs that begin at `next`, which then is behind them.
  void add(const Linear& linear, const Arrays& inputs, size_t& next, mx::cpu::CommandEncoder& encoder) {
    const auto parts = quantized_inputs({inputs[next], inputs[next + 1], inputs[next + 2]}, 3, 0, encoder);
    products.push_back({first_matrix(parts[0], parts[1], parts[2], linear.quantization), nullptr, 0});
    next += 3;
    addends.push_back(linear.has_addend ? dense(inputs[next++], encoder).data<void>() : nullptr);
  }

  // Takes the norm's weight and linear layers from the inputs that begin at `next`.
  void add(std::optional<float> norm_epsilon, const std::vector<Linear>& linears, const Arrays& inputs, size_t& next,
           mx::cpu::CommandEncoder& encoder) {
    epsilon = norm_epsilon;
    if (epsilon) {
      norm_type = type_of(inputs[next].dtype());
      norm = dense(inputs[next++], encoder).data<void>();
    }
    for (const auto& linear : linears) add(linear, inputs, next, encoder);
  }

  // Computes the products, when x and the results have their places.
  void multiply() const {
    if (!epsilon) return multiply_all(x);
    const Buffer normalized(rows * columns * size_of(type));
    rms_norm({.rows = rows,
              .columns = columns,
              .x = {x, type, columns},
              .weight = norm,
              .weight_type = norm_type,
              .epsilon = *epsilon,
              .y = normalized.data(),
              .y_stride = columns},
             threads());
    multiply_all(normalized.data());
  }

  // Computes residual + the only product, all of rows side by side. Without a residual, it is the product alone.
  void multiply_and_add(const void* residual, void* y) {
    auto& product = products[0];
    product.y = y;
    product.y_stride = product.w.rows;
    multiply();
    if (residual) add_rows({residual, type, product.w.rows}, rows, product.w.rows, y, product.w.rows, threads());
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

// x + down(silu(gate(y)) * up(y)), where y is x normalized.
struct GatedTask {
  ProductTask gate_and_up, down;

  void compute(const void* x, void* y, bool has_residual = true) {
    const int64_t rows = gate_and_up.rows, width = down.columns, bytes = rows * width * size_of(down.type);
    const Buffer gate(bytes), up(bytes);
    gate_and_up.x = x;
    gate_and_up.products[0].y = gate.data();
    gate_and_up.products[1].y = up.data();
    for (auto& product : gate_and_up.products) product.y_stride = width;
    gate_and_up.multiply();
    gated_activation(Activation::silu, {gate.data(), down.type, width}, up.data(), width, rows, width, up.data(), width,
                     threads());
    down.x = up.data();
    down.multiply_and_add(has_residual ? x : nullptr, y);
  }
};

// Products of one x (..., K). The inputs are x, then the norm's weight where there is an epsilon. Weights, scales,
// biases and addend of each linear layer follow, and then the further inputs of a derived operation.
class FusedProducts : public CpuPrimitive {
 public:
  FusedProducts(mx::Stream stream, std::optional<float> epsilon, std::vector<Linear> linears)
      : CpuPrimitive(stream), epsilon_(epsilon), linears_(std::move(linears)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    allocate(outputs);
    if (outputs[0].size() == 0) return;
    const auto x = rows_of(inputs[0], encoder);
    ProductTask task{.rows = static_cast<int64_t>(x.size()) / columns(inputs),
                     .columns = columns(inputs),
                     .type = type_of(x.dtype()),
                     .x = x.data<void>()};
    size_t next = 1;
    task.add(epsilon_, linears_, inputs, next, encoder);
    finish(std::move(task), Arrays(inputs.begin() + next, inputs.end()), outputs, encoder);
  }

  // By separate operations, whose derivatives are MLX's own.
  Arrays stock(const Arrays& inputs) override {
    size_t next = 1;
    auto x = flat(inputs[0]);
    if (epsilon_) x = make_rms_norm(x, inputs[next++], *epsilon_, stream());
    Arrays products;
    for (const auto& linear : linears_) products.push_back(stock_product(linear, x, inputs, next));
    return stock_end(std::move(products), Arrays(inputs.begin() + next, inputs.end()));
  }

 protected:
  // Gives the results their memory; the first may be empty.
  virtual void allocate(Arrays& outputs) const {
    for (auto& out : outputs) out.set_data(mx::allocator::malloc(out.nbytes()));
  }
  // x with rows of K numbers, one behind the other.
  virtual mx::array rows_of(const mx::array& x, mx::cpu::CommandEncoder& encoder) const { return dense(x, encoder); }
  // The same for MLX's own operations.
  virtual mx::array flat(const mx::array& x) { return x; }
  virtual void finish(ProductTask task, const Arrays& others, Arrays& outputs,
                      mx::cpu::CommandEncoder& encoder) const = 0;
  virtual Arrays stock_end(Arrays products, const Arrays& others) = 0;

  // The product with a linear layer, whose arrays begin at `next`.
  mx::array stock_product(const Linear& linear, const mx::array& x, const Arrays& inputs, size_t& next) {
    auto product = make_product(x, inputs[next], inputs[next + 1], inputs[next + 2], true,
                                linear.quantization.group_size, linear.quantization.bits, "affine", stream());
    next += 3;
    return linear.has_addend ? mx::add(product, inputs[next++], stream()) : product;
  }

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

// Queries, keys and values by head: the first two normalized by head and rotated.
struct HeadOptions {
  std::vector<int> heads;                  // of queries, keys and values
  std::vector<float> epsilons;             // of the norms of queries and keys
  std::optional<int> dims = std::nullopt;  // rotated elements
  bool is_traditional = false;
  std::optional<float> base = std::nullopt;  // or frequencies are given, the reciprocals of those that are used
  float scale = 1;
  int offset = 0;
  bool has_offsets = false;  // given by an array

  // The number of inputs: weights of the norms by head, frequencies (dims / 2), and offsets () or (batch).
  size_t inputs() const { return epsilons.size() + (dims ? 1 : 0) + (has_offsets ? 1 : 0); }
};

// Products of queries, keys and values, whose rows are those of a batch's tokens, and what is done to their heads.
struct HeadTask {
  struct Norm {
    const void* weight;
    Type type;
    float epsilon;
  };

  ProductTask products;
  int64_t batch;
  std::array<int, 3> heads;
  Few<Norm, 2> norms = {};
  std::optional<int> dims = std::nullopt;
  bool is_traditional = false, is_inverse = false;
  const float* frequencies = nullptr;
  float scale = 1;
  const int32_t* offsets = nullptr;  // null where one is given
  int64_t offset_stride = 0;
  int32_t offset = 0;

  HeadTask(ProductTask task, int64_t batch, const HeadOptions& options, const Arrays& inputs,
           mx::cpu::CommandEncoder& encoder)
      : products(task),
        batch(batch),
        heads{options.heads[0], options.heads[1], options.heads[2]},
        dims(options.dims),
        is_traditional(options.is_traditional),
        is_inverse(!options.base),
        scale(options.scale),
        offset(options.offset) {
    const size_t count = options.epsilons.size();
    for (size_t i = 0; i < count; ++i)
      norms.push_back({dense(inputs[i], encoder).data<void>(), type_of(inputs[i].dtype()), options.epsilons[i]});
    if (dims) frequencies = dense(inputs[count], encoder).data<float>();
    if (options.has_offsets) {
      const auto given = dense(inputs[count + 1], encoder);
      offsets = given.data<int32_t>();
      offset_stride = given.size() > 1 ? 1 : 0;
    }
  }

  int64_t width(int i) const { return products.products[i].w.rows; }
  int64_t size(int i) const { return width(i) / heads[i]; }

  // Computes queries, keys and values into memory where a token's heads lie side by side.
  void compute(void* const results[3]) {
    for (int i = 0; i < 3; ++i) {
      products.products[i].y = results[i];
      products.products[i].y_stride = width(i);
    }
    products.multiply();
    for (size_t i = 0; i < norms.size(); ++i) {
      rms_norm({.rows = products.rows * heads[i],
                .columns = size(i),
                .x = {results[i], products.type, size(i)},
                .weight = norms[i].weight,
                .weight_type = norms[i].type,
                .epsilon = norms[i].epsilon,
                .y = results[i],
                .y_stride = size(i)},
               threads());
    }
    if (dims) rotate(results);
  }

 private:
  void rotate(void* const results[3]) const {
    std::vector<float> used;
    if (is_inverse) {
      used.assign(frequencies, frequencies + *dims / 2);
      for (auto& frequency : used) frequency = 1 / frequency;
    }
    const int64_t tokens = products.rows / batch;
    for (int i = 0; i < 2; ++i) {
      const int64_t token = width(i), sequence = tokens * token;
      rope({.batches = batch,
            .heads = heads[i],
            .length = tokens,
            .head_size = size(i),
            .type = products.type,
            .x = {results[i], {sequence, size(i), token}},
            .y = {results[i], {sequence, size(i), token}},
            .dims = *dims,
            .traditional = is_traditional,
            .base = 0,
            .frequencies = is_inverse ? used.data() : frequencies,
            .scale = scale,
            .offsets = offsets ? offsets : &offset,
            .offset_stride = offset_stride},
           threads());
    }
  }
};

// By separate operations: (batch, heads, tokens, size) of a product (batch, tokens, K). `index` is 0 for queries.
inline mx::array stock_heads(const mx::array& product, const HeadOptions& options, size_t index, const Arrays& inputs,
                             const mx::Stream& stream) {
  auto heads = mx::reshape(product, {product.shape(0), product.shape(1), options.heads[index], -1}, stream);
  if (index < options.epsilons.size())
    heads = mx::fast::rms_norm(heads, inputs[index], options.epsilons[index], stream);
  heads = mx::transpose(heads, {0, 2, 1, 3}, stream);
  if (index == 2 || !options.dims) return heads;
  const size_t count = options.epsilons.size();
  const auto offset = options.has_offsets ? inputs[count + 1] : mx::array(options.offset, mx::int32);
  const auto frequencies = options.base ? std::nullopt : std::optional(inputs[count]);
  return mx::fast::rope(heads, *options.dims, options.is_traditional, options.base, options.scale, offset, frequencies,
                        stream);
}

// The inputs that FusedProducts takes, if the kernels apply to all.
struct Inputs {
  Arrays arrays = {};
  std::optional<float> epsilon = std::nullopt;
  std::vector<Linear> linears = {};

  // Adds a linear layer of `columns` numbers. False if the kernels do not apply.
  bool add(const mx::Stream& stream, const LinearLayer& layer, int64_t columns, mx::Dtype type) {
    const auto& [weights, scales, biases, addend, group_size, bits] = layer;
    const auto quantization = applicable(stream, weights, scales, biases, group_size, bits, "affine");
    if (!quantization || weights.ndim() != 2 || int64_t{scales.shape(-1)} * group_size != columns ||
        mx::promote_types(type, scales.dtype()) != type) {
      return false;
    }
    arrays.insert(arrays.end(), {weights, scales, biases});
    if (addend) {
      if (addend->dtype() != type || addend->ndim() != 1 || addend->shape(0) != weights.shape(0)) return false;
      arrays.push_back(*addend);
    }
    linears.push_back({*quantization, addend.has_value()});
    return true;
  }
};

inline bool is_norm_of(const NormLayer& norm, int64_t columns, mx::Dtype type) {
  const auto& weight = std::get<0>(norm);
  return weight.ndim() == 1 && weight.shape(0) == columns && is_float(weight.dtype()) &&
         mx::promote_types(weight.dtype(), type) == type;
}

inline std::optional<Inputs> gather(const mx::Stream& stream, const mx::array& x, int64_t columns,
                                    const std::optional<NormLayer>& norm, const std::vector<LinearLayer>& linears) {
  if (!is_on_cpu(stream) || columns == 0 || !is_float(x.dtype())) return std::nullopt;
  if (norm && !is_norm_of(*norm, columns, x.dtype())) return std::nullopt;
  Inputs inputs;
  inputs.arrays.reserve(4 * linears.size() + 16);
  inputs.arrays.push_back(x);
  if (norm) {
    inputs.epsilon = std::get<1>(*norm);
    inputs.arrays.push_back(std::get<0>(*norm));
  }
  for (const auto& layer : linears) {
    if (!inputs.add(stream, layer, columns, x.dtype())) return std::nullopt;
  }
  return inputs;
}

// Whether an array gives the offsets of a batch's rows.
inline bool are_offsets(const mx::array& offsets, int batch) {
  return offsets.dtype() == mx::int32 && (offsets.size() == 1 || (offsets.ndim() == 1 && offsets.shape(0) == batch));
}

// Operations on heads, whose inputs are added. Nothing if it is none of the kernels'.
std::optional<HeadOptions> add_heads(const mx::Stream& stream, const std::vector<LinearLayer>& linears,
                                     const std::vector<int>& heads, const std::vector<NormLayer>& head_norms,
                                     const std::optional<Rotation>& rotation,
                                     const std::variant<int, mx::array>& offset, Arrays& arrays);

}  // namespace mlx_cpu_kernels
