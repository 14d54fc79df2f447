#include "examples/common/plain.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

/// How one answer compares.
struct Comparison {
  size_t equal = 0;
  size_t ties = 0;
  /// The most by which an id trailed plain decoding's choice.
  double margin = 0.0;
};

Error differs(const Decoding& answer, const std::string& how) {
  return Error(
      ETKV_ERROR_INTERNAL,
      "check: the answer to \"" + answer.title + "\" " + how);
}

/// The ids that the cache holds, and one sequence's steps on it.
class Plain {
 public:
  Plain(Model& model, Cache& cache) : model_(model), cache_(cache) {}

  /// Feeds the ids of an answer to plain decoding, and compares each with what
  /// that would choose.
  Result<Comparison> compare(const Decoding& answer) {
    Comparison found;
    ASSIGN_OR_RETURN(auto logits, read(answer.prompt));
    for (size_t i = 0; i < answer.ids.size(); ++i) {
      const int64_t id = answer.ids[i];
      ASSIGN_OR_RETURN(const int64_t choice, argmax(logits, logits.last_row()));
      if (id == choice) {
        ++found.equal;
      } else {
        row_.resize(static_cast<size_t>(logits.vocabulary));
        copy_row(logits, logits.last_row(), row_.data());
        const double best = row_[static_cast<size_t>(choice)];
        const double margin = best - row_[static_cast<size_t>(id)];
        found.margin = std::max(found.margin, margin);
        const double most =
            rounding_margin(model_.program().native_format(), std::abs(best));
        char told[160];
        std::snprintf(
            told,
            sizeof(told),
            "parts from plain decoding at token %zu: %lld for %lld, whose "
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
        ++found.ties;
      }
      if (i + 1 < answer.ids.size()) {
        ASSIGN_OR_RETURN(logits, run(&id, 1));
      }
    }
    return found;
  }

 private:
  /// Reads a prompt behind what it shares with the one before.
  Result<LogitsView> read(const std::vector<int64_t>& prompt) {
    const auto differs =
        std::mismatch(prompt.begin(), prompt.end(), held_.begin(), held_.end());
    const size_t shared = std::min<size_t>(
        static_cast<size_t>(differs.first - prompt.begin()), prompt.size() - 1);
    ASSIGN_OR_RETURN(const int32_t least, cache_.rewindable_to());
    // Layers with windows may have dropped what would be needed.
    const size_t kept = shared < static_cast<size_t>(least) ? 0 : shared;
    RETURN_IF_ERROR(cache_.rewind(static_cast<int32_t>(kept)));
    held_.resize(kept);
    const size_t size = model_.program().prefill_size();
    for (;;) {
      const size_t n = std::min(size, prompt.size() - held_.size());
      ASSIGN_OR_RETURN(auto logits, run(prompt.data() + held_.size(), n));
      if (held_.size() == prompt.size()) {
        return logits;
      }
    }
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

/// An answer ends where the model ends it, and else where it was to.
Result<void> check_end(const Model& model, const Decoding& answer) {
  const auto end =
      std::find_if(answer.ids.begin(), answer.ids.end(), [&](int64_t id) {
        return model.ends(id);
      });
  const auto n = static_cast<int64_t>(answer.ids.size());
  const bool ended = end != answer.ids.end();
  if (ended && end + 1 != answer.ids.end()) {
    return differs(
        answer,
        "goes on after the id that ends it, the " +
            std::to_string(end - answer.ids.begin() + 1) + ". of " +
            std::to_string(n));
  }
  if (ended != (*answer.stop == Stop::end) ||
      (*answer.stop == Stop::limit && n != answer.max_new_tokens)) {
    return differs(
        answer, "ended after " + counted(n, "token") + " for no reason");
  }
  return {};
}

} // namespace

Result<void> check_answers(
    Model& model,
    const std::vector<Decoding>& answers,
    const std::function<void(CacheConfig&)>& change) {
  auto config = model.config();
  if (change) {
    change(config);
  }
  ASSIGN_OR_RETURN(auto session, make_decode_session(kMLXBackend, config));
  RETURN_IF_ERROR(model.program().load(session.key(), Logits::last));

  Plain plain(model, session.cache());
  Comparison all;
  for (const auto& answer : answers) {
    if (interrupted()) {
      return {};
    }
    RETURN_IF_ERROR(check_end(model, answer));
    ASSIGN_OR_RETURN(const auto found, plain.compare(answer));
    all.equal += found.equal;
    all.ties += found.ties;
    all.margin = std::max(all.margin, found.margin);
  }
  std::string sentence =
      "check: " + counted(static_cast<int64_t>(answers.size()), "answer") +
      ", " + counted(static_cast<int64_t>(all.equal), "token") +
      " as plain decoding chooses them";
  if (all.ties > 0) {
    sentence += ", and " + std::to_string(all.ties) +
                " that trail its choice by rounding";
  }
  say(sentence);
  return {};
}

double rounding_margin(const std::string& dtype, double magnitude) {
  const double unit_roundoff = dtype == "f32"   ? 0x1p-24
                               : dtype == "f16" ? 0x1p-11
                                                : 0x1p-8;
  // Of logits made by hundreds of roundings, as a random walk.
  return 32.0 * unit_roundoff * magnitude;
}

} // namespace etkv::examples
