#include "extension_cached.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

#include "fused_products.h"
#include "mlx/distributed/distributed_impl.h"

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
      : values(array.data<char>()),
        heads(array.shape(1)),
        capacity(array.shape(2)),
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
                          mx::Shape{slot + rows.shape(0), plane.shape(1), begin + rows.shape(2), plane.shape(3)},
                          stream);
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
    encoder.dispatch([plane = Plane(outputs[0]), from = rows.data<char>(), slots = rows.shape(0),
                      tokens = rows.shape(2), strides = rows.strides(),
                      itemsize = static_cast<int64_t>(rows.itemsize()), slot = slot_, begin = begin_] {
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

// A layer with its cache, of one token a row.
struct TokenTask {
  HeadTask heads;
  ProductTask output;
  std::optional<GatedTask> gated;
  float scale;

  void set_rows(int64_t rows) {
    heads.batch = heads.products.rows = output.rows = rows;
    if (gated) gated->gate_and_up.rows = gated->down.rows = rows;
  }

  // Appends to the planes of row i's slot, from `slot` on, at begins[i]. With a gated layer, y may be x.
  void compute(const void* x, void* y, const Plane& keys, const Plane& values, int slot,
               const std::vector<int>& begins) {
    if (!gated) return attend(x, x, y, keys, values, slot, begins);
    const Buffer hidden(heads.batch * heads.products.columns * size_of(output.type));
    attend(x, x, hidden.data(), keys, values, slot, begins);
    gated->compute(hidden.data(), y);
  }

  // Computes residual + output(attention(norm(x))), without a residual the product alone.
  void attend(const void* x, const void* residual, void* y, const Plane& keys, const Plane& values, int slot,
              const std::vector<int>& begins) {
    const int64_t rows = heads.batch, item = size_of(output.type);
    const Buffer q(rows * heads.width(0) * item), k(rows * heads.width(1) * item), v(rows * heads.width(2) * item);
    void* const results[] = {q.data(), k.data(), v.data()};
    heads.products.x = x;
    heads.compute(results);
    std::vector<int64_t> lengths(rows);
    for (int64_t row = 0; row < rows; ++row) {
      lengths[row] = begins[row] + 1;
      for (int64_t head = 0; head < keys.heads; ++head) {
        const int64_t from = row * keys.heads + head;
        std::memcpy(keys.at(slot + row, head, begins[row]), static_cast<char*>(k.data()) + from * keys.bytes,
                    keys.bytes);
        std::memcpy(values.at(slot + row, head, begins[row]), static_cast<char*>(v.data()) + from * values.bytes,
                    values.bytes);
      }
    }
    const Buffer attended(rows * output.columns * item);
    const int64_t size = heads.size(0), value = heads.size(2);
    const Attention attention{
        .batches = rows,
        .heads = heads.heads[0],
        .kv_heads = keys.heads,
        .queries = 1,
        .keys = *std::max_element(lengths.begin(), lengths.end()),
        .head_size = size,
        .value_size = value,
        .type = output.type,
        .q = {q.data(), {heads.width(0), size, heads.width(0)}},
        .k = keys.from(slot, item),
        .v = values.from(slot, item),
        .y = {attended.data(), {output.columns, value, output.columns}},
        .scale = scale,
        .lengths = lengths.data(),
    };
    if (!mlx_cpu_kernels::attention(attention, threads())) throw std::logic_error("attention of an unexpected layout");
    output.x = attended.data();
    output.multiply_and_add(residual, y);
  }
};

// Computation with the arrays of a layer.
struct TokenOptions {
  HeadOptions heads;
  Linear output;
  std::optional<GatedOptions> gated;
  float scale;

  // The layer's task, whose `products` of heads are given. `others` are the inputs behind those of the products. They
  // belong to the heads, the output layer (its parts, and x again), and a gated layer that may follow.
  TokenTask task(const ProductTask& products, const Arrays& others, mx::cpu::CommandEncoder& encoder) const {
    size_t next = heads.inputs();
    ProductTask result{.rows = products.rows, .columns = 0, .type = products.type};
    result.add(output, others, next, encoder);
    ++next;
    std::optional<GatedTask> gated_task;
    if (gated) {
      ProductTask gate_and_up{.rows = products.rows, .columns = products.columns, .type = products.type},
          down = gate_and_up;
      gate_and_up.add(gated->epsilon, {gated->linears[0], gated->linears[1]}, others, next, encoder);
      down.add(gated->linears[2], others, next, encoder);
      down.columns = gate_and_up.products[0].w.rows;
      gated_task = {gate_and_up, down};
    }
    const HeadTask head_task(products, products.rows, heads, others, encoder);
    result.columns = head_task.size(2) * head_task.heads[0];
    return {head_task, result, gated_task, scale};
  }
};

// Further inputs: those of a token's options, and the planes of keys and values.
class AttendedToken : public FusedProducts {
 public:
  AttendedToken(mx::Stream stream, std::optional<float> epsilon, std::vector<Linear> linears, TokenOptions options,
                int slot, std::vector<int> begins)
      : FusedProducts(stream, epsilon, std::move(linears)),
        options_(std::move(options)),
        slot_(slot),
        begins_(std::move(begins)) {}

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

  void finish(ProductTask task, const Arrays& others, Arrays& outputs,
              mx::cpu::CommandEncoder& encoder) const override {
    const size_t last = others.size() - 1;
    take(others[last - 1], outputs[1], encoder);
    take(others[last], outputs[2], encoder);
    encoder.dispatch([token = options_.task(task, others, encoder), keys = Plane(outputs[1]),
                      values = Plane(outputs[2]), x = task.x, y = outputs[0].data<void>(), slot = slot_,
                      begins = begins_]() mutable { token.compute(x, y, keys, values, slot, begins); });
  }

  Arrays stock_end(Arrays products, const Arrays& others) override {
    const size_t last = others.size() - 1;
    auto keys = others[last - 1], values = others[last];
    for (size_t i = 0; i < 3; ++i) products[i] = stock_heads(products[i], options_.heads, i, others, stream());
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
          row_of(values, row, slot_, begins_[row] + 1), options_.scale, "", std::nullopt, std::nullopt, false,
          stream()));
    }
    const auto attended = mx::concatenate(std::move(rows), 0, stream());
    const auto flat =
        mx::reshape(mx::transpose(attended, {0, 2, 1, 3}, stream()), {attended.shape(0), 1, -1}, stream());
    size_t next = options_.heads.inputs();
    const auto result = stock_product(options_.output, flat, others, next);
    const auto hidden = mx::add(others[next++], result, stream());
    return {options_.gated ? stock_gated(hidden, others, next) : hidden, keys, values};
  }

 private:
  mx::array stock_gated(const mx::array& hidden, const Arrays& inputs, size_t next) {
    const auto& [epsilon, linears] = *options_.gated;
    const auto x = epsilon ? make_rms_norm(hidden, inputs[next++], *epsilon, stream()) : hidden;
    const auto gate = stock_product(linears[0], x, inputs, next);
    const auto up = stock_product(linears[1], x, inputs, next);
    const auto inner = gate * mx::sigmoid(gate, stream()) * up;
    return mx::add(hidden, stock_product(linears[2], inner, inputs, next), stream());
  }

  TokenOptions options_;
  int slot_;
  std::vector<int> begins_;
};

