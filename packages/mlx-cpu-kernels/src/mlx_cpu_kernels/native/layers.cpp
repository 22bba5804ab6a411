// The public functions of layers.h, those whose speed depends on no instruction set, and the kernels for any processor.
#include "layers.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "layer_kernels.h"
#include "quantized.h"

namespace mlx_cpu_kernels {

const LayerKernels base_layer_kernels = layer_kernels();

namespace {

const LayerKernels& selected_layers() {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::avx512:
      return avx512_layer_kernels;
    case InstructionSet::avx2:
      return avx2_layer_kernels;
    default:
      break;
  }
#endif
  return base_layer_kernels;
}

constexpr int64_t kValuesOfThread = 1 << 14;  // fewer are computed sooner by one thread than shared

int64_t rows_of_thread(int64_t size) { return std::max<int64_t>(1, kValuesOfThread / std::max<int64_t>(1, size)); }

// Cosines and sines of a token's angles. All layers ask for the same ones: the last table is kept.
class Angles {
 public:
  const float* cosines(int64_t token) const { return cosines_.data() + token * pairs_; }
  const float* sines(int64_t token) const { return sines_.data() + token * pairs_; }

  void set(const float* frequencies, int64_t pairs, int32_t offset, int64_t tokens, float scale) {
    const bool is_same = offset == offset_ && tokens == tokens_ && scale == scale_ && pairs == pairs_ &&
                         std::memcmp(frequencies, frequencies_.data(), pairs * sizeof(float)) == 0;
    if (is_same) return;
    frequencies_.assign(frequencies, frequencies + pairs);
    offset_ = offset;
    tokens_ = tokens;
    scale_ = scale;
    pairs_ = pairs;
    cosines_.resize(tokens * pairs);
    sines_.resize(tokens * pairs);
    for (int64_t token = 0; token < tokens; token++) {
      const float position = (static_cast<float>(token) + static_cast<float>(offset)) * scale;
      for (int64_t pair = 0; pair < pairs; pair++) {
        const float angle = position * frequencies[pair];
        cosines_[token * pairs + pair] = std::cos(angle);
        sines_[token * pairs + pair] = std::sin(angle);
      }
    }
  }

 private:
  int32_t offset_ = 0;
  int64_t tokens_ = -1, pairs_ = 0;
  float scale_ = 0;
  std::vector<float> frequencies_, cosines_, sines_;
};

void rotate_token(const Rotation& r, const float* x, float* y, const float* cosines, const float* sines) {
  const int64_t pairs = r.dims / 2, step = r.is_traditional ? 2 : 1, distance = r.is_traditional ? 1 : pairs;
  for (int64_t pair = 0; pair < pairs; pair++) {
    const float a = x[pair * step], b = x[pair * step + distance];
    y[pair * step] = a * cosines[pair] - b * sines[pair];
    y[pair * step + distance] = a * sines[pair] + b * cosines[pair];
  }
  std::memcpy(y + r.dims, x + r.dims, (r.size - r.dims) * sizeof(float));
}

}  // namespace

void rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t size, float epsilon, Threads& threads) {
  threads.parallel_for(rows, rows_of_thread(size), [&](int64_t begin, int64_t end) {
    selected_layers().rms_norm(x + begin * size, weight, y + begin * size, end - begin, size, epsilon);
  });
}

void swiglu(const float* gate, const float* up, float* y, int64_t size, Threads& threads) {
  threads.parallel_for(size, kValuesOfThread, [&](int64_t begin, int64_t end) {
    selected_layers().swiglu(gate + begin, up + begin, y + begin, end - begin);
  });
}

void rotate(const Rotation& r, Threads& threads) {
  static thread_local Angles angles;
  for (int64_t batch = 0; batch < r.batch; batch++) {
    angles.set(r.frequencies, r.dims / 2, r.offsets[batch * r.offset_stride], r.tokens, r.scale);
    const Angles& shared = angles;
    threads.parallel_for(r.heads, rows_of_thread(r.tokens * r.size), [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; head++) {
        for (int64_t token = 0; token < r.tokens; token++) {
          const float* x = r.x + batch * r.batch_stride + head * r.head_stride + token * r.token_stride;
          float* y = r.y + ((batch * r.heads + head) * r.tokens + token) * r.size;
          rotate_token(r, x, y, shared.cosines(token), shared.sines(token));
        }
      }
    });
  }
}

void attend(const Attention& attention, Threads& threads) {
  threads.parallel_for(attention.batch * attention.kv_heads, 1, [&](int64_t begin, int64_t end) {
    selected_layers().attend(attention, begin, end);
  });
}

}  // namespace mlx_cpu_kernels
