// What a runner logs: ExecuTorch's own log, and etkv's.
#pragma once

#include "etkv/etkv.hpp"

namespace etkv::examples {

/// Silences what ExecuTorch writes to standard error, unless ETKV_VERBOSE is
/// set to something other than 0. A runner reports errors itself, in words for
/// people.
void quiet_executorch();

/// Prints etkv's log to standard error, where ETKV_LOG asks for it in the syntax of
/// Rust's RUST_LOG (`debug`, `etkv::core=trace,warn`): a line a message, with its
/// time in UTC, level and target. An error for a value that cannot be read.
Result<void> print_log_as_asked();

} // namespace etkv::examples
