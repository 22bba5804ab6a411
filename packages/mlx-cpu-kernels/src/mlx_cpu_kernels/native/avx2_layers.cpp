#include "layer_kernels.h"

namespace mlx_cpu_kernels {
const LayerKernels avx2_layer_kernels = layer_kernels();
}  // namespace mlx_cpu_kernels
