// Code that the operations of the extension share: threads, primitives, and views of MLX's arrays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "quantized.h"
#include "threads.h"

namespace mlx_cpu_kernels {

namespace mx = mlx::core;

inline bool is_float(mx::Dtype type) { return type == mx::float32 || type == mx::float16 || type == mx::bfloat16; }

inline Type type_of(mx::Dtype type) {
  if (type == mx::float32) return Type::float32;
  return type == mx::float16 ? Type::float16 : Type::bfloat16;
}

// Position in memory of each combination of the leading axes, in elements, for an array that may be broadcast.
class Offsets {
 public:
  Offsets(const mx::Shape& shape, const mx::Strides& strides, int axes)
      : shape_(shape.begin(), shape.begin() + axes), strides_(strides.begin(), strides.begin() + axes) {}

  int64_t operator[](int64_t index) const {
    int64_t offset = 0;
    for (int axis = static_cast<int>(shape_.size()) - 1; axis >= 0; --axis) {
      offset += index % shape_[axis] * strides_[axis];
      index /= shape_[axis];
    }
    return offset;
  }

 private:
  std::vector<int64_t> shape_, strides_;
};

// A dense copy, which the encoder's task makes before it is read.
inline mx::array copied(const mx::array& source, mx::cpu::CommandEncoder& encoder) {
  mx::array copy(source.shape(), source.dtype(), nullptr, {});
  copy.set_data(mx::allocator::malloc(copy.nbytes()));
  encoder.add_temporary(copy);
  const int64_t columns = source.shape(-1), size = source.itemsize();
  encoder.dispatch([from = source.data<char>(), to = copy.data<char>(), size, columns, step = source.strides(-1),
                    rows = static_cast<int64_t>(source.size()) / std::max<int64_t>(1, columns),
                    offsets = Offsets(source.shape(), source.strides(), source.ndim() - 1)]() mutable {
    for (int64_t row = 0; row < rows; ++row, to += columns * size) {
      const char* begin = from + offsets[row] * size;
      if (step == 1) {
        std::memcpy(to, begin, columns * size);
      } else {
        for (int64_t column = 0; column < columns; ++column)
          std::memcpy(to + column * size, begin + column * step * size, size);
      }
    }
  });
  return copy;
}

// The array itself where its last axis is dense, else a copy.
inline mx::array with_dense_rows(const mx::array& source, mx::cpu::CommandEncoder& encoder) {
  const bool is_dense = source.ndim() == 0 || source.shape(-1) <= 1 || source.strides(-1) == 1;
  return is_dense ? source : copied(source, encoder);
}

// The array itself where it is dense, else a copy.
inline mx::array dense(const mx::array& source, mx::cpu::CommandEncoder& encoder) {
  return source.flags().row_contiguous || source.ndim() == 0 ? source : copied(source, encoder);
}

// An operation for which MLX has its own, whose gradients are used.
class CpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  // The results of MLX's own operations on the same inputs.
  virtual std::vector<mx::array> stock(const std::vector<mx::array>& inputs) = 0;

  virtual int output_count() const { return 1; }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error(std::string(name()) + " computes on a CPU only");
  }

  std::vector<mx::array> vjp(const std::vector<mx::array>& primals, const std::vector<mx::array>& cotangents,
                             const std::vector<int>& arguments, const std::vector<mx::array>&) override {
    return mx::vjp(stock_of(primals, arguments), chosen(primals, arguments), cotangents).second;
  }

  std::vector<mx::array> jvp(const std::vector<mx::array>& primals, const std::vector<mx::array>& tangents,
                             const std::vector<int>& arguments) override {
    return mx::jvp(stock_of(primals, arguments), chosen(primals, arguments), tangents).second;
  }

  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override {
    const Function function = [this](const std::vector<mx::array>& each) { return stock(each); };
    const std::vector<int> first(output_count(), 0);
    return {mx::vmap(function, axes, first)(inputs), first};
  }

 private:
  using Function = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;

  static std::vector<mx::array> chosen(const std::vector<mx::array>& primals, const std::vector<int>& arguments) {
    std::vector<mx::array> some;
    for (int argument : arguments) some.push_back(primals[argument]);
    return some;
  }

  // MLX's own operation as a function of the inputs named by `arguments`.
  Function stock_of(const std::vector<mx::array>& primals, const std::vector<int>& arguments) {
    return [this, primals, arguments](const std::vector<mx::array>& variables) {
      auto inputs = primals;
      for (size_t i = 0; i < arguments.size(); ++i) inputs[arguments[i]] = variables[i];
      return stock(inputs);
    };
  }
};

inline bool is_on_cpu(const mx::Stream& stream) { return stream.device == mx::Device(mx::Device::cpu); }

}  // namespace mlx_cpu_kernels
