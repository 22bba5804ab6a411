// Checks that the pool covers each loop exactly once, for any length and number of threads. Other callers use it
// meanwhile, and some of its threads do not run.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#ifdef __linux__
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#endif

#include "threads.h"

using mlx_cpu_kernels::Threads;

namespace {

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  failures++;
}

bool covers_once(Threads& threads, int64_t n, int64_t grain) {
  std::vector<int> visits(n);
  std::atomic<bool> aligned = true;
  threads.parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    if (begin % grain || (end % grain && end != n)) aligned = false;
    for (int64_t i = begin; i < end; i++) visits[i]++;
  });
  for (int count : visits)
    if (count != 1) return false;
  return aligned;
}

void test_lengths() {
  Threads threads;
  for (int count : {1, 2, 3, 8, 2, 1}) {
    threads.set_threads(count);
    expect(threads.count() == count, "the pool has another number of threads");
    for (int64_t n : {0, 1, 2, 7, 64, 65, 1000})
      for (int64_t grain : {1, 3, 64}) expect(covers_once(threads, n, grain), "a loop is not covered once");
  }
}

void test_loop_within_a_loop() {
  Threads threads(3);
  std::atomic<int64_t> sum = 0;
  threads.parallel_for(30, 1, [&](int64_t begin, int64_t end) {
    threads.parallel_for(end - begin, 1, [&](int64_t first, int64_t last) { sum += last - first; });
  });
  expect(sum == 30, "a loop within a loop is not covered once");
}

void test_two_callers() {
  Threads threads(2);
  auto use = [&] {
    for (int i = 0; i < 500; i++)
      if (!covers_once(threads, 100, 1)) failures++;
  };
  std::thread other(use);
  use();
  other.join();
  expect(failures == 0, "loops of two callers are not covered once");
}

// Throws in the piece of each thread: the loop throws that exception to its caller, and the pool stays usable.
void test_exceptions() {
  Threads threads(3);
  for (int64_t where : {0, 40, 80, 99}) {
    std::string caught;
    try {
      threads.parallel_for(100, 1, [&](int64_t begin, int64_t end) {
        if (begin <= where && where < end) throw std::runtime_error("of " + std::to_string(where));
      });
    } catch (const std::runtime_error& error) {
      caught = error.what();
    }
    expect(caught == "of " + std::to_string(where), "the exception of a piece is not thrown");
    expect(covers_once(threads, 100, 1), "a loop after an exception is not covered once");
  }
  bool has_thrown = false;
  try {
    threads.parallel_for(100, 1, [](int64_t, int64_t) { throw std::bad_alloc(); });
  } catch (const std::bad_alloc&) {
    has_thrown = true;
  }
  expect(has_thrown, "an exception of all pieces is not thrown");
}

// Changes the number of threads while another thread runs loops, each of which is still covered once.
void test_change_during_loops() {
  Threads threads(2);
  std::atomic<bool> is_done = false;
  std::atomic<int> wrong = 0;
  std::thread other([&] {
    while (!is_done)
      if (!covers_once(threads, 200, 1)) wrong++;
  });
  for (int i = 0; i < 300; i++) threads.set_threads(1 + i % 4);
  is_done = true;
  other.join();
  expect(wrong == 0, "a loop is not covered once while the number of threads changes");
}

// Pauses for far longer than idle workers spin, so that the next loop must wake them from sleep.
void test_pause() {
  Threads threads(3);
  for (int i = 0; i < 5; i++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    expect(covers_once(threads, 1000, 1), "a loop after a pause is not covered once");
  }
}

#ifdef __linux__
std::atomic<int> held = 0;
std::atomic<bool> is_released = false;

void hold(int) {
  held++;
  while (!is_released) usleep(1000);
}

std::set<int> own_threads() {
  std::set<int> ids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    ids.insert(std::stoi(entry.path().filename()));
  return ids;
}

// Holds all threads of the pool, as a busy system does: loops are covered without them, and with them later.
void test_threads_that_do_not_run() {
  const auto before = own_threads();
  Threads threads(3);
  signal(SIGUSR1, hold);
  for (int id : own_threads())
    if (!before.count(id)) syscall(SYS_tgkill, getpid(), id, SIGUSR1);
  while (held < 2) std::this_thread::yield();
  auto loops = std::async(std::launch::async, [&] {
    for (int i = 0; i < 100; i++)
      if (!covers_once(threads, 1000, 1)) return false;
    return true;
  });
  const bool has_ended = loops.wait_for(std::chrono::seconds(60)) == std::future_status::ready;
  is_released = true;
  expect(has_ended, "a loop waits for threads that do not run");
  expect(loops.get(), "a loop without threads that do not run is not covered once");
  expect(covers_once(threads, 1000, 1), "a loop with threads that run again is not covered once");
}

std::atomic<int> loops = 0;

void wait_for_loops(int count) {
  for (const int until = loops + count; loops < until;) std::this_thread::yield();
}

// Ends processes while another thread computes, as a stream of MLX does until all is destroyed that came after it.
void test_end_of_the_process() {
  for (int i = 0; i < 20; i++) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      std::atexit([] { wait_for_loops(100); });
      mlx_cpu_kernels::threads().set_threads(3);
      std::thread([] {
        for (;; loops++)
          mlx_cpu_kernels::threads().parallel_for(30, 1, [](int64_t, int64_t) { std::this_thread::yield(); });
      }).detach();
      wait_for_loops(10);
      std::exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    expect(status == 0, "a process that ends while a loop runs does not end well");
  }
}
#endif

}  // namespace

int main() {
#ifdef __linux__
  test_end_of_the_process();  // first: a child has only the thread that forks
#endif
  test_lengths();
  test_loop_within_a_loop();
  test_two_callers();
  test_exceptions();
  test_change_during_loops();
  test_pause();
#ifdef __linux__
  test_threads_that_do_not_run();
#endif
  std::printf("threads: %d failures\n", failures);
  return failures ? 1 : 0;
}
