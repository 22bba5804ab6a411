// MLX operations computed by the kernels of this folder: lazy like MLX's own, and given to it by its documented
// extension mechanism, a `Primitive` with `eval_cpu`. Each function takes what MLX's of the same name takes. It builds
// MLX's own operation wherever the kernels do not apply: on another device, in another mode, of another type or shape.

#include "extension.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "extension_cached.h"
#include "extension_fused.h"
#include "extension_layers.h"
#include "extension_quantized.h"
#include "mlx/version.h"
#include "quantized.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mlx_cpu_kernels;

namespace {

// A prepared layer, and what the modules that it was made of held then. Python has it in a capsule: a module that is
// loaded again must not define a class again.
//
// Modules and their arrays are not kept alive, so that weights which a model no longer has do not stay in memory. The
// capsule is given up when one of them ends, before another object takes its address.
class Prepared {
 public:
  Prepared(std::shared_ptr<const PreparedLayer> layer, nb::handle first, const nb::list& modules)
      : layer_(std::move(layer)) {
    std::vector<PyObject*> known;
    for (nb::handle module : modules) known.push_back(module.ptr());
    add(first, known);
    for (nb::handle module : modules) {
      add(module, known);
      kinds_.emplace_back(module, nb::borrow(module.type()));
    }
  }

  const std::shared_ptr<const PreparedLayer>& layer() const { return layer_; }

  // Whether the modules still hold the same, each array with the same content.
  bool holds() const {
    for (const auto& [owner, attributes, items] : items_) {
      if (!are_same(attributes.is_valid() ? nb::handle(attributes) : owner, items)) return false;
    }
    for (const auto& [module, kind] : kinds_) {
      if (module.type().ptr() != kind.ptr()) return false;
    }
    return true;
  }

 private:
  struct Item {
    nb::object key;
    nb::handle value;
    nb::object kept;                      // the value, unless it is a module or an array
    std::optional<std::uintptr_t> array;  // the id of an array
  };
  struct Items {
    nb::handle owner;       // a module
    nb::object attributes;  // its attributes, if they are meant
    std::vector<Item> items;
  };

  void add(nb::handle module, const std::vector<PyObject*>& modules) {
    items_.push_back({module, {}, items_of(module, modules)});
    nb::object attributes = nb::getattr(module, "__dict__");
    auto items = items_of(attributes, modules);
    items_.push_back({module, std::move(attributes), std::move(items)});
  }

  static std::vector<Item> items_of(nb::handle dict, const std::vector<PyObject*>& modules) {
    std::vector<Item> items;
    PyObject *key, *value;
    for (Py_ssize_t place = 0; PyDict_Next(dict.ptr(), &place, &key, &value);) {
      Item item{nb::borrow(key), value, {}, std::nullopt};
      if (nb::isinstance<mx::array>(item.value)) {
        item.array = nb::inst_ptr<mx::array>(item.value)->id();
      } else if (std::find(modules.begin(), modules.end(), value) == modules.end()) {
        item.kept = nb::borrow(value);
      }
      items.push_back(std::move(item));
    }
    return items;
  }

  static bool are_same(nb::handle dict, const std::vector<Item>& items) {
    if (PyDict_Size(dict.ptr()) != static_cast<Py_ssize_t>(items.size())) return false;
    PyObject *key, *value;
    auto item = items.begin();
    for (Py_ssize_t place = 0; PyDict_Next(dict.ptr(), &place, &key, &value); ++item) {
      if (item->key.ptr() != key || item->value.ptr() != value) return false;
      if (item->array && nb::inst_ptr<mx::array>(value)->id() != *item->array) return false;
    }
    return true;
  }

  std::shared_ptr<const PreparedLayer> layer_;
  std::vector<Items> items_;
  std::vector<std::pair<nb::handle, nb::object>> kinds_;
};

}  // namespace

