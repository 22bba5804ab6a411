// The kernels by NEON.
#include "neon_vector.h"
#include "products.h"

namespace mlx_cpu_kernels {

const Kernels neon_kernels = kernels_of<Neon>();

}  // namespace mlx_cpu_kernels
