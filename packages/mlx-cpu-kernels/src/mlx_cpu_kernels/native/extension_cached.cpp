#include "extension_cached.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "fused_products.h"

namespace mlx_cpu_kernels {
namespace {

constexpr int kMostHeadSize = 256;  // of attention

// Makes `out` the plane: its own memory, or a dense copy.
void take(const mx::array& plane, mx::array& out, mx::cpu::CommandEncoder& encoder) {
  if (plane.flags().row_contiguous) {
    out.copy_shared_buffer(plane);
  } else {
    const auto copy = copied(plane, encoder);
    out.copy_shared_buffer(copy);
  }
}

// Where the positions of a plane's heads are.
struct Plane {
  char* values;
  int64_t heads, capacity, bytes;  // bytes of a position of a head

  Plane(mx::array& array)
      : values(array.data<char>()), heads(array.shape(1)), capacity(array.shape(2)),
        bytes(array.shape(3) * static_cast<int64_t>(array.itemsize())) {}

  char* at(int64_t slot, int64_t head, int64_t position) const {
    return values + ((slot * heads + head) * capacity + position) * bytes;
  }
  // Strides in elements.
  Heads from(int64_t slot, int64_t itemsize) const {
    const int64_t size = bytes / itemsize;
    return {at(slot, 0, 0), {heads * capacity * size, capacity * size, size}};
  }
};

mx::array stock_appended(const mx::array& plane, const mx::array& rows, int slot, int begin, const mx::Stream& stream) {
  const mx::Shape first{slot, 0, begin, 0};
  return mx::slice_update(plane, rows, first,
                          mx::Shape{slot + rows.shape(0), plane.shape(1), begin + rows.shape(2), plane.shape(3)}, stream);
}

// A plane, and the rows to write.
class Append : public CpuPrimitive {
 public:
  Append(mx::Stream stream, int slot, int begin) : CpuPrimitive(stream), slot_(slot), begin_(begin) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    take(inputs[0], outputs[0], encoder);
    if (inputs[1].size() == 0) return;
    const auto rows = with_dense_rows(inputs[1], encoder);
    encoder.dispatch([plane = Plane(outputs[0]), from = rows.data<char>(), slots = rows.shape(0), tokens = rows.shape(2),
                      strides = rows.strides(), itemsize = static_cast<int64_t>(rows.itemsize()), slot = slot_,
                      begin = begin_] {
      for (int64_t row = 0; row < slots; ++row) {
        for (int64_t head = 0; head < plane.heads; ++head) {
          const char* source = from + (row * strides[0] + head * strides[1]) * itemsize;
          if (strides[2] * itemsize == plane.bytes) {
            std::memcpy(plane.at(slot + row, head, begin), source, tokens * plane.bytes);
            continue;
          }
          for (int64_t token = 0; token < tokens; ++token)
            std::memcpy(plane.at(slot + row, head, begin + token), source + token * strides[2] * itemsize, plane.bytes);
        }
      }
    });
  }

  Arrays stock(const Arrays& inputs) override {
    return {stock_appended(inputs[0], inputs[1], slot_, begin_, stream())};
  }

  const char* name() const override { return "CpuAppend"; }
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override { return {inputs[0].shape()}; }

 private:
  int slot_, begin_;
};

// A norm and a gated layer: gate, up and down.
struct GatedOptions {
  std::optional<float> epsilon;
  std::vector<Linear> linears;
};

// Further inputs: those of the heads, the parts of the output layer, x again, those of a gated layer that may follow, and the
// planes of keys and values.
class AttendedToken : public FusedProducts {
 public:
  AttendedToken(mx::Stream stream, std::optional<float> epsilon, std::vector<Linear> linears, HeadOptions options,
                Linear output, std::optional<GatedOptions> gated, float scale, int slot, std::vector<int> begins)
      : FusedProducts(stream, epsilon, std::move(linears)), options_(std::move(options)), output_(output),
        gated_(std::move(gated)), scale_(scale), slot_(slot), begins_(std::move(begins)) {}

  int output_count() const override { return 3; }
  const char* name() const override { return "CpuAttendedToken"; }
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const size_t last = inputs.size() - 1;
    return {inputs[0].shape(), inputs[last - 1].shape(), inputs[last].shape()};
  }