// Whether rows of heads go into a plane.
bool takes(const mx::array& plane, int64_t heads, int64_t size, mx::Dtype type, int slot,
           const std::vector<int>& begins) {
  if (plane.ndim() != 4 || plane.dtype() != type || plane.shape(1) != heads || plane.shape(3) != size) return false;
  const bool has_slots = slot >= 0 && slot + static_cast<int64_t>(begins.size()) <= plane.shape(0);
  return has_slots && size <= kMostHeadSize &&
         std::all_of(begins.begin(), begins.end(), [&](int begin) { return begin >= 0 && begin < plane.shape(2); });
}

// The inputs of a token's layer and what it is, but for the planes.
struct TokenInputs {
  Inputs products;
  TokenOptions options;
};

std::optional<TokenInputs> gather_token(const mx::Stream& stream, const mx::array& x, const TokenLayer& layer,
                                        const std::variant<int, mx::array>& offset) {
  const auto& [norm, linears, heads, head_norms, rotation, output, scale, gated] = layer;
  if (x.ndim() != 3 || x.shape(1) != 1) return std::nullopt;
  const int columns = x.shape(2);
  auto inputs = gather(stream, x, columns, norm, linears);
  if (!inputs) return std::nullopt;
  auto options = add_heads(stream, linears, heads, head_norms, rotation, offset, inputs->arrays);
  if (!options || heads[1] != heads[2] || heads[0] % heads[1]) return std::nullopt;
  const auto size = [&](int i) { return std::get<0>(linears[i]).shape(0) / heads[i]; };
  if (size(0) != size(1) || std::max(size(0), size(2)) > kMostHeadSize || std::get<0>(output).shape(0) != columns ||
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
  return TokenInputs{std::move(*inputs), {std::move(*options), last, std::move(gated_options), scale}};
}

}  // namespace

