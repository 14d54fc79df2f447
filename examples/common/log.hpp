// ExecuTorch's own log.
#pragma once

namespace etkv::examples {

/// Silences what ExecuTorch writes to standard error, unless ETKV_VERBOSE is
/// set to something other than 0. A runner reports errors itself, in words for
/// people.
void quiet_executorch();

} // namespace etkv::examples
