// Registers the backend for the calls of CPU programs that etkv carries out.
#include <executorch/runtime/platform/runtime.h>

#include "cpp/delegate.hpp"

// What is used of ExecuTorch's pool of threads. Its wheel has the library, and
// not these headers.
struct pthreadpool;
extern "C" std::size_t pthreadpool_get_threads_count(pthreadpool* pool);
extern "C" void pthreadpool_parallelize_1d(
    pthreadpool* pool,
    void (*task)(void*, std::size_t),
    void* context,
    std::size_t range,
    std::uint32_t flags);
namespace executorch::extension::threadpool {
/// Returns the pool of the process, or NULL where this thread may not use it.
pthreadpool* get_pthreadpool();
} // namespace executorch::extension::threadpool

namespace etkv::executorch_backend {
namespace {

using ::executorch::extension::threadpool::get_pthreadpool;

/// The threads that XNNPACK and ExecuTorch's kernels use too: a second pool
/// would fight for the same cores.
class SharedPool final : public interpreter::Threads {
 public:
  std::size_t count() const override {
    pthreadpool* pool = get_pthreadpool();
    return pool == nullptr ? 1 : pthreadpool_get_threads_count(pool);
  }
  void run(std::size_t n_parts, const interpreter::Task& task) const override {
    // Without a pool it does all parts on this thread.
    pthreadpool_parallelize_1d(
        get_pthreadpool(),
        [](void* context, std::size_t i) {
          const auto& task = *static_cast<const interpreter::Task*>(context);
          task.run(task.context, i);
        },
        const_cast<interpreter::Task*>(&task),
        n_parts,
        0);
  }
};

/// kCPUDelegate of etkv/backend_id.hpp.
constexpr char kId[] = "EtkvForCPU";

const SharedPool shared_pool;
Backend backend(kId, interpreter::Target::cpu, shared_pool);

/// Registers the backend when the library is loaded, without a call.
[[maybe_unused]] const bool registered = [] {
  using ::executorch::runtime::Error;
  ::executorch::runtime::runtime_init();
  if (::executorch::runtime::register_backend({kId, &backend}) != Error::Ok) {
    ET_LOG(
        Error,
        "etkv's delegate cannot register as %s: a process has one etkv, and at "
        "most 16 backends",
        kId);
    return false;
  }
  return true;
}();

} // namespace
} // namespace etkv::executorch_backend