class PreparedLayer {
 public:
  PreparedLayer(mx::Dtype type, int columns, Arrays held, const TokenTask& task, std::optional<Ranks> ranks)
      : type_(type), columns_(columns), held_(std::move(held)), task_(task), ranks_(std::move(ranks)) {
    if (ranks_)
      late_ = {std::exchange(task_.output.addends[0], nullptr), std::exchange(task_.gated->down.addends[0], nullptr)};
  }

  const TokenTask& task() const { return task_; }
  // The ranks that sum up the products behind attention and of the gated layer, of which the task has parts.
  const std::optional<Ranks>& ranks() const { return ranks_; }
  // Addends (columns) of the sum of ranks, after attention and after the gated layer; null where nothing is added.
  const std::array<const void*, 2>& late() const { return late_; }
  // Whether the layer is for such x and planes.
  bool applies(const mx::array& x, const mx::array& keys, const mx::array& values, int slot,
               const std::vector<int>& begins) const {
    const auto& heads = task_.heads;
    return x.dtype() == type_ && x.shape(2) == columns_ &&
           takes(keys, heads.heads[1], heads.size(1), type_, slot, begins) &&
           takes(values, heads.heads[2], heads.size(2), type_, slot, begins);
  }

 private:
  mx::Dtype type_;
  int columns_;
  Arrays held_;  // whose memory the task reads
  TokenTask task_;
  std::optional<Ranks> ranks_;
  std::array<const void*, 2> late_{};
};

namespace {

using PreparedLayers = std::vector<std::shared_ptr<const PreparedLayer>>;

// x, the planes of keys and values of each layer, and offsets where an array gives them.
class AttendedLayers : public mx::Primitive {
 public:
  AttendedLayers(mx::Stream stream, PreparedLayers layers, int slot, std::vector<int> begins, std::optional<int> offset)
      : mx::Primitive(stream), layers_(std::move(layers)), slot_(slot), begins_(std::move(begins)), offset_(offset) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    std::vector<Plane> planes;
    planes.reserve(outputs.size() - 1);
    for (size_t i = 1; i < outputs.size(); ++i) {
      take(inputs[i], outputs[i], encoder);
      planes.emplace_back(outputs[i]);
    }
    const int32_t* offsets = nullptr;
    int64_t stride = 0;
    if (!offset_) {
      const auto given = dense(inputs.back(), encoder);
      offsets = given.data<int32_t>();
      stride = given.size() > 1 ? 1 : 0;
    }
    const Step step{std::move(planes), slot_, begins_, offset_.value_or(0), offsets, stride};
    const auto x = dense(inputs[0], encoder);
    if (layers_[0]->ranks()) return sum_up(step, x, outputs[0], encoder);
    encoder.dispatch([layers = layers_, step, x = x.data<void>(), y = outputs[0].data<void>()] {
      const void* from = x;
      for (size_t i = 0; i < layers.size(); ++i, from = y)
        step.task_of(*layers[i]).compute(from, y, step.planes[2 * i], step.planes[2 * i + 1], step.slot, step.begins);
    });
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error(std::string(name()) + " computes on a CPU only");
  }

