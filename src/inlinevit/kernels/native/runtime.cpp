#include "runtime.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace inlinevit {
namespace {

struct Job {
  long count;
  Task task;
  void* context;
  std::atomic<long> next{0};
  std::atomic<bool> failed{false};
  // Workers that are inside run(); changed under the pool's mutex.
  std::atomic<int> inside{0};

  void run() {
    for (long index; (index = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      try {
        task(context, index);
      } catch (...) {
        failed = true;
      }
    }
  }
};

// How long to watch for what comes next before going to sleep. Waking up takes about as long; the steps of one call,
// and the layers of a model, follow each other faster.
constexpr auto WATCH = std::chrono::microseconds(40);

template <typename Condition>
void watch(Condition condition) {
  using Clock = std::chrono::steady_clock;
  for (const auto end = Clock::now() + WATCH; !condition() && Clock::now() < end;) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }
}

// The threads of this library, where there are none of OpenMP to use. They sleep between calls: spinning ones would
// slow down torch's threads. A job lies in the queue once for each
// worker that it could use. Whoever has called run_tasks works as well, and never waits for workers that have not
// come: calls from several threads share the workers, and each of them ends even if it gets none.
class Pool {
 public:
  void run(Job& job, long threads) {
    {
      std::lock_guard lock(mutex_);
      grow(threads - 1);
      for (long i = 1; i < threads; ++i) queue_.push_back(&job);
      waiting_ = queue_.size();
    }
    for (long i = 1; i < threads; ++i) wake_.notify_one();
    job.run();
    std::unique_lock lock(mutex_);
    queue_.erase(std::remove(queue_.begin(), queue_.end(), &job), queue_.end());
    waiting_ = queue_.size();
    if (job.inside > 0) {
      lock.unlock();
      watch([&] { return job.inside == 0; });
      lock.lock();
    }
    left_.wait(lock, [&] { return job.inside == 0; });
  }

 private:
  void grow(long workers) {
    for (; workers_ < workers; ++workers_) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (const std::system_error&) {
        return;  // The system allows no more threads: the others do the work.
      }
    }
  }

  [[noreturn]] void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return !queue_.empty(); });
      Job& job = *queue_.front();
      queue_.pop_front();
      waiting_ = queue_.size();
      ++job.inside;
      lock.unlock();
      job.run();
      lock.lock();
      if (--job.inside == 0) left_.notify_all();
      // The job may be gone now.
      lock.unlock();
      watch([&] { return waiting_ > 0; });
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::deque<Job*> queue_;
  // The length of the queue, to be read without the mutex.
  std::atomic<size_t> waiting_{0};
  long workers_ = 0;
};

// Never destroyed, because its workers run until the process ends.
std::atomic<Pool*> pool{nullptr};
// torch's OpenMP, if it is known: its threads still wait actively when the kernels begin, and would compete with others.
std::atomic<OpenMP> openmp{nullptr};
std::mutex creation;

// After a fork the child has none of the threads, and a pool's mutex may be locked forever: the child starts with a new
// pool. It cannot use OpenMP, which waits for threads of the parent.
void handle_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork([] { creation.lock(); }, [] { creation.unlock(); },
                   [] { pool = nullptr, openmp = nullptr, creation.unlock(); });
  });
}

Pool& current_pool() {
  handle_forks();
  Pool* existing = pool;
  if (existing) return *existing;
  std::lock_guard lock(creation);
  if (!pool) pool = new Pool;
  return *pool;
}

// What a thread may keep between calls.
constexpr size_t KEPT_BYTES = size_t(64) << 20;

struct Buffer {
  void* memory = nullptr;
  size_t bytes = 0;

  void resize(size_t wanted) {
    std::free(memory);
    memory = nullptr;
    bytes = (wanted + 63) / 64 * 64;
    if (bytes && !(memory = std::aligned_alloc(64, bytes))) {
      bytes = 0;
      throw std::bad_alloc();
    }
  }
  ~Buffer() { std::free(memory); }
};

thread_local Buffer buffers[int(Scratch::count)];

}  // namespace

void run_tasks(long count, long threads, Task task, void* context) {
  Job job{count, task, context};
  threads = std::min(threads, count);
  const OpenMP parallel = openmp;
  if (threads <= 1)
    job.run();
  else if (parallel)
    parallel([](void* shared) { static_cast<Job*>(shared)->run(); }, &job, unsigned(threads), 0);
  else
    current_pool().run(job, threads);
  if (job.failed) throw std::bad_alloc();
}

void use_openmp(OpenMP parallel) {
  handle_forks();
  openmp = parallel;
}

void* scratch(Scratch kind, size_t bytes) {
  Buffer& buffer = buffers[int(kind)];
  if (buffer.bytes < bytes) buffer.resize(bytes);
  return buffer.memory;
}

void trim_scratch() {
  Buffer& buffer = buffers[int(Scratch::caller)];
  if (buffer.bytes > KEPT_BYTES) buffer.resize(0);
}

}  // namespace inlinevit
