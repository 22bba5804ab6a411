// Products of few rows: by spans (span_product.h) or by blocks (byte_product.h). The matrices of one x share a loop.
#pragma once

#include "byte_product.h"
#include "span_product.h"

namespace mlx_cpu_kernels {
namespace {

// Products of a value and a weight that are worth another thread: some microseconds.
constexpr int64_t kProductsAThread = 100'000;

// Results of a piece of the matrix, which are kept in float32 until they are stored in the type of y.
constexpr int64_t kPiece = 64;
constexpr int64_t kShare = 16;  // rows that one thread computes: a cache line of float32 results

// Whether x is multiplied by spans (span_product.h).
template <class V>
constexpr bool goes_by_spans(Format format) {
  return V::kSumsPairs && format.is_affine() && format.bits == 4;
}

// The columns [first, last) of y: at most a piece.
template <class V, Format format>
void multiply_piece(const ByteTile<V, format>& tile, int64_t x_rows, const RowsProduct& product, int64_t first,
                    int64_t last) {
  constexpr int64_t kStride = kPiece + kByteRows;
  const int64_t tiles = (x_rows + kByteColumns - 1) / kByteColumns;
  float results[kMostByteRows * kStride];
  for (int64_t n = first; n < last; n += kByteRows) {
    // At the end of the matrix the last rows are taken again. Results before `first` go into the margin.
    int64_t from = smaller(n, product.w.rows - kByteRows);
    for (int64_t t = 0; t < tiles; t++) {  // of equal height: five rows are 3 and 2
      int64_t row = x_rows * t / tiles, height = x_rows * (t + 1) / tiles - row;
      float* to = results + row * kStride + kByteRows + from - first;
      unroll<kByteColumns>([&]<int i>() {
        if (height == i + 1) tile.template multiply<i + 1>(product.w, from, row, to, kStride);
      });
    }
  }
  for (int64_t j = 0; j < x_rows; j++)
    store_row<V>(results + j * kStride + kByteRows, last - first, product.y.row(j), product.y.type, first);
}

// Calls multiply(product, first, last), which begin_share() makes for each thread, for all rows of all matrices, a
// piece at a time. They are one loop, in which the threads take equal shares: a share may end within a piece.
template <class F>
void multiply_pieces(const RowsProduct* products, int count, int64_t x_rows, Threads& threads, F&& begin_share) {
  auto shares_of = [](const RowsProduct& product) { return (product.w.rows + kShare - 1) / kShare; };
  int64_t shares = 0;
  for (int i = 0; i < count; i++) shares += shares_of(products[i]);
  int64_t grain = larger(1, kProductsAThread / (kShare * products[0].w.columns * x_rows));
  threads.parallel_for(shares, grain, [&](int64_t begin, int64_t end) {
    auto multiply = begin_share();
    int64_t before = 0;  // shares of the matrices before
    for (int i = 0; i < count; before += shares_of(products[i]), i++) {
      int64_t last = smaller((end - before) * kShare, products[i].w.rows);
      for (int64_t row = larger(begin - before, 0) * kShare; row < last; row += kPiece)
        multiply(products[i], row, smaller(row + kPiece, last));
    }
  });
}

template <class V, int vectors, int groups>
bool multiply_by_spans(const Rows& x, const RowsProduct* products, int count, Threads& threads) {
  const SpanRows<V, vectors> rows(x, products[0].w.columns, products[0].w.group_size);
  if (!rows.fits()) return false;
  multiply_pieces(products, count, x.count, threads, [&] {
    return [tile = SpanTile<V, vectors, groups>(rows, products[0].w.group_size)](const RowsProduct& product,
                                                                                 int64_t first, int64_t last) {
      float results[kMostByteRows * kSpanRows];
      for (int64_t n = first; n < last; n += kSpanRows) {
        const int64_t height = smaller(kSpanRows, last - n);
        tile.multiply(product.w, n, height, results, kSpanRows);
        for (int64_t j = 0; j < tile.x_rows(); j++)
          store_row<V>(results + j * kSpanRows, height, product.y.row(j), product.y.type, n);
      }
    };
  });
  return true;
}

// Spans of four vectors take fewest operations, where not much of the last one lies beyond the matrix.
template <class V>
bool multiply_by_spans(const Rows& x, const RowsProduct* products, int count, Threads& threads) {
  const int64_t columns = products[0].w.columns, group_size = products[0].w.group_size;
  const int64_t by_four = round_up(columns, Span<V, 4>::kColumns), by_two = round_up(columns, Span<V, 2>::kColumns);
  auto multiply = group_size == 32 ? multiply_by_spans<V, 2, 4>
                  : (by_four - by_two) * 16 > by_two
                      ? group_size == 64 ? multiply_by_spans<V, 2, 2> : multiply_by_spans<V, 2, 1>
                  : group_size == 64 ? multiply_by_spans<V, 4, 4>
                                     : multiply_by_spans<V, 4, 2>;
  return multiply(x, products, count, threads);
}

// Products of one format. Returns false, and computes nothing, where x does not fit.
template <class V, Format format>
bool multiply_by_bytes(const Rows& x, const RowsProduct* products, int count, Threads& threads) {
  if constexpr (goes_by_spans<V>(format)) {
    return multiply_by_spans<V>(x, products, count, threads);
  } else {
    const int group_size = products[0].w.group_size;
    const ByteRows<V, format> bytes(x, products[0].w.columns, group_size);
    if (!bytes.fits()) return false;
    multiply_pieces(products, count, x.count, threads, [&] {
      return [tile = ByteTile<V, format>(bytes, group_size), rows = x.count](const RowsProduct& product, int64_t first,
                                                                             int64_t last) {
        multiply_piece<V, format>(tile, rows, product, first, last);
      };
    });
    return true;
  }
}

// Whether the product goes by bytes: where there are so few rows that dequantized panels are slower. A row of
// the matrix also costs time beside its products, which counts for more where it is short.
template <class V>
bool pays_by_bytes(const Rows& x, const Quantized& w) {
  int64_t most = smaller(V::most_byte_rows(w.mode, w.bits), larger(w.columns / 64, 4));
  return x.count <= smaller(most, kMostByteRows) && w.rows >= kByteRows && w.mode != Mode::mxfp8;
}

template <class V>
bool multiply_by_bytes(const Rows& x, const RowsProduct* products, int count, Threads& threads) {
  bool fits = false;
  with_format(products[0].w, [&]<Format format>() {
    if constexpr (format.mode != Mode::mxfp8) fits = multiply_by_bytes<V, format>(x, products, count, threads);
  });
  return fits;
}

}  // namespace
}  // namespace mlx_cpu_kernels
