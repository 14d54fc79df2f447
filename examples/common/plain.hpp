// Plain decoding, which everything else is compared with: one sequence on a
// contiguous cache, one token a step, the greatest logit each time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/common/batch.hpp"
#include "examples/common/model.hpp"

namespace etkv::examples {

/// Compares answers with plain decoding in the same storage format, and says how
/// that went. Loads the program anew, with a cache of its own.
///
/// Sums of floats depend on their order, and a step over several sequences or a
/// tree adds up in another order than one over a single token. An id that is not
/// plain decoding's choice is therefore taken for equal where it trails that
/// choice by no more than rounding explains, see rounding_margin(); such ids are
/// counted and told, and plain decoding goes on behind them. Anything else is an
/// error that names the answer, the step, both ids and the margin.
///
/// @param change  makes the config of the cache another, as for a window
Result<void> check_answers(
    Model& model,
    const std::vector<Decoding>& answers,
    const std::function<void(CacheConfig&)>& change = nullptr);

/// The most by which two logits of a row, the greatest of which has this
/// magnitude, may trade places when sums are added up in another order, in a
/// program of this dtype with keys and values in this format.
double rounding_margin(
    const std::string& native_format,
    const std::string& kv_format,
    double magnitude);

} // namespace etkv::examples
