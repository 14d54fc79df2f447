// The logs of a runner: ExecuTorch's and etkv's.
#pragma once

#include "etkv/etkv.hpp"

namespace etkv::examples {

/// Silences ExecuTorch's log on standard error, unless ETKV_VERBOSE is set to a
/// value other than 0. A runner reports errors itself.
void quiet_executorch();

/// Prints etkv's log to standard error, if ETKV_LOG is set. Its value has the
/// syntax of Rust's RUST_LOG (`debug`, `etkv::core=trace,warn`). Each message
/// is a line with its time in UTC, its level and its target. Returns an error
/// for a value that does not have this syntax.
Result<void> print_log_as_asked();

} // namespace etkv::examples
