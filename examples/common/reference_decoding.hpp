// Reference decoding, which everything else is compared with: one sequence on a
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

/// Compares answers with reference decoding in the same storage format, and says how
/// that went. Loads the program anew, with a cache of its own.
///
/// Sums of floats depend on their order, and where MLX adds up a step over several
/// tokens in another order than one over a single token, as it does with weights of
/// 4 bits, the greatest logit can be another. An id that is not reference decoding's
/// choice is therefore let pass where it trails that choice by no more than
/// rounding_margin(); such ids are told, and reference decoding goes on behind them.
/// Anything else is an error that names the answer, the step, both ids and the
/// margin, and so are more such ids than allowed_ties().
///
/// An answer has to end where the model ends it or where it was to. One that ended
/// at a full cache has to fill it, where all are of sequence 0: that has the cache
/// for itself. What else a cache of several sequences held then is not known here.
/// No answer at all is an error. After Ctrl-C nothing more is compared or said.
///
/// @param change  makes the config of the cache another, as for a window; answers
///                that end at capacity are then taken at their word
Result<void> check_answers(
    Model& model,
    const std::vector<Decoding>& answers,
    const std::function<void(CacheConfig&)>& change = nullptr);

/// The most by which two logits of a row, the greatest of which has this
/// magnitude, may trade places by rounding, in a program that computes in `dtype`
/// and stores keys and values in `kv_format`.
///
/// Units in the last place of the greatest logit: 4 of them, where 2 are the most
/// that was seen, and 16 where keys and values are stored in another format, which
/// makes another code of what is rounded otherwise; there 7 were seen.
double rounding_margin(
    const std::string& dtype,
    const std::string& kv_format,
    double magnitude);

/// How many of so many ids may trail reference decoding's choice by rounding: some per
/// cent, where 4 in a hundred are the most that was seen, and 2 of the fewest. Who
/// takes wrong ids takes more, however little each trails.
size_t allowed_ties(size_t tokens);

} // namespace etkv::examples
