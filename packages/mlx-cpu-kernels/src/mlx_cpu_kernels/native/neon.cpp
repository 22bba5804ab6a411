// Compiles the kernels for NEON, which every aarch64 has: no flag and no question to the processor is needed.
#include "neon_vector.h"
#include "products.h"

namespace mlx_cpu_kernels {

const Kernels neon_kernels = kernels_of<Neon>();

}  // namespace mlx_cpu_kernels
