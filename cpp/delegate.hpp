// A backend of ExecuTorch whose delegates run on libetkv's interpreter.
#pragma once

#include <executorch/runtime/backend/interface.h>

#include "cpp/interpreter.hpp"

namespace etkv::executorch_backend {

class Backend final : public ::executorch::runtime::BackendInterface {
 public:
  /// `name` is used in messages. The arguments must live as long as the
  /// process.
  Backend(
      const char* name,
      interpreter::Target target,
      const interpreter::Threads& threads)
      : name_(name), target_(target), threads_(threads) {}

  /// Registers the backend under an id that only etkv uses. Call it when the
  /// library is loaded. If registration fails, returns false and logs the
  /// reason.
  bool register_own(const char* id);

  bool is_available() const override {
    return true;
  }

  ::executorch::runtime::Result<::executorch::runtime::DelegateHandle*> init(
      ::executorch::runtime::BackendInitContext& context,
      ::executorch::runtime::FreeableBuffer* processed,
      ::executorch::runtime::ArrayRef<::executorch::runtime::CompileSpec>)
      const override;

  ::executorch::runtime::Error execute(
      ::executorch::runtime::BackendExecutionContext& context,
      ::executorch::runtime::DelegateHandle* handle,
      ::executorch::runtime::Span<::executorch::runtime::EValue*> args)
      const override;

  void destroy(::executorch::runtime::DelegateHandle* handle) const override;

 private:
  const char* name_;
  interpreter::Target target_;
  const interpreter::Threads& threads_;
};

} // namespace etkv::executorch_backend
