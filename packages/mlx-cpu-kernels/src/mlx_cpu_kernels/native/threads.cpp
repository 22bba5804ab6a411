#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace mlx_cpu_kernels {
namespace {

// A decode step issues a product every few tens of microseconds: a worker that slept between them would be woken for
// longer than it works. It spins for about that long, then sleeps, so that an idle server uses no processor.
constexpr int kSpins = 4000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

struct Threads::Pool {
  struct Loop {
    Call call = nullptr;
    void* body = nullptr;
    int64_t n = 0;
    int64_t piece = 0;  // length of a range
  };
  // The round, and how many of its ranges nobody has taken, in the lowest bits.
  static constexpr uint64_t kRanges = uint64_t{1} << 16;

  explicit Pool(int workers) {
    try {
      for (int i = 1; i <= workers; i++) threads.emplace_back([this] { work(); });
    } catch (...) {  // as where the system allows no more threads
      end();
      throw;
    }
  }

  ~Pool() { end(); }

  void end() {
    stopping = true;
    publish();
    for (auto& thread : threads) thread.join();
  }

  // Begins a round of `ranges`, which threads then take.
  void publish(uint64_t ranges = 0) {
    std::lock_guard lock(mutex);  // a worker that is about to sleep either sees the new round or is woken
    open.store((open.load(std::memory_order_relaxed) / kRanges + 1) * kRanges + ranges, std::memory_order_release);
    wake.notify_all();
  }

  // Takes ranges of a round while there are any, so that nobody waits for a thread that the system does not run. The
  // loop is the round's until the last range that was taken is finished.
  void run_ranges(uint64_t round) {
    uint64_t now = open.load(std::memory_order_acquire);
    while (now / kRanges == round && now % kRanges != 0) {
      if (!open.compare_exchange_weak(now, now - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      run_range(static_cast<int64_t>(now % kRanges) - 1);
      unfinished.fetch_sub(1, std::memory_order_acq_rel);
      now = open.load(std::memory_order_acquire);
    }
  }

  void run_range(int64_t i) {
    int64_t begin = i * loop.piece;
    int64_t end = begin + loop.piece < loop.n ? begin + loop.piece : loop.n;
    try {
      loop.call(loop.body, begin, end);
    } catch (...) {
      if (!has_failed.exchange(true)) failure = std::current_exception();
    }
  }

  uint64_t round() const { return open.load(std::memory_order_acquire) / kRanges; }

  uint64_t wait_for_round_after(uint64_t seen) {
    for (int i = 0; i < kSpins; i++) {
      if (uint64_t now = round(); now != seen) return now;
      relax();
    }
    std::unique_lock lock(mutex);
    wake.wait(lock, [&] { return round() != seen; });
    return round();
  }

  void work() {
    uint64_t seen = 0;
    while (true) {
      seen = wait_for_round_after(seen);
      if (stopping) return;
      run_ranges(seen);
    }
  }

  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<uint64_t> open{0};
  std::atomic<int64_t> unfinished{0};  // ranges of the round
  std::atomic<bool> stopping{false};
  Loop loop;
  std::atomic<bool> has_failed{false};
  std::exception_ptr failure;  // the first, read when all pieces have ended
  std::vector<std::thread> threads;
};

// The right to use the pool, where it was free, until the end of the block.
class Threads::Use {
 public:
  explicit Use(std::atomic<bool>& busy) : busy_(busy), granted_(!busy.exchange(true, std::memory_order_acquire)) {}
  ~Use() {
    if (granted_) busy_.store(false, std::memory_order_release);
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

  bool granted() const { return granted_; }

 private:
  std::atomic<bool>& busy_;
  const bool granted_;
};

Threads::Threads(int count) { set_threads(count); }

Threads::~Threads() = default;

void Threads::set_threads(int count) {
  count = count < 1 ? 1 : count;
  while (true) {
    Use use(busy_);
    if (!use.granted()) {
      std::this_thread::yield();
      continue;
    }
    if (count == count_) return;
    count_ = 1;
    pool_ = nullptr;
    if (count > 1) pool_ = std::make_unique<Pool>(count - 1);
    count_ = count;
    return;
  }
}

void Threads::run(int64_t n, int64_t grain, Call call, void* body) {
  Use use(busy_);
  if (!use.granted() || !pool_) {
    call(body, 0, n);
    return;
  }
  Pool& pool = *pool_;
  int64_t threads = static_cast<int64_t>(pool.threads.size()) + 1;
  int64_t grains = (n + grain - 1) / grain;
  int64_t piece = (grains + threads - 1) / threads * grain;
  int64_t ranges = (n + piece - 1) / piece;
  pool.loop = {call, body, n, piece};
  pool.unfinished.store(ranges, std::memory_order_relaxed);
  pool.publish(static_cast<uint64_t>(ranges));
  pool.run_ranges(pool.round());
  // The last ranges are as long as this thread's: the wait is short unless the machine is busy, where yielding lets
  // them run.
  for (int i = 0; pool.unfinished.load(std::memory_order_acquire) != 0; i++) {
    if (i < kSpins)
      relax();
    else
      std::this_thread::yield();
  }
  if (pool.has_failed) {
    pool.has_failed = false;
    std::rethrow_exception(std::exchange(pool.failure, nullptr));
  }
}

}  // namespace mlx_cpu_kernels
