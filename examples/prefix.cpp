// etkv_prefix: a chat server's prefix cache. Every request is a whole conversation;
// what a sequence still holds of its beginning is reused, and only the rest is read.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/batch.hpp"
#include "examples/common/clock.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/prefix_cache.hpp"
#include "examples/common/reference_decoding.hpp"
#include "examples/common/runner.hpp"
#include "examples/common/try.hpp"
#include "examples/common/warm_up.hpp"

namespace etkv::examples {
namespace {

/// The beginning of every conversation.
constexpr char kSystem[] =
    "You answer the letters of a small bookshop. Be polite and brief. If you "
    "do not know the answer, say so.";

/// A client and its message. An empty message repeats the last request of the client.
struct Turn {
  size_t client;
  std::string said;
};

const std::vector<Turn>& turns() {
  static const std::vector<Turn> all = {
      {0, "What is the capital of France?"},
      {1, "Why is the sky blue?"},
      {0, "And of Italy?"},
      {1, "Say that in one short sentence."},
      {1, ""},
      {0, "Thank you. Which of the two is larger?"},
  };
  return all;
}

class Server {
 public:
  Server(Model& model, SeqCache& cache, const RunnerOptions& options)
      : model_(model), cache_(cache), options_(options) {}

  /// Answers a conversation, from what is cached of it on; nothing where it is
  /// longer than the cache.
  Result<std::optional<Decoding>> answer(
      const std::vector<Message>& conversation) {
    Decoding one;
    one.title = conversation.back().content;
    one.max_tokens = options_.max_tokens;
    ASSIGN_OR_RETURN(one.prompt, model_.encode(conversation));
    if (!refusals_.admit(one.title, one.prompt.size(), cache_)) {
      return std::optional<Decoding>();
    }
    ASSIGN_OR_RETURN(const size_t shared, place(one));
    const size_t rest = one.prompt.size() - shared;
    ASSIGN_OR_RETURN(const bool has_room, make_room(rest, one.sequence));
    if (!has_room) {
      return Error(
          ETKV_ERROR_CAPACITY,
          "there is no room for " +
              counted(static_cast<int64_t>(rest), "token") + " more in " +
              counted(cache_.capacity(), "position") + " (--capacity)");
    }

    Stopwatch watch;
    ASSIGN_OR_RETURN(bool going, begin(model_, cache_, one, shared));
    const double prefill_seconds = watch.lap();
    while (going && !one.stop) {
      if (interrupted()) {
        going = false;
        break;
      }
      ASSIGN_OR_RETURN(const bool fits, make_room(1, one.sequence));
      if (fits) {
        RETURN_IF_ERROR(step_together(model_, cache_, {&one}));
      } else {
        one.stop = Stop::capacity;
      }
    }
    auto held = one.prompt;
    if (!one.ids.empty()) {
      // The last id has not run.
      held.insert(held.end(), one.ids.begin(), one.ids.end() - 1);
    }
    prefixes_.hold(one.sequence, std::move(held));
    if (!going) {
      return std::optional(std::move(one));
    }
    tokens_ += one.prompt.size();
    reused_ += shared;
    RETURN_IF_ERROR(show(model_, options_, one.title, one.ids));
    say_stop(*one.stop, cache_.capacity());
    say(counted(static_cast<int64_t>(one.prompt.size()), "token") + ", " +
        std::to_string(shared) + " cached, " + std::to_string(rest) +
        " read in " + fixed(prefill_seconds, 2) + " s");
    return std::optional(std::move(one));
  }

  const Refusals& refusals() const {
    return refusals_;
  }

  Result<void> report() const {
    ASSIGN_OR_RETURN(const Memory memory, cache_.memory());
    ASSIGN_OR_RETURN(const int32_t length, cache_.length());
    say("reused " + std::to_string(reused_) + " of " +
        counted(static_cast<int64_t>(tokens_), "token") + " (" +
        fixed(
            100.0 * static_cast<double>(reused_) /
                static_cast<double>(std::max<size_t>(tokens_, 1)),
            1) +
        "%) · " + counted(static_cast<int64_t>(prefixes_.size()), "sequence") +
        " in " + counted(length, "position") + " · cache " +
        mebibytes(memory.allocated) + " of " + mebibytes(memory.at_capacity) +
        " (" + model_.format() + ")");
    return {};
  }

