// Captured steps of several sequences and of trees.
#pragma once

#include <string>

#include "benches/captured/log.hpp"

namespace etkv::benches {

/// Runs steps of several sequences that share cells, and steps of trees, both
/// captured and in the interpreter. The caches have this format (empty for the
/// program's dtype). Returns whether steps were captured and agree.
bool compare_shared(
    const char* model,
    const std::string& format,
    const Log& log);

} // namespace etkv::benches
