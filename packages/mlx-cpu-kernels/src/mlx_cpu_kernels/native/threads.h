// A small pool of threads that share loops.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace mlx_cpu_kernels {

// The caller's thread is one of the `count` threads: a pool of one has no workers and never synchronizes.
class Threads {
 public:
  explicit Threads(int count = 1);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_.load(std::memory_order_relaxed); }
  // Ends the workers and starts others, when no loop uses them: a loop of another thread is waited for, or runs alone
  // meanwhile. Not within a loop. Throws std::system_error where the system starts no further thread; the pool then has
  // one.
  void set_threads(int count);

  // Calls f(begin, end) for ranges that cover [0, n), at most as many as threads, each a multiple of `grain` long
  // except the last. Returns when all calls have, and throws the first exception that one has thrown. A loop within a
  // loop, or a loop while another thread uses the pool, runs in the caller's thread alone.
  template <class F>
  void parallel_for(int64_t n, int64_t grain, F&& f) {
    if (n <= 0) return;
    if (count() == 1 || n <= grain) {
      f(int64_t{0}, n);
      return;
    }
    using Body = std::remove_reference_t<F>;
    run(
        n, grain, [](void* body, int64_t begin, int64_t end) { (*static_cast<Body*>(body))(begin, end); },
        const_cast<std::remove_const_t<Body>*>(&f));
  }

 private:
  using Call = void (*)(void* body, int64_t begin, int64_t end);
  void run(int64_t n, int64_t grain, Call call, void* body);

  struct Pool;
  class Use;
  std::atomic<int> count_{1};
  std::atomic<bool> busy_{false};  // true while a loop uses the pool, or it is replaced
  std::unique_ptr<Pool> pool_;
};

// Threads of all operations. MLX evaluates one operation at a time on each of its streams. They may compute until the
// process has ended, so the pool is never destroyed.
inline Threads& threads() {
  static Threads& pool = *new Threads;
  return pool;
}

}  // namespace mlx_cpu_kernels
