// Registers the backend for the calls of CPU programs that etkv executes.
#include <executorch/extension/threadpool/threadpool_guard.h>
#include <executorch/runtime/core/function_ref.h>

#include "cpp/delegate.hpp"

// The parts of ExecuTorch's thread pool that etkv uses. ExecuTorch's wheel has
// the library, but not the header.
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  size_t get_thread_count() const;
  /// Calls `part` with 0 to `n_parts - 1`. Under a NoThreadPoolGuard all calls
  /// run on this thread.
  void run(
      ::executorch::runtime::FunctionRef<void(size_t)> part,
      size_t n_parts);
};
/// Returns the pool of the process; null if the processors cannot be counted.
ThreadPool* get_threadpool();
} // namespace executorch::extension::threadpool

namespace etkv::executorch_backend {
namespace {

using ::executorch::extension::threadpool::get_threadpool;
using ::executorch::extension::threadpool::NoThreadPoolGuard;

/// The pool that XNNPACK and ExecuTorch's kernels use. A second pool would
/// compete with this one for the same cores.
class SharedPool final : public interpreter::Threads {
 public:
  std::size_t count() const override {
    if (NoThreadPoolGuard::is_enabled()) {
      return 1;
    }
    const auto* pool = get_threadpool();
    return pool == nullptr ? 1 : pool->get_thread_count();
  }
  void run(std::size_t n_parts, const interpreter::Task& task) const override {
    const auto part = [&task](std::size_t i) { task.run(task.context, i); };
    auto* pool = NoThreadPoolGuard::is_enabled() ? nullptr : get_threadpool();
    if (pool != nullptr) {
      pool->run(part, n_parts);
      return;
    }
    for (std::size_t i = 0; i < n_parts; ++i) {
      part(i);
    }
  }
};

/// kCPUDelegate of etkv/backend_id.hpp.
constexpr char kId[] = "EtkvForCPU";

const SharedPool shared_pool;
Backend backend(kId, interpreter::Target::cpu, shared_pool);

/// Loading the library registers the backend; no call is needed.
[[maybe_unused]] const bool registered = backend.register_own(kId);

} // namespace
} // namespace etkv::executorch_backend