  const char* name() const override { return "CpuAttendedLayers"; }
  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i <= 2 * layers_.size(); ++i) shapes.push_back(inputs[i].shape());
    return shapes;
  }

 private:
  // Where the rows are in all planes.
  struct Step {
    std::vector<Plane> planes;
    int slot;
    std::vector<int> begins;
    int32_t offset;
    const int32_t* offsets;  // null where one is given
    int64_t stride;

    TokenTask task_of(const PreparedLayer& layer) const {
      auto task = layer.task();
      task.set_rows(static_cast<int64_t>(begins.size()));
      task.heads.offset = offset;
      task.heads.offsets = offsets;
      task.heads.offset_stride = stride;
      return task;
    }
  };

  // Computes this rank's parts into `middle` and `y`, which the group sums up in place after each.
  void sum_up(const Step& step, const mx::array& x, mx::array& y, mx::cpu::CommandEncoder& encoder) {
    mx::array middle(y.shape(), y.dtype(), nullptr, {});
    middle.set_data(mx::allocator::malloc(middle.nbytes()));
    encoder.add_temporary(middle);
    const auto shared = std::make_shared<const Step>(step);
    const void* from = x.data<void>();
    for (size_t i = 0; i < layers_.size(); ++i, from = y.data<void>()) {
      encoder.dispatch([layer = layers_[i], shared, i, from, to = middle.data<void>()] {
        const auto& [planes, slot, begins, offset, offsets, stride] = *shared;
        shared->task_of(*layer).attend(from, nullptr, to, planes[2 * i], planes[2 * i + 1], slot, begins);
      });
      const auto& group = layers_[i]->ranks()->raw_group();
      group->all_sum(middle, middle, stream());
      encoder.dispatch([layer = layers_[i], shared, from, hidden = middle.data<void>(), to = y.data<void>()] {
        auto task = shared->task_of(*layer);
        add_to_sum(task, layer->late()[0], from, hidden);
        task.gated->compute(hidden, to, false);
      });
      group->all_sum(y, y, stream());
      encoder.dispatch([layer = layers_[i], shared, hidden = middle.data<void>(), to = y.data<void>()] {
        add_to_sum(shared->task_of(*layer), layer->late()[1], hidden, to);
      });
    }
  }

  // Adds to a sum of ranks what belongs to it once, and the residual.
  static void add_to_sum(const TokenTask& task, const void* late, const void* residual, void* sum) {
    const int64_t rows = task.heads.batch, columns = task.heads.products.columns;
    const Type type = task.output.type;
    if (late) add_rows({late, type, 0}, rows, columns, sum, columns, threads());
    add_rows({residual, type, columns}, rows, columns, sum, columns, threads());
  }

  PreparedLayers layers_;
  int slot_;
  std::vector<int> begins_;
  std::optional<int> offset_;
};

}  // namespace

std::optional<std::vector<mx::array>> make_attended_token(const mx::array& x, const TokenLayer& layer,
                                                          const std::variant<int, mx::array>& offset,
                                                          const Places& places) {
  const auto stream = mx::to_stream({});
  const auto& [keys, values, slot, begins] = places;
  if (begins.empty() || x.ndim() != 3 || x.shape(0) != static_cast<int>(begins.size())) return std::nullopt;
  auto inputs = gather_token(stream, x, layer, offset);
  if (!inputs) return std::nullopt;
  const auto fits = [&](const mx::array& plane, int i) {
    return takes(plane, layer.heads[i], std::get<0>(layer.linears[i]).shape(0) / layer.heads[i], x.dtype(), slot,
                 begins);
  };
  if (!fits(keys, 1) || !fits(values, 2)) return std::nullopt;
  auto& [products, options] = *inputs;
  products.arrays.insert(products.arrays.end(), {keys, values});
  auto attended = std::make_shared<AttendedToken>(stream, products.epsilon, std::move(products.linears),
                                                  std::move(options), slot, begins);
  return mx::array::make_arrays({x.shape(), keys.shape(), values.shape()}, {3, x.dtype()}, attended,
                                std::move(products.arrays));
}

