// Comparisons of captured steps with interpreted ones.
#pragma once

#include <cstdint>
#include <string>

#include "benches/captured/log.hpp"

namespace etkv::benches {

/// Runs generated operations for each seed from 1 to `seeds`, each on an empty
/// cache: steps of several sequences and of trees, forks, removals, rewinds,
/// compaction, prefixes, and steps that are refused or cancelled. Returns
/// whether the logits of captured and interpreted steps agree. With a tiny
/// model in float16, one wrong key is detected, because steps read few keys.
bool compare_generated(
    const char* model,
    const std::string& format,
    uint32_t seeds,
    const Log& log);

/// Runs steps of several sequences that share cells, and steps of trees, both
/// captured and in the interpreter. The caches store rows in `format` (empty
/// for the program's dtype). Returns whether steps were captured and agree.
bool compare_shared(
    const char* model,
    const std::string& format,
    const Log& log);

} // namespace etkv::benches
