// Reference decoding: greedy, one sequence on a contiguous cache, one token per
// step. All other ways of decoding are compared with it.
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
/// prints the result. Loads the program again, with another cache.
///
/// The result of a float sum depends on the order of its terms. MLX may use
/// different orders for a step of several tokens and for a step of one token,
/// as with 4-bit weights. Then a different logit can be the greatest. So an id
/// that reference decoding does not choose is accepted if its logit is within
/// rounding_margin() of the greatest. Such ids are reported, and reference
/// decoding goes on after them. A larger difference is an error that names the
/// answer, the step, both ids and the margin. It is also an error if there are
/// more such ids than allowed_ties().
///
/// An answer must end at an eos token id, at its limit of tokens, or because
/// the cache is full. If all answers are of sequence 0, an answer that ends
/// because the cache is full must have filled the cache. With several sequences
/// this cannot be checked. An empty list of answers is an error. After Ctrl-C
/// the comparison stops without a message.
///
/// @param change  changes the config of the cache, for example to set a window.
///                The length of answers that end at capacity is then not
///                checked
Result<void> check_answers(
    Model& model,
    const std::vector<Decoding>& answers,
    const std::function<void(CacheConfig&)>& change = nullptr);

/// Returns the margin of rounding: if two logits of a row differ by at most
/// this number, rounding can change their order. `magnitude` is the absolute
/// value of the greatest logit of the row, the program computes in `dtype`, and
/// keys and values are stored in `kv_format`.
///
/// The margin is 4 units in the last place of the greatest logit; the largest
/// measured difference is 2. If `kv_format` differs from `dtype`, a rounding
/// error can change a stored code. The margin is then 16; the largest measured
/// difference is 7.
double rounding_margin(
    const std::string& dtype,
    const std::string& kv_format,
    double magnitude);

/// Returns how many of `tokens` ids may differ from reference decoding's choice
/// by rounding: 2, plus 5 per cent of `tokens`. The maximum that was measured
/// is 4 per cent. A decoder that chooses wrong ids exceeds this number, however
/// small each difference is.
size_t allowed_ties(size_t tokens);

} // namespace etkv::examples
