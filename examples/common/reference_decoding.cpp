#include "examples/common/reference_decoding.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>

#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/shared_prefix.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

/// The result of a comparison: the number of ids that reference decoding also
/// chooses, and the number of ids whose logits are below the greatest only by
/// rounding.
struct Comparison {
  size_t equal = 0;
  size_t ties = 0;
};

Error differs(const Decoding& answer, const std::string& how) {
  return Error(
      ETKV_ERROR_INTERNAL,
      "check: the answer to \"" + answer.title + "\" " + how);
}

/// Runs one sequence on a cache, and remembers the ids in the cache.
class ReferenceDecoder {
 public:
  ReferenceDecoder(Model& model, Cache& cache) : model_(model), cache_(cache) {}

  /// Feeds the ids of an answer to reference decoding, and compares each id
  /// with the choice of reference decoding. Returns nullopt after Ctrl-C.
  Result<std::optional<Comparison>> compare(const Decoding& answer) {
    Comparison found;
    ASSIGN_OR_RETURN(const auto read_logits, read(answer.prompt));
    if (!read_logits) {
      return std::optional<Comparison>();
    }
    LogitsView logits = *read_logits;
    for (size_t i = 0; i < answer.ids.size(); ++i) {
      const int64_t id = answer.ids[i];
      ASSIGN_OR_RETURN(const int64_t choice, argmax(logits, logits.last_row()));
      if (id == choice) {
        ++found.equal;
      } else {
        RETURN_IF_ERROR(check_tie(answer, i, choice, logits));
        ++found.ties;
      }
      if (i + 1 < answer.ids.size()) {
        if (interrupted()) {
          return std::optional<Comparison>();
        }
        ASSIGN_OR_RETURN(logits, run(&id, 1));
      }
    }
    return std::optional(found);
  }

 private:
  /// Refuses an id if its logit is farther below the greatest logit than
  /// rounding explains.
  Result<void> check_tie(
      const Decoding& answer,
      size_t i,
      int64_t choice,
      const LogitsView& logits) {
    const int64_t id = answer.ids[i];
    row_.resize(static_cast<size_t>(logits.vocabulary));
    copy_row(logits, logits.last_row(), row_.data());
    const double best = row_[static_cast<size_t>(choice)];
    const double margin = best - row_[static_cast<size_t>(id)];
    const double most = rounding_margin(
        model_.program().native_format(), model_.format(), std::abs(best));
    char told[160];
    std::snprintf(
        told,
        sizeof(told),
        "differs from reference decoding at token %zu: %lld for %lld, whose "
        "logit is greater by %.3g; rounding explains %.3g",
        i,
        static_cast<long long>(id),
        static_cast<long long>(choice),
        margin,
        most);
    if (!(margin <= most)) {
      return differs(answer, told);
    }
    say("check: the answer to \"" + answer.title + "\" " + told);
    return {};
  }

  /// Runs a prompt after the ids that it shares with the previous prompt.
  /// Returns nullopt after Ctrl-C.
  Result<std::optional<LogitsView>> read(const std::vector<int64_t>& prompt) {
    const size_t shared =
        std::min(shared_prefix(prompt, held_), prompt.size() - 1);
    // Layers with windows and recurrent layers may have dropped state that the
    // prompt needs.
    ASSIGN_OR_RETURN(
        const int32_t kept,
        cache_.rewind_to_reachable(static_cast<int32_t>(shared)));
    held_.resize(static_cast<size_t>(kept));
    const size_t size = model_.program().prefill_size();
    while (!interrupted()) {
      const size_t n = std::min(size, prompt.size() - held_.size());
      ASSIGN_OR_RETURN(auto logits, run(prompt.data() + held_.size(), n));
      if (held_.size() == prompt.size()) {
        return std::optional(logits);
      }
    }
    return std::optional<LogitsView>();
  }

  Result<LogitsView> run(const int64_t* ids, size_t n) {
    auto logits =
        model_.program().step_at(ids, static_cast<int64_t>(held_.size()), n);
    if (logits.ok()) {
      held_.insert(held_.end(), ids, ids + n);
    }
    return logits;
  }