 protected:
  void allocate(Arrays& outputs) const override {
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));  // the planes keep their memory
  }

  void finish(ProductTask task, const Arrays& others, Arrays& outputs, mx::cpu::CommandEncoder& encoder) const override {
    const size_t last = others.size() - 1;
    take(others[last - 1], outputs[1], encoder);
    take(others[last], outputs[2], encoder);
    size_t next = options_.inputs();
    ProductTask output{.rows = task.rows, .columns = 0, .type = task.type};
    output.add(output_, others, next, encoder);
    const auto x = dense(others[next++], encoder);
    std::optional<GatedTask> gated;
    if (gated_) {
      ProductTask gate_and_up{.rows = task.rows, .columns = task.columns, .type = task.type}, down = gate_and_up;
      gate_and_up.add(gated_->epsilon, {gated_->linears[0], gated_->linears[1]}, others, next, encoder);
      down.add(gated_->linears[2], others, next, encoder);
      down.columns = gate_and_up.products[0].w.rows;
      gated = {std::move(gate_and_up), std::move(down)};
    }
    HeadTask heads(std::move(task), outputs[0].shape(0), options_, others, encoder);
    output.columns = heads.size(2) * heads.heads[0];
    encoder.dispatch([heads = std::move(heads), output = std::move(output), gated = std::move(gated),
                      keys = Plane(outputs[1]), values = Plane(outputs[2]), x = x.data<void>(),
                      y = outputs[0].data<void>(), scale = scale_, slot = slot_, begins = begins_]() mutable {
      const int64_t rows = heads.batch, item = size_of(output.type);
      const Buffer q(rows * heads.width(0) * item), k(rows * heads.width(1) * item), v(rows * heads.width(2) * item);
      void* const results[] = {q.data(), k.data(), v.data()};
      heads.compute(results);
      std::vector<int64_t> lengths(rows);
      for (int64_t row = 0; row < rows; ++row) {
        lengths[row] = begins[row] + 1;
        for (int64_t head = 0; head < keys.heads; ++head) {
          const int64_t from = row * keys.heads + head;
          std::memcpy(keys.at(slot + row, head, begins[row]), static_cast<char*>(k.data()) + from * keys.bytes, keys.bytes);
          std::memcpy(values.at(slot + row, head, begins[row]), static_cast<char*>(v.data()) + from * values.bytes,
                      values.bytes);
        }
      }
      const Buffer attended(rows * output.columns * item);
      const int64_t size = heads.size(0), value = heads.size(2);
      const Attention attention{
          .batches = rows, .heads = heads.heads[0], .kv_heads = keys.heads, .queries = 1,
          .keys = *std::max_element(lengths.begin(), lengths.end()), .head_size = size, .value_size = value,
          .type = output.type, .q = {q.data(), {heads.width(0), size, heads.width(0)}}, .k = keys.from(slot, item),
          .v = values.from(slot, item), .y = {attended.data(), {output.columns, value, output.columns}}, .scale = scale,
          .lengths = lengths.data(),
      };
      if (!mlx_cpu_kernels::attention(attention, threads())) throw std::logic_error("attention of an unexpected layout");
      output.x = attended.data();
      if (!gated) return output.multiply_and_add(x, y);
      const Buffer hidden(rows * heads.products.columns * item);
      output.multiply_and_add(x, hidden.data());
      gated->compute(hidden.data(), y);
    });
  }

  Arrays stock_end(Arrays products, const Arrays& others) override {
    const size_t last = others.size() - 1;
    auto keys = others[last - 1], values = others[last];
    for (size_t i = 0; i < 3; ++i) products[i] = stock_heads(products[i], options_, i, others, stream());
    Arrays rows;
    const auto row_of = [&](const mx::array& array, int row, int slot, int length) {
      return mx::slice(array, mx::Shape{slot + row, 0, 0, 0},
                       mx::Shape{slot + row + 1, array.shape(1), length, array.shape(3)}, stream());
    };
    for (int row = 0; row < static_cast<int>(begins_.size()); ++row) {
      keys = stock_appended(keys, row_of(products[1], row, 0, 1), slot_ + row, begins_[row], stream());
      values = stock_appended(values, row_of(products[2], row, 0, 1), slot_ + row, begins_[row], stream());
      rows.push_back(mx::fast::scaled_dot_product_attention(
          row_of(products[0], row, 0, 1), row_of(keys, row, slot_, begins_[row] + 1),
          row_of(values, row, slot_, begins_[row] + 1), scale_, "", std::nullopt, std::nullopt, false, stream()));
    }
    const auto attended = mx::concatenate(std::move(rows), 0, stream());
    const auto flat = mx::reshape(mx::transpose(attended, {0, 2, 1, 3}, stream()), {attended.shape(0), 1, -1}, stream());
    size_t next = options_.inputs();
    const auto result = stock_product(output_, flat, others, next);
    const auto hidden = mx::add(others[next++], result, stream());
    return {gated_ ? stock_gated(hidden, others, next) : hidden, keys, values};
  }

 private:
  mx::array stock_gated(const mx::array& hidden, const Arrays& inputs, size_t next) {
    const auto x = gated_->epsilon ? make_rms_norm(hidden, inputs[next++], *gated_->epsilon, stream()) : hidden;
    const auto gate = stock_product(gated_->linears[0], x, inputs, next);
    const auto up = stock_product(gated_->linears[1], x, inputs, next);
    const auto inner = gate * mx::sigmoid(gate, stream()) * up;
    return mx::add(hidden, stock_product(gated_->linears[2], inner, inputs, next), stream());
  }

  HeadOptions options_;
  Linear output_;
  std::optional<GatedOptions> gated_;
  float scale_;
  int slot_;
  std::vector<int> begins_;
};

