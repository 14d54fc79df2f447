// etkv_prefix: a chat server's prefix cache. Every request is a whole
// conversation. The answer continues from the longest beginning of the
// conversation that this process has read before. With a store, an earlier
// process may have read that beginning.

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/batch.hpp"
#include "examples/common/clock.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/reference_decoding.hpp"
#include "examples/common/runner.hpp"
#include "examples/common/stored_prefixes.hpp"
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
  Server(
      Model& model,
      SeqCache& cache,
      const RunnerOptions& options,
      StoredPrefixes kept)
      : model_(model),
        cache_(cache),
        options_(options),
        kept_(std::move(kept)) {}

  /// Answers a conversation, and reads only the part that was not read before.
  /// Returns nullopt if the conversation is longer than the cache.
  Result<std::optional<Decoding>> answer(
      const std::vector<Message>& conversation) {
    Decoding one;
    one.title = conversation.back().content;
    one.max_tokens = options_.max_tokens;
    ASSIGN_OR_RETURN(one.prompt, model_.encode(conversation));
    if (!refusals_.admit(one.title, one.prompt.size(), cache_)) {
      return std::optional<Decoding>();
    }
    ASSIGN_OR_RETURN(const size_t shared, attach(one.prompt));
    Stopwatch watch;
    ASSIGN_OR_RETURN(bool going, begin(model_, cache_, one, shared));
    const double prefill_seconds = watch.lap();
    if (going && kept_.has_windows) {
      // The next prompt may tokenize the answer differently.
      RETURN_IF_ERROR(keep(one.prompt));
    }
    while (going && !one.stop) {
      if (interrupted()) {
        going = false;
        break;
      }
      ASSIGN_OR_RETURN(const bool fits, cache_.can_extend(1));
      if (fits) {
        RETURN_IF_ERROR(step_together(model_, cache_, {&one}));
      } else {
        one.stop = FinishReason::capacity;
      }
    }
    if (!going) {
      return std::optional(std::move(one));
    }
    auto held = one.prompt;
    // The last id has not run.
    held.insert(held.end(), one.ids.begin(), one.ids.end() - 1);
    RETURN_IF_ERROR(keep(held));
    tokens_ += one.prompt.size();
    reused_ += shared;
    RETURN_IF_ERROR(show(model_, options_, one.title, one.ids));
    say_stop(*one.stop, cache_.capacity());
    say(counted(static_cast<int64_t>(one.prompt.size()), "token") + ", " +
        std::to_string(shared) + " cached, " +
        std::to_string(one.prompt.size() - shared) + " read in " +
        fixed(prefill_seconds, 2) + " s");
    return std::optional(std::move(one));
  }

  const Refusals& refusals() const {
    return refusals_;
  }

  Result<void> report() const {
    ASSIGN_OR_RETURN(const Memory memory, cache_.memory());
    ASSIGN_OR_RETURN(const auto kept, kept_.prefixes.statistics());
    say("reused " + std::to_string(reused_) + " of " +
        counted(static_cast<int64_t>(tokens_), "token") + " (" +
        fixed(
            100.0 * static_cast<double>(reused_) /
                static_cast<double>(std::max<size_t>(tokens_, 1)),
            1) +
        "%)" +
        (kept.tokens_in_store > 0
             ? ", " + std::to_string(kept.tokens_in_store) + " from the store"
             : "") +
        " · " + counted(static_cast<int64_t>(kept.prefixes), "text") + " in " +
        mebibytes(kept.bytes) + " · cache " + mebibytes(memory.allocated) +
        " of " + mebibytes(memory.at_capacity) + " (" + model_.format() + ")");
    return {};
  }

 private:
  /// Attaches the cache to the longest beginning of a prompt that has been read
  /// before. Returns the length of that beginning.
  Result<size_t> attach(const std::vector<int64_t>& prompt) {
    // The last request's rows stay in the prefix cache. No rows are copied.
    RETURN_IF_ERROR(cache_.clear());
    // The last token always runs, because its logits were not kept.
    return kept_.prefixes.attach(
        cache_, {kept_.fingerprint, {prompt.begin(), prompt.end() - 1}});
  }

  /// Keeps the contents of the cache. The least recently used prefixes are
  /// dropped to make room.
  Result<void> keep(const std::vector<int64_t>& text) {
    ASSIGN_OR_RETURN(
        const bool is_kept,
        kept_.prefixes.keep(cache_, {kept_.fingerprint, text}));
    static_cast<void>(is_kept);
    return {};
  }

  Model& model_;
  SeqCache& cache_;
  const RunnerOptions& options_;
  StoredPrefixes kept_;
  Refusals refusals_;
  size_t tokens_ = 0;
  size_t reused_ = 0;
};

Result<void> run(
    const RunnerOptions& options,
    const std::optional<std::string>& prefix_store) {
  ASSIGN_OR_RETURN(auto model, Model::open(options.model));
  ASSIGN_OR_RETURN(
      auto session, make_seq_session(model.backend_id(), model.config()));
  // One row of logits per step is enough for one sequence at a time.
  RETURN_IF_ERROR(load_warm(model.program(), session, Logits::last));

  std::vector<Turn> asked;
  for (const auto& prompt : options.prompts) {
    asked.push_back({asked.size(), prompt});
  }
  if (asked.empty()) {
    asked = turns();
  }
  // Waiting conversations use at most as much memory as the one in progress.
  ASSIGN_OR_RETURN(const Memory memory, session.cache().memory());
  ASSIGN_OR_RETURN(
      auto kept,
      open_prefixes(model, prefix_store, kStoreBytes, memory.at_capacity));
  Server server(model, session.cache(), options, std::move(kept));
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
      continue; // None of this client's requests was answered.
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
  using namespace etkv::examples;

  Runner runner(
      "etkv_prefix",
      "Answers requests that are whole conversations, as in a chat server:\n"
      "each continues from the longest beginning that was read before, and\n"
      "only the rest is read. Each --prompt is a separate client.\n");
  std::optional<std::string> prefix_store;
  runner.arguments().text(
      "--prefix-store",
      "DIR",
      "keep what was read in this folder or bucket\n"
      "(s3://bucket/prefix), and go on from there the next\n"
      "time; the files, 4 GiB at most, hold the texts",
      &prefix_store);
  return runner.main(argc, argv, [&](const RunnerOptions& options) {
    return run(options, prefix_store);
  });
}
