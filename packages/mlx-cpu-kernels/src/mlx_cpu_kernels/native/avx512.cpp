// The kernels by AVX-512. Compiled for it, and entered only after dispatch.cpp has asked the processor. All code here
// has internal linkage, so that nothing of it can stand in for a function of another file.
#include "avx512_vector.h"
#include "products.h"

namespace mlx_cpu_kernels {

const Kernels avx512_kernels = kernels_of<Avx512>();

}  // namespace mlx_cpu_kernels