  Model& model_;
  Cache& cache_;
  std::vector<int64_t> held_;
  std::vector<float> row_;
};

/// Checks that an answer ends at an eos token id, at its limit of tokens, or at
/// a full cache.
///
/// @param capacity  the capacity of the cache, if only this answer used it
Result<void> check_end(
    const Model& model,
    const Decoding& answer,
    std::optional<int64_t> capacity) {
  const auto end =
      std::find_if(answer.ids.begin(), answer.ids.end(), [&](int64_t id) {
        return model.ends(id);
      });
  const auto n = static_cast<int64_t>(answer.ids.size());
  const bool ended = end != answer.ids.end();
  if (ended && end + 1 != answer.ids.end()) {
    return differs(
        answer,
        "continues after its eos token id, number " +
            std::to_string(end - answer.ids.begin() + 1) + " of " +
            std::to_string(n));
  }
  if (ended != (*answer.stop == FinishReason::stop) ||
      (*answer.stop == FinishReason::length && n != answer.max_tokens)) {
    return differs(
        answer, "ended after " + counted(n, "token") + " for no reason");
  }
  // The last id is not in the cache.
  const int64_t held = answer.position();
  if (*answer.stop == FinishReason::capacity && capacity && held != *capacity) {
    return differs(
        answer,
        "ended at a full cache, with " + counted(held, "position") + " of " +
            std::to_string(*capacity) + " held");
  }
  return {};
}

} // namespace

Result<void> check_answers(
    Model& model,
    const std::vector<Decoding>& answers,
    const std::function<void(CacheConfig&)>& change) {
  if (answers.empty()) {
    return Error(ETKV_ERROR_INTERNAL, "check: there is no answer to compare");
  }
  auto config = model.config();
  std::optional<int64_t> capacity;
  if (change) {
    change(config);
  } else if (std::all_of(answers.begin(), answers.end(), [](const auto& one) {
               return one.sequence == 0;
             })) {
    capacity = config.capacity;
  }
  ASSIGN_OR_RETURN(
      auto session, make_decode_session(model.backend_id(), config));
  RETURN_IF_ERROR(model.program().load(session.key(), Logits::last));

  ReferenceDecoder reference(model, session.cache());
  Comparison all;
  for (const auto& answer : answers) {
    RETURN_IF_ERROR(check_end(model, answer, capacity));
    ASSIGN_OR_RETURN(const auto found, reference.compare(answer));
    if (!found) {
      return {};
    }
    all.equal += found->equal;
    all.ties += found->ties;
  }
  const size_t tokens = all.equal + all.ties;
  if (const size_t most = allowed_ties(tokens); all.ties > most) {
    return Error(
        ETKV_ERROR_INTERNAL,
        "check: " + std::to_string(all.ties) + " of " +
            counted(static_cast<int64_t>(tokens), "token") +
            " trail reference decoding's choice; rounding explains " +
            std::to_string(most));
  }
  std::string sentence =
      "check: " + counted(static_cast<int64_t>(answers.size()), "answer") +
      ", " + counted(static_cast<int64_t>(all.equal), "token") +
      " as reference decoding chooses them";
  if (all.ties > 0) {
    sentence += ", and " + std::to_string(all.ties) +
                " that trail its choice by rounding";
  }
  say(sentence);
  return {};
}

double rounding_margin(
    const std::string& dtype,
    const std::string& kv_format,
    double magnitude) {
  if (!(magnitude > 0.0) || !std::isfinite(magnitude)) {
    return 0.0;
  }
  // The stored bits of a significand.
  const int bits = dtype == "f32" ? 23 : dtype == "f16" ? 10 : 7;
  const double units = kv_format == dtype ? 4.0 : 16.0;
  return std::ldexp(units, std::ilogb(magnitude) - bits);
}

size_t allowed_ties(size_t tokens) {
  return 2 + tokens / 20;
}

} // namespace etkv::examples