 private:
  /// Finds a sequence for a prompt; returns how many of its ids that sequence
  /// holds.
  Result<size_t> place(Decoding& one) {
    const auto match = prefixes_.longest(one.prompt);
    // The last token is run even where it is cached: its logits are not kept.
    const size_t shared =
        match ? std::min(match->shared, one.prompt.size() - 1) : 0;
    if (match && shared == prefixes_.of(match->sequence).size()) {
      // The same conversation, further on.
      one.sequence = match->sequence;
      return shared;
    }
    if (prefixes_.unused() == kSequences) {
      RETURN_IF_ERROR(evict(match ? match->sequence : -1));
    }
    one.sequence = prefixes_.unused();
    if (shared == 0) {
      return shared;
    }
    // The other conversation keeps its tokens: a fork takes no bytes. Layers
    // with windows may have dropped rows that the fork needs; then everything
    // is read.
    const auto forked = cache_.seq_cp(
        match->sequence, one.sequence, 0, static_cast<int32_t>(shared));
    if (!forked.ok() && forked.error().status() == ETKV_ERROR_POSITION) {
      return size_t{0};
    }
    RETURN_IF_ERROR(forked);
    const auto& ids = one.prompt;
    prefixes_.hold(
        one.sequence,
        {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(shared)});
    return shared;
  }

  /// Evicts others until `tokens` more fit; false if that is not enough.
  Result<bool> make_room(size_t tokens, int32_t sequence) {
    for (;;) {
      ASSIGN_OR_RETURN(
          const bool fits, cache_.can_extend(static_cast<int32_t>(tokens)));
      if (fits) {
        return true;
      }
      ASSIGN_OR_RETURN(const bool evicted, evict(/*except=*/sequence));
      if (!evicted) {
        return false;
      }
    }
  }

  /// Removes the least recently used sequence but one; false if there is no
  /// other. Cells that others share stay.
  Result<bool> evict(int32_t except) {
    const auto oldest = prefixes_.oldest(except);
    if (!oldest) {
      return false;
    }
    RETURN_IF_ERROR(cache_.seq_rm(*oldest));
    say("evicted sequence " + std::to_string(*oldest) + " of " +
        counted(
            static_cast<int64_t>(prefixes_.of(*oldest).size()), "position"));
    prefixes_.forget(*oldest);
    return true;
  }

  Model& model_;
  SeqCache& cache_;
  const RunnerOptions& options_;
  SequenceTexts prefixes_;
  Refusals refusals_;
  size_t tokens_ = 0;
  size_t reused_ = 0;
};

Result<void> run(const RunnerOptions& options) {
  ASSIGN_OR_RETURN(auto model, Model::open(options.model));
  ASSIGN_OR_RETURN(
      auto session, make_seq_session(model.backend_id(), model.config()));
  // One row of logits a step is enough for one sequence at a time.
  RETURN_IF_ERROR(load_warm(model.program(), session, Logits::last));

  std::vector<Turn> asked;
  for (const auto& prompt : options.prompts) {
    asked.push_back({asked.size(), prompt});
  }
  if (asked.empty()) {
    asked = turns();
  }
  Server server(model, session.cache(), options);
  std::vector<std::vector<Message>> conversations(asked.size());
  std::vector<Decoding> answers;
  for (const auto& [client, said] : asked) {
    auto& conversation = conversations[client];
    if (conversation.empty()) {
      conversation.push_back({"system", kSystem});
    }
    if (!said.empty()) {
      conversation.push_back({"user", said});
    } else if (conversation.back().role == "assistant") {
      conversation.pop_back();
    } else {
      continue; // Nothing of theirs was answered.
    }
    ASSIGN_OR_RETURN(auto one, server.answer(conversation));
    if (interrupted()) {
      return {};
    }
    if (!one) {
      conversation.pop_back();
      continue;
    }
    ASSIGN_OR_RETURN(const std::string text, model.decode(one->ids));
    conversation.push_back({"assistant", text});
    answers.push_back(std::move(*one));
  }
  RETURN_IF_ERROR(server.report());
  if (options.check) {
    RETURN_IF_ERROR(check_answers(model, answers));
  }
  return server.refusals().outcome();
}

} // namespace
} // namespace etkv::examples

int main(int argc, char** argv) {
  etkv::examples::Runner runner(
      "etkv_prefix",
      "Answers requests that are whole conversations, as a chat server gets "
      "them:\n"
      "what a sequence still holds of one is reused, only the rest is read. "
      "Each\n"
      "--prompt is a client of its own.\n");
  return runner.main(argc, argv, etkv::examples::run);
}
