// cblas_sgemm in front of OpenBLAS's, for products of few rows. blas/install.py points libmlx.so's calls at it, in the
// entries that blas/slots.py finds.
//
// OpenBLAS packs both operands of every product. When A has one row, as in decode, packing reads and writes the weights
// before they are used once, at a third of memory speed. cblas_sgemv reads them in place. With 2 to 8 rows OpenBLAS has
// kernels that do not pack, on AVX-512, but uses them only for small products. So a wide product is cut into blocks of
// columns of that size. The bounds are those of kernel/x86_64/sgemm_small_kernel_permit_skylakex.c in OpenBLAS 0.3.34.
// If they change, the blocks get slower, never wrong.

#include <algorithm>
#include <cstdint>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

enum { kRowMajor = 101, kAsStored = 111, kTransposed = 112 };

constexpr int kLeastDepth = 32;           // below it OpenBLAS packs anyway
constexpr int kMostProducts = 1'000'000;  // of a product that it does not pack: rows * columns * depth,
constexpr int kMostResults = 1200;        // and rows * columns
constexpr int kLeastColumns = 16;         // smaller blocks cost more in calls than they save

using Sgemm = void (*)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
                       const float* b, int ldb, float beta, float* c, int ldc);
using Sgemv = void (*)(int order, int trans, int m, int n, float alpha, const float* a, int lda, const float* x,
                       int incx, float beta, float* y, int incy);

Sgemm sgemm = nullptr;
Sgemv sgemv = nullptr;
int most_rows_in_blocks = 1;

bool is_plain(int trans) { return trans == kAsStored || trans == kTransposed; }

// Columns of a block for `rows` rows; 0 where cutting does not pay.
int columns_of_block(int rows, int columns, int depth) {
  if (rows > most_rows_in_blocks || depth < kLeastDepth) return 0;
  const int most = std::min(kMostProducts / depth, kMostResults) / rows;
  return most >= kLeastColumns && most < columns ? most : 0;
}

}  // namespace

// OpenBLAS's functions with 32-bit integers. Products of 2 to `most_rows` rows are cut into blocks; 1 cuts none. Before
// the first product, or with the same arguments.
EXPORTED void mlx_cpu_kernels_use_openblas(Sgemm gemm, Sgemv gemv, int most_rows) {
  sgemm = gemm;
  sgemv = gemv;
  most_rows_in_blocks = most_rows;
}

EXPORTED void mlx_cpu_kernels_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                                    const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  // Only sgemm scales C by beta where there is nothing to add; what else is no plain product is OpenBLAS's to judge.
  if (order == kRowMajor && is_plain(trans_a) && is_plain(trans_b) && k > 0) {
    const bool a_is_plain = trans_a == kAsStored, b_is_plain = trans_b == kAsStored;
    if (m == 1) {  // the matrix is B, as stored (N, K) if it is transposed; x is A
      return sgemv(kRowMajor, b_is_plain ? kTransposed : kAsStored, b_is_plain ? k : n, b_is_plain ? n : k, alpha, b,
                   ldb, a, a_is_plain ? 1 : lda, beta, c, 1);
    }
    if (n == 1) {  // the matrix is A; x is B, and y the only column of C
      return sgemv(kRowMajor, trans_a, a_is_plain ? m : k, a_is_plain ? k : m, alpha, a, lda, b, b_is_plain ? ldb : 1,
                   beta, c, ldc);
    }
    // Only the layout of a Linear's weight, (N, K), gains by blocks.
    const int step = m >= 2 && !b_is_plain ? columns_of_block(m, n, k) : 0;
    if (step > 0) {
      for (int column = 0; column < n; column += step) {
        sgemm(order, trans_a, trans_b, m, std::min(step, n - column), k, alpha, a, lda,
              b + static_cast<int64_t>(column) * ldb, ldb, beta, c + column, ldc);
      }
      return;
    }
  }
  sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
