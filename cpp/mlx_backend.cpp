// Registers the backend for MLX programs.
#include <executorch/runtime/platform/runtime.h>

#include "cpp/delegate.hpp"

namespace etkv::executorch_backend {
namespace {

/// One thread: MLX has its own threads.
class OneThread final : public interpreter::Threads {
 public:
  std::size_t count() const override {
    return 1;
  }
  void run(std::size_t n_parts, const interpreter::Task& task) const override {
    for (std::size_t i = 0; i < n_parts; ++i) {
      task.run(task.context, i);
    }
  }
};

const OneThread one_thread;
Backend backend("MLXBackend", interpreter::Target::mlx, one_thread);

/// The delegate's own id: kEtkvBackend of etkv/backend_id.hpp.
constexpr char kOwnId[] = "EtkvForMLX";

/// Loading the library registers the backend; no call is needed. The first
/// backend that registers an id keeps the id, so MLXBackend may be another
/// backend. The delegate always has its own id too.
[[maybe_unused]] const bool registered = [] {
  using ::executorch::runtime::Error;
  using ::executorch::runtime::register_backend;
  if (!backend.register_own(kOwnId)) {
    return false;
  }
  if (register_backend({"MLXBackend", &backend}) != Error::Ok) {
    ET_LOG(
        Info,
        "another backend is registered as MLXBackend; etkv::open_module and "
        "etkv.load run programs on etkv's as %s",
        kOwnId);
  }
  return true;
}();

} // namespace
} // namespace etkv::executorch_backend
