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
/// Sums of floats depend on their order, and where MLX adds up a step over several
/// tokens in another order than one over a single token, the greatest logit can be
/// another. An id that is not plain decoding's choice is therefore let pass where
/// it trails that choice by no more than rounding_margin(); such ids are counted
/// and told, and plain decoding goes on behind them. Anything else is an error that
/// names the answer, the step, both ids and the margin. On the CPU none was seen:
/// steps over a few sequences or nodes gave the very bits of single ones.
///
/// @param change  makes the config of the cache another, as for a window
Result<void> check_answers(
    Model& model,
    const std::vector<Decoding>& answers,
    const std::function<void(CacheConfig&)>& change = nullptr);

/// The most by which two logits of a row, the greatest of which has this
/// magnitude, may trade places by rounding, in a program that computes in this
/// dtype.
double rounding_margin(const std::string& dtype, double magnitude);

} // namespace etkv::examples