// Whether rows of heads go into a plane.
bool takes(const mx::array& plane, int64_t heads, int64_t size, mx::Dtype type, int slot, const std::vector<int>& begins) {
  if (plane.ndim() != 4 || plane.dtype() != type || plane.shape(1) != heads || plane.shape(3) != size) return false;
  const bool has_slots = slot >= 0 && slot + static_cast<int64_t>(begins.size()) <= plane.shape(0);
  return has_slots && size <= kMostHeadSize && std::all_of(begins.begin(), begins.end(), [&](int begin) {
    return begin >= 0 && begin < plane.shape(2);
  });
}

}  // namespace

mx::array make_appended(const mx::array& plane, const mx::array& rows, int slot, int begin) {
  const auto stream = mx::to_stream({});
  const bool is_of_plane = plane.ndim() == 4 && rows.ndim() == 4 && rows.dtype() == plane.dtype() &&
                           rows.shape(1) == plane.shape(1) && rows.shape(3) == plane.shape(3);
  if (!is_of_plane || slot < 0 || begin < 0 || int64_t{slot} + rows.shape(0) > plane.shape(0) ||
      int64_t{begin} + rows.shape(2) > plane.shape(2)) {
    throw std::invalid_argument("rows do not fit into the plane that they are appended to");
  }
  if (!is_on_cpu(stream)) return stock_appended(plane, rows, slot, begin, stream);
  return mx::array(plane.shape(), plane.dtype(), std::make_shared<Append>(stream, slot, begin), {plane, rows});
}

std::optional<std::vector<mx::array>> make_attended_token(
    const mx::array& x, const std::optional<NormLayer>& norm, const std::vector<LinearLayer>& linears,
    const std::vector<int>& heads, const std::vector<NormLayer>& head_norms, const std::optional<Rotation>& rotation,
    const std::variant<int, mx::array>& offset, const LinearLayer& output, float scale, const Places& places,
    const std::optional<Gated>& gated) {
  const auto stream = mx::to_stream({});
  const auto& [keys, values, slot, begins] = places;
  if (x.ndim() != 3 || x.shape(1) != 1 || begins.empty() || x.shape(0) != static_cast<int>(begins.size())) {
    return std::nullopt;
  }
  const int columns = x.shape(2);
  auto inputs = gather(stream, x, columns, norm, linears);
  if (!inputs) return std::nullopt;
  auto options = add_heads(stream, linears, heads, head_norms, rotation, offset, inputs->arrays);
  if (!options || heads[1] != heads[2] || heads[0] % heads[1]) return std::nullopt;
  const auto size = [&](int i) { return std::get<0>(linears[i]).shape(0) / heads[i]; };
  if (size(0) != size(1) || !takes(keys, heads[1], size(1), x.dtype(), slot, begins) ||
      !takes(values, heads[2], size(2), x.dtype(), slot, begins) || std::get<0>(output).shape(0) != columns ||
      !inputs->add(stream, output, int64_t{heads[0]} * size(2), x.dtype())) {
    return std::nullopt;
  }
  inputs->arrays.push_back(x);
  std::optional<GatedOptions> gated_options;
  if (gated) {
    const auto& [gated_norm, gate, up, down] = *gated;
    const int width = std::get<0>(gate).shape(0);
    if (width == 0 || std::get<0>(up).shape(0) != width || std::get<0>(down).shape(0) != columns ||
        !is_norm_of(gated_norm, columns, x.dtype())) {
      return std::nullopt;
    }
    inputs->arrays.push_back(std::get<0>(gated_norm));
    if (!inputs->add(stream, gate, columns, x.dtype()) || !inputs->add(stream, up, columns, x.dtype()) ||
        !inputs->add(stream, down, width, x.dtype())) {
      return std::nullopt;
    }
    gated_options = {std::get<1>(gated_norm), {inputs->linears.begin() + 4, inputs->linears.end()}};
  }
  const auto last = inputs->linears[3];
  inputs->linears.resize(3);
  inputs->arrays.insert(inputs->arrays.end(), {keys, values});
  auto attended = std::make_shared<AttendedToken>(stream, inputs->epsilon, std::move(inputs->linears), std::move(*options),
                                                  last, std::move(gated_options), scale, slot, begins);
  return mx::array::make_arrays({x.shape(), keys.shape(), values.shape()}, {3, x.dtype()}, attended,
                                std::move(inputs->arrays));
}

}  // namespace mlx_cpu_kernels
