// Speed of the products on one core, by processor time: GB/s of the matrix as it is stored, and GFLOP/s. Matrices are
// taken in turn, so that each is read from memory. An argument names an OpenBLAS library to compare many rows with.
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "random_matrix.h"

using namespace mlx_cpu_kernels;

namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

double median(std::vector<double>& samples) {
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

// Seconds a call: the median of 9 samples of at least 20 ms each.
double seconds(const std::function<void(int)>& call) {
  std::vector<double> samples;
  int i = 0;
  for (int sample = 0; sample < 9; sample++) {
    double begin = now(), time = 0;
    int calls = 0;
    for (; time < 0.02; calls++, time = now() - begin) call(i++);
    samples.push_back(time / calls);
  }
  return median(samples);
}

struct Compared {
  double first, second, ratio;  // medians of seconds a call, and of the second over the first
};

// Two calls by turns, 21 times: what slows the machine meanwhile slows both.
Compared compare(const std::function<void()>& first, const std::function<void()>& second) {
  std::vector<double> firsts, seconds, ratios;
  for (int i = 0; i < 21; i++) {
    double begin = now();
    first();
    double between = now();
    second();
    firsts.push_back(between - begin);
    seconds.push_back(now() - between);
    ratios.push_back(seconds.back() / firsts.back());
  }
  return {median(firsts), median(seconds), median(ratios)};
}

using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);

Sgemm load_sgemm(const char* path) {
  void* library = path ? dlopen(path, RTLD_NOW) : nullptr;
  if (!library) return nullptr;
  if (auto set = reinterpret_cast<void (*)(int)>(dlsym(library, "scipy_openblas_set_num_threads"))) set(1);
  return reinterpret_cast<Sgemm>(dlsym(library, "scipy_cblas_sgemm"));
}

void print_memory_speed() {
  std::vector<uint64_t> memory(32 << 20, 1);  // 256 MB
  double time = seconds([&](int) {
    uint64_t sums[64] = {};
    for (size_t i = 0; i < memory.size(); i += 64)
      for (int j = 0; j < 64; j++) sums[j] += memory[i + j];
    asm volatile("" ::"r"(sums) : "memory");
  });
  std::printf("read from memory: %.1f GB/s\n", double(memory.size()) * 8 / time / 1e9);
}

struct Shape {
  int64_t n, k;
  int bits, group_size;
  Type type, x_type;
  Mode mode = Mode::affine;
};

Shape shape_of(Mode mode, int64_t n, int64_t k) {
  auto [bits, group_size, type] = fixed_format(mode);
  return {n, k, bits, group_size, type, Type::float32, mode};
}

void bench(const Shape& shape, const std::vector<int64_t>& rows_list, Sgemm sgemm) {
  auto [n, k, bits, group_size, type, x_type, mode] = shape;
  Random random(1);
  double bytes = double(n) * k * bits / 8 + (mode == Mode::affine ? 2.0 : 1.0) * n * k / group_size * size_of(type);
  int copies = int(std::min(64.0, 96e6 / bytes) + 1);
  RandomMatrix w(random, n, k, bits, group_size, type, 0, 0, copies, mode);
  Threads one(1);
  for (int64_t rows : rows_list) {
    Values x(random, x_type, rows * k), y(x_type, rows * n);
    auto product = [&](int i) {
      Quantized q = w.quantized;
      q.weights += i % copies * n * q.row_words;
      q.scales = at(q.scales, type, i % copies * n * q.row_groups);
      if (q.biases) q.biases = at(q.biases, type, i % copies * n * q.row_groups);
      multiply_transposed(x.data(), x_type, k, rows, q, y.data(), n, one);
    };
    double time = seconds(product);
    std::printf("%6ld x %-5ld %d bits, groups of %3d, scales %d, x %d, %4ld rows: %9.1f us %6.1f GB/s %6.1f GFLOP/s",
                long(n), long(k), bits, group_size, int(type), int(x_type), long(rows), time * 1e6, bytes / time / 1e9,
                2.0 * rows * n * k / time / 1e9);
    if (sgemm && rows >= 32) {
      Values dense(random, Type::float32, n * k), z(Type::float32, rows * n), a(random, Type::float32, rows * k);
      int i = 0;
      auto by_blas = [&] {
        sgemm(101, 111, 112, int(rows), int(n), int(k), 1, static_cast<float*>(a.data()), int(k),
              static_cast<float*>(dense.data()), int(k), 0, static_cast<float*>(z.data()), int(n));
      };
      auto [ours, blas, ratio] = compare([&] { product(i++); }, by_blas);
      double gflop = 2e-9 * rows * n * k;
      std::printf(", by turns %6.1f, OpenBLAS %6.1f, ratio %.2f", gflop / ours, gflop / blas, ratio);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int count, char** arguments) {
  Sgemm sgemm = load_sgemm(count > 1 ? arguments[1] : nullptr);
  if (const char* set = std::getenv("MLX_CPU_KERNELS_BENCH_SET"))
    for (InstructionSet s : {InstructionSet::scalar, InstructionSet::avx2, InstructionSet::avx512, InstructionSet::amx})
      if (std::string(name(s)) == set) set_instruction_set(s);
  std::printf("%s\n", name(instruction_set()));
  print_memory_speed();
  constexpr Type f32 = Type::float32, f16 = Type::float16, bf16 = Type::bfloat16;
  bench({4096, 4096, 4, 64, f32, f32}, {1, 2, 3, 4, 6, 8, 12, 16, 32, 128, 512}, sgemm);
  for (auto [n, k] : {std::pair{4096, 14336}, {4096, 11008}, {1024, 1024}, {576, 576}})
    bench({n, k, 4, 64, f32, f32}, {512}, sgemm);
  bench({4096, 4096, 4, 64, bf16, bf16}, {1, 8, 512}, sgemm);
  for (int bits : {2, 3, 5, 6, 8}) bench({4096, 4096, bits, 64, f32, f32}, {1, 2, 3, 4, 8, 128}, nullptr);
  for (Mode mode : {Mode::mxfp4, Mode::nvfp4, Mode::mxfp8})
    bench(shape_of(mode, 4096, 4096), {1, 2, 4, 8, 16, 128}, nullptr);
  bench(shape_of(Mode::mxfp4, 2880, 2880), {1, 4, 32}, nullptr);
  for (auto [n, k] : {std::pair{576, 576}, {192, 576}, {1536, 576}, {576, 1536}, {49152, 576}})
    bench({n, k, 4, 32, f16, f32}, n > 9999 ? std::vector<int64_t>{1, 8} : std::vector<int64_t>{1, 8, 128}, nullptr);
  bench({49152, 576, 8, 64, f16, f32}, {1, 8}, nullptr);
}
