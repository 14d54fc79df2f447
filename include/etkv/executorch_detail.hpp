// Helpers for programs of ExecuTorch, not for users of etkv. A part of
// executorch.hpp.
#pragma once

#include <string>

#include <executorch/extension/module/module.h>

#include "etkv/etkv.hpp"

namespace etkv {

namespace detail {
/// Returns the delegate's own error, or else an error with ExecuTorch's code.
/// `what` is the action that failed.
inline Error executorch_error(
    executorch::runtime::Error code,
    const std::string& what) {
  if (etkv_error* error = etkv_delegate_take_error()) {
    return Error::adopt(etkv_error_status(error), error);
  }
  return Error(
      ETKV_ERROR_PROGRAM, what + ": " + executorch::runtime::to_string(code));
}

/// Opens the program of `module`, unless it is open, and checks all of its
/// tables. By default ExecuTorch checks only their first bytes, so a damaged
/// program can make it read outside the program. `what` names the action in the
/// error.
inline Result<void> open(
    executorch::extension::Module& module,
    const std::string& what) {
  using executorch::runtime::Program;
  const auto code = module.load(Program::Verification::InternalConsistency);
  if (code != executorch::runtime::Error::Ok) {
    return executorch_error(code, what);
  }
  return {};
}
} // namespace detail

} // namespace etkv
