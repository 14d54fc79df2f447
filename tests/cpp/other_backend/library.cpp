// Another backend that registers as MLXBackend when it is loaded, as in
// ExecuTorch's macOS packages. It refuses every program.

#include <executorch/runtime/backend/interface.h>

namespace {

using namespace ::executorch::runtime;

class OtherBackend final : public BackendInterface {
 public:
  bool is_available() const override {
    return true;
  }
  Result<DelegateHandle*> init(
      BackendInitContext&,
      FreeableBuffer*,
      ArrayRef<CompileSpec>) const override {
    return Error::NotImplemented;
  }
  Error execute(BackendExecutionContext&, DelegateHandle*, Span<EValue*>)
      const override {
    return Error::NotImplemented;
  }
};

OtherBackend backend;
[[maybe_unused]] const Error registered =
    register_backend({"MLXBackend", &backend});

} // namespace
