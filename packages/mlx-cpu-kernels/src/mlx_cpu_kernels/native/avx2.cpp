// The kernels by AVX2. Compiled for it, and entered only after dispatch.cpp has asked the processor. All code here
// has internal linkage, so that nothing of it can stand in for a function of another file.
#include "avx2_vector.h"
#include "products.h"

namespace mlx_cpu_kernels {

const Kernels avx2_kernels = kernels_of<Avx2>();

}  // namespace mlx_cpu_kernels
