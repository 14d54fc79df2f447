// Reference decoding: one sequence on a contiguous cache, one token a step, the
// greatest logit each time. All other ways of decoding are compared with it.
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

/// Compares answers with reference decoding in the same storage format, and
/// prints the result. Loads the program again, with a cache of its own.
///
/// Sums of floats depend on their order. MLX may add up a step over several
/// tokens in another order than a step over one, as it does with weights of 4
/// bits. Another logit can then be the greatest. So an id that reference
/// decoding does not choose is accepted if its logit is less than the greatest
/// by no more than rounding_margin(). Such ids are reported, and reference
/// decoding goes on after them. A larger difference is an error that names the
/// answer, the step, both ids and the margin. More such ids than allowed_ties()
/// are an error too.
///
/// An answer must end where the model ends it, or at its limit of tokens. One
/// that ended because the cache was full must fill the cache, if all answers
/// are of sequence 0, which then has the cache alone. In a cache of several
/// sequences that cannot be checked here. An empty list of answers is an error.
/// After Ctrl-C the comparison stops without a message.
///
/// @param change  changes the config of the cache, for example to set a window;
///                the length of answers that end at capacity is then not
///                checked
Result<void> check_answers(
    Model& model,
    const std::vector<Decoding>& answers,
    const std::function<void(CacheConfig&)>& change = nullptr);

/// Returns the most by which rounding may change the order of two logits of a
/// row. The greatest logit of the row has this magnitude, the program computes
/// in `dtype`, and keys and values are stored in `kv_format`.
///
/// The margin is in units in the last place of the greatest logit: 4, where the
/// most that was measured is 2. It is 16 if `kv_format` is another format, in
/// which a rounding error can change the stored code; the most that was
/// measured there is 7.
double rounding_margin(
    const std::string& dtype,
    const std::string& kv_format,
    double magnitude);

/// Returns how many of `tokens` ids may differ from reference decoding's choice
/// by rounding: 2, and 5 per cent of them. The most that was measured is 4 per
/// cent. A decoder that chooses wrong ids has more of them, however small each
/// difference is.
size_t allowed_ties(size_t tokens);

} // namespace etkv::examples