NB_MODULE(_kernels, module) {
  module.doc() = "MLX's operations, computed by native kernels on a CPU.";
  module.attr("MLX_VERSION") = std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." +
                               std::to_string(MLX_VERSION_PATCH);
  module.def("quantized_matmul", &make_product, nb::arg(), nb::arg(), "scales"_a, "biases"_a = nb::none(),
             "transpose"_a = true, "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a = "affine",
             nb::kw_only(), "stream"_a = nb::none());
  module.def("gather_qmm", &make_gathered_product, nb::arg(), nb::arg(), "scales"_a, "biases"_a = nb::none(),
             "lhs_indices"_a = nb::none(), "rhs_indices"_a = nb::none(), "transpose"_a = true,
             "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a = "affine", "global_scale"_a = nb::none(),
             nb::kw_only(), "sorted_indices"_a = false, "stream"_a = nb::none());
  module.def("dequantize", &make_dequantized, nb::arg(), "scales"_a, "biases"_a = nb::none(),
             "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a = "affine", "global_scale"_a = nb::none(),
             "dtype"_a = nb::none(), nb::kw_only(), "stream"_a = nb::none());
  module.def("rms_norm", &make_rms_norm, "x"_a, "weight"_a.none(), "eps"_a, nb::kw_only(), "stream"_a = nb::none());
  module.def("layer_norm", &make_layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a, nb::kw_only(),
             "stream"_a = nb::none());
  module.def("rope", &make_rotated, "a"_a, "dims"_a, nb::kw_only(), "traditional"_a, "base"_a.none(), "scale"_a,
             "offset"_a, "freqs"_a = nb::none(), "stream"_a = nb::none());
  module.def("scaled_dot_product_attention", &make_attention, "q"_a, "k"_a, "v"_a, nb::kw_only(), "scale"_a,
             "mask"_a = nb::none(), "sinks"_a = nb::none(), "force_fused"_a = false, "stream"_a = nb::none());
  module.def("quantized_scaled_dot_product_attention", &make_quantized_attention, "queries"_a, "q_keys"_a, "q_values"_a,
             "scale"_a, "mask"_a.none(), "group_size"_a = 64, "bits"_a = 8);
  module.def("swiglu", &make_swiglu, "gate"_a, "x"_a, "silu(gate) * x");
  module.def("gelu_approx", [](const mx::array& x) { return make_gelu(x, true); }, "x"_a);
  module.def("gelu_fast_approx", [](const mx::array& x) { return make_gelu(x, false); }, "x"_a);
  module.def("heads", &make_heads, "x"_a, "norm"_a.none(), "linears"_a, "heads"_a, "head_norms"_a, "rotation"_a.none(),
             "offset"_a);
  module.def("gated_layer", &make_gated_layer, "x"_a, "norm"_a.none(), "gate"_a, "up"_a, "down"_a,
             "has_residual"_a = true);
  module.def("added", &make_added, "x"_a, "linear"_a, "residual"_a);
  module.def("append", &make_appended, "plane"_a, "rows"_a, "slot"_a, "begin"_a);
  module.def(
      "attended_token",
      [](const mx::array& x, const std::optional<NormLayer>& norm, const std::vector<LinearLayer>& linears,
         const std::vector<int>& heads, const std::vector<NormLayer>& head_norms,
         const std::optional<Rotation>& rotation, const std::variant<int, mx::array>& offset, const LinearLayer& output,
         float scale, const Places& places, const std::optional<Gated>& gated) {
        return make_attended_token(x, {norm, linears, heads, head_norms, rotation, output, scale, gated}, offset,
                                   places);
      },
      "x"_a, "norm"_a.none(), "linears"_a, "heads"_a, "head_norms"_a, "rotation"_a.none(), "offset"_a, "output"_a,
      "scale"_a, "places"_a, "gated"_a.none());
  module.def(
      "prepare_layer",
      [](nb::handle first, const nb::list& modules, const mx::array& x, const std::optional<NormLayer>& norm,
         const std::vector<LinearLayer>& linears, const std::vector<int>& heads,
         const std::vector<NormLayer>& head_norms, const std::optional<Rotation>& rotation, const LinearLayer& output,
         float scale, const Gated& gated, const std::optional<Ranks>& ranks) -> std::optional<nb::capsule> {
        auto layer = prepare_layer(x, {norm, linears, heads, head_norms, rotation, output, scale, gated}, ranks);
        if (!layer) return std::nullopt;
        return nb::capsule(new Prepared(std::move(layer), first, modules),
                           [](void* prepared) noexcept { delete static_cast<Prepared*>(prepared); });
      },
      "layer"_a, "modules"_a, "x"_a, "norm"_a.none(), "linears"_a, "heads"_a, "head_norms"_a, "rotation"_a.none(),
      "output"_a, "scale"_a, "gated"_a, "ranks"_a = nb::none());
  module.def(
      "holds", [](const nb::capsule& prepared) { return static_cast<const Prepared*>(prepared.data())->holds(); },
      "prepared"_a);
  module.def(
      "attended_layers",
      [](const mx::array& x, const std::vector<nb::capsule>& prepared, const std::vector<mx::array>& planes, int slot,
         const std::vector<int>& begins, const std::variant<int, mx::array>& offset) {
        std::vector<std::shared_ptr<const PreparedLayer>> layers;
        for (const auto& each : prepared) layers.push_back(static_cast<const Prepared*>(each.data())->layer());
        return make_attended_layers(x, std::move(layers), planes, slot, begins, offset);
      },
      "x"_a, "layers"_a, "planes"_a, "slot"_a, "begins"_a, "offset"_a);
  module.def(
      "set_threads",
      [](int count) {
        threads().set_threads(count);
        return threads().count();
      },
      "count"_a, "Compute each operation on `count` threads. Return how many it will be.");
  module.def(
      "instruction_set", [] { return name(instruction_set()); },
      "Name of the instruction set in use: AMX, AVX-512, AVX2, NEON or scalar.");
}