std::shared_ptr<const PreparedLayer> prepare_layer(const mx::array& x, const TokenLayer& layer,
                                                   std::optional<Ranks> ranks) {
  const auto stream = mx::to_stream({});
  if (!layer.gated || !layer.rotation) return nullptr;
  if (ranks && ranks->size() == 1) ranks = std::nullopt;
  // Sums are computed in turn with the layers' parts, on one stream.
  if (ranks && ranks->raw_group()->communication_stream({}) != stream) return nullptr;
  const auto inputs = gather_token(stream, x, layer, 0);
  if (!inputs) return nullptr;
  const auto& [products, options] = *inputs;
  Arrays held;
  for (const auto& array : products.arrays) {
    if (array.id() == x.id()) continue;
    if (!array.is_available() || !array.flags().row_contiguous || array.is_tracer()) return nullptr;
    held.push_back(array);
  }
  auto& encoder = mx::cpu::get_command_encoder(stream);  // for copies, which dense arrays do not take
  ProductTask task{.rows = 1, .columns = x.shape(2), .type = type_of(x.dtype())};
  size_t next = 1;
  task.add(products.epsilon, products.linears, products.arrays, next, encoder);
  const Arrays others(products.arrays.begin() + next, products.arrays.end());
  return std::make_shared<PreparedLayer>(x.dtype(), x.shape(2), std::move(held), options.task(task, others, encoder),
                                         std::move(ranks));
}

std::optional<std::vector<mx::array>> make_attended_layers(const mx::array& x, PreparedLayers layers,
                                                           const std::vector<mx::array>& planes, int slot,
                                                           const std::vector<int>& begins,
                                                           const std::variant<int, mx::array>& offset) {
  const auto stream = mx::to_stream({});
  if (!is_on_cpu(stream) || x.ndim() != 3 || x.shape(1) != 1 || begins.empty() || layers.empty() || x.is_tracer() ||
      x.shape(0) != static_cast<int>(begins.size()) || planes.size() != 2 * layers.size()) {
    return std::nullopt;
  }
  const auto group_of = [](const auto& layer) { return layer->ranks() ? layer->ranks()->raw_group() : nullptr; };
  for (size_t i = 0; i < layers.size(); ++i) {
    const bool is_beside = group_of(layers[i]) == group_of(layers[0]);
    if (!is_beside || !layers[i]->applies(x, planes[2 * i], planes[2 * i + 1], slot, begins)) return std::nullopt;
  }
  if (const auto group = group_of(layers[0]); group && group->communication_stream({}) != stream) return std::nullopt;
  Arrays inputs{x};
  std::vector<mx::Shape> shapes{x.shape()};
  for (const auto& plane : planes) {
    if (plane.is_tracer()) return std::nullopt;
    inputs.push_back(plane);
    shapes.push_back(plane.shape());
  }
  std::optional<int> same;
  if (const auto* offsets = std::get_if<mx::array>(&offset)) {
    if (!are_offsets(*offsets, x.shape(0)) || offsets->is_tracer()) return std::nullopt;
    inputs.push_back(*offsets);
  } else {
    same = std::get<int>(offset);
  }
  const std::vector<mx::Dtype> types(shapes.size(), x.dtype());
  return mx::array::make_arrays(std::move(shapes), types,
                                std::make_shared<AttendedLayers>(stream, std::move(layers), slot, begins, same),
                                inputs);
}

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

}  // namespace mlx_cpu_kernels
