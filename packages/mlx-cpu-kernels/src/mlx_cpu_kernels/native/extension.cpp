// MLX operations computed by the kernels of this folder: lazy like MLX's own, and given to it by its documented extension
// mechanism, a `Primitive` with `eval_cpu`. Each function takes what MLX's of the same name takes. It builds MLX's own
// operation wherever the kernels do not apply: on another device, in another mode, of another type or shape.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "extension.h"
#include "extension_cached.h"
#include "extension_fused.h"
#include "extension_layers.h"
#include "extension_quantized.h"
#include "mlx/version.h"
#include "quantized.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mlx_cpu_kernels;

NB_MODULE(_kernels, module) {
  module.doc() = "MLX's operations, computed by native kernels on a CPU.";
  module.attr("MLX_VERSION") = std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." +
                               std::to_string(MLX_VERSION_PATCH);
  module.def("quantized_matmul", &make_product, nb::arg(), nb::arg(), "scales"_a, "biases"_a = nb::none(),
             "transpose"_a = true, "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a = "affine", nb::kw_only(),
             "stream"_a = nb::none());
  module.def("gather_qmm", &make_gathered_product, nb::arg(), nb::arg(), "scales"_a, "biases"_a = nb::none(),
             "lhs_indices"_a = nb::none(), "rhs_indices"_a = nb::none(), "transpose"_a = true,
             "group_size"_a = nb::none(), "bits"_a = nb::none(), "mode"_a = "affine", "global_scale"_a = nb::none(),
             nb::kw_only(), "sorted_indices"_a = false, "stream"_a = nb::none());
  module.def("dequantize", &make_dequantized, nb::arg(), "scales"_a, "biases"_a = nb::none(), "group_size"_a = nb::none(),
             "bits"_a = nb::none(), "mode"_a = "affine", "global_scale"_a = nb::none(), "dtype"_a = nb::none(),
             nb::kw_only(), "stream"_a = nb::none());
  module.def("rms_norm", &make_rms_norm, "x"_a, "weight"_a.none(), "eps"_a, nb::kw_only(), "stream"_a = nb::none());
  module.def("layer_norm", &make_layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a, nb::kw_only(),
             "stream"_a = nb::none());
  module.def("rope", &make_rotated, "a"_a, "dims"_a, nb::kw_only(), "traditional"_a, "base"_a.none(), "scale"_a, "offset"_a,
             "freqs"_a = nb::none(), "stream"_a = nb::none());
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
  module.def("attended_token", &make_attended_token, "x"_a, "norm"_a.none(), "linears"_a, "heads"_a, "head_norms"_a,
             "rotation"_a.none(), "offset"_a, "output"_a, "scale"_a, "places"_a, "gated"_a.none());
  module.def("set_threads", [](int count) {
    threads().set_threads(count);
    return threads().count();
  }, "count"_a, "Compute each operation on `count` threads. Return how many it will be.");
  module.def("instruction_set", [] { return name(instruction_set()); },
             "Name of the instruction set in use: AVX-512, AVX2, NEON or scalar.");
}
