// etkv_rollback: uses of seq_rm. It undoes an exchange, repeats an answer,
// slides a window over a long answer, and replaces a tool call by the tool's
// result. No bytes move.

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/batch.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/reference_decoding.hpp"
#include "examples/common/runner.hpp"
#include "examples/common/shared_prefix.hpp"
#include "examples/common/try.hpp"
#include "examples/common/warm_up.hpp"

namespace etkv::examples {
namespace {

const std::vector<std::string>& built_in() {
  static const std::vector<std::string> all = {
      "What is the capital of France?",
      "What do bees make?",
      "How many days does a week have?",
      "Why is the sky blue?",
  };
  return all;
}

/// A tool's name, and its result.
struct Tool {
  const char* name;
  const char* says;
};
constexpr Tool kTools[] = {
    {"calendar", "Today is Friday."},
    {"weather", "It will rain until Sunday."},
};
/// The maximum tokens of a call.
constexpr int64_t kCall = 12;

struct WindowOptions {
  std::optional<int64_t> window;
  std::optional<int64_t> sinks;
};

/// Returns a layer with a window that sees the same positions as `layer` does
/// if the sequence keeps only its first `sinks` and its last `window`
/// positions. Returns nullopt if no single window describes these positions.
std::optional<LayerConfig>
seen_in(LayerConfig layer, int32_t window, int32_t sinks) {
  if (layer.window > 0 && layer.window <= window && layer.sinks <= sinks) {
    return layer;
  }
  if (layer.chunk > 0) {
    return std::nullopt;
  }
  // The layer's sinks and those of the sequence may differ.
  if (layer.window > 0 && (layer.window <= window || sinks > 0)) {
    return std::nullopt;
  }
  layer.window = window;
  layer.sinks = sinks;
  return layer;
}

Result<void> check_same(
    const std::string& title,
    const std::vector<int64_t>& first,
    const std::vector<int64_t>& again) {
  if (first == again) {
    return {};
  }
  const size_t at = shared_prefix(first, again);
  const auto id = [at](const std::vector<int64_t>& ids) {
    return at < ids.size() ? std::to_string(ids[at]) : "no id";
  };
  return Error(
      ETKV_ERROR_INTERNAL,
      "check: the answer to \"" + title + "\" differs from itself at token " +
          std::to_string(at) + ": " + id(again) + " the second time, " +
          id(first) + " the first");
}

/// One sequence, and the ids in it.
class Thread {
 public:
  Thread(Model& model, SeqCache& cache) : model_(model), cache_(cache) {}

  /// Reads a prompt from the first id that differs from the ids in the
  /// sequence, and answers it. A full cache ends the answer; a later rollback
  /// makes room again.
  Result<Decoding>
  answer(std::string title, std::vector<int64_t> prompt, int64_t most) {
    RETURN_IF_ERROR(check_length(prompt.size(), cache_.capacity()));
    Decoding one{std::move(title), std::move(prompt), most};
    const size_t shared =
        std::min(shared_prefix(one.prompt, held_), one.prompt.size() - 1);
    ASSIGN_OR_RETURN(const size_t kept, roll_back(shared));
    ASSIGN_OR_RETURN(const bool going, begin(model_, cache_, one, kept));
    if (!going) {
      return one;
    }
    held_ = one.prompt;
    while (!one.stop && !interrupted()) {
      ASSIGN_OR_RETURN(const bool fits, cache_.can_extend());
      if (!fits) {
        one.stop = FinishReason::capacity;
        break;
      }
      const int64_t id = one.ids.back();
      RETURN_IF_ERROR(step_together(model_, cache_, {&one}));
      held_.push_back(id);
    }
    return one;
  }

  /// Removes the ids at or after index `length`. If layers with windows have
  /// dropped rows that the next token would see, removes all ids and prints a
  /// message. Returns the remaining length.
  Result<size_t> roll_back(size_t length) {
    length = std::min(held_.size(), length);
    ASSIGN_OR_RETURN(const size_t kept, cut(cache_, /*sequence=*/0, length));
    if (kept < length) {
      say("the layers' windows have moved past position " +
          std::to_string(length) + ": all is read again");
    }
    held_.resize(kept);
    return kept;
  }

  size_t length() const {
    return held_.size();
  }

 private:
  Model& model_;
  SeqCache& cache_;
  std::vector<int64_t> held_;
};

class Rollback {
 public:
  Rollback(Model& model, SeqCache& cache, const RunnerOptions& options)
      : model_(model),
        cache_(cache),
        options_(options),
        prompts_(options.prompts_or(built_in())),
        thread_(model, cache) {}

  /// Rolls back the second question, and asks the third in its place. Like the
  /// other scenes, returns false after Ctrl-C.
  Result<bool> undo() {
    std::vector<Message> said;
    ASSIGN_OR_RETURN(bool going, ask(said, prompts_.front()));
    const size_t before = thread_.length();
    for (size_t i = 1; going && i < prompts_.size(); ++i) {
      if (i > 1) {
        said.resize(2);
        ASSIGN_OR_RETURN(const size_t kept, thread_.roll_back(before));
        say("undo: back to " + counted(static_cast<int64_t>(kept), "position"));
      }
      ASSIGN_OR_RETURN(going, ask(said, prompts_[i]));
    }
    return going;
  }

  /// Asks the first question again, then once more with another beginning of
  /// the answer.
  Result<bool> regenerate() {
    ASSIGN_OR_RETURN(auto prompt, model_.encode(prompts_.front()));
    ASSIGN_OR_RETURN(bool going, record("regenerate", prompt));
    if (!going) {
      return false;
    }
    const auto first = answers_.back().ids;
    RETURN_IF_ERROR(thread_.roll_back(prompt.size()));
    ASSIGN_OR_RETURN(going, record("regenerate", prompt));
    if (!going) {
      return false;
    }
    if (options_.check) {
      RETURN_IF_ERROR(check_same(prompts_.front(), first, answers_.back().ids));
    }
    RETURN_IF_ERROR(thread_.roll_back(prompt.size()));
    ASSIGN_OR_RETURN(
        const auto words,
        model_.tokenizer().encode("Well,", /*add_special_tokens=*/false));
    prompt.insert(prompt.end(), words.begin(), words.end());
    return record("regenerate: Well,", prompt);
  }

  /// Rolls back a tool call, and puts the tool's result in its place.
  Result<bool> call_tools() {
    std::vector<Message> said = {
        {"user", "Should I take an umbrella tomorrow?"}};
    for (const Tool& tool : kTools) {
      ASSIGN_OR_RETURN(auto prompt, model_.encode(said));
      ASSIGN_OR_RETURN(
          const bool going,
          record(std::string("call: ") + tool.name, prompt, kCall));
      if (!going) {
        return false;
      }
      const size_t call = thread_.length() - prompt.size();
      RETURN_IF_ERROR(thread_.roll_back(prompt.size()));
      say(std::string("tool: ") + tool.name + " says \"" + tool.says + "\", " +
          counted(static_cast<int64_t>(call), "position") +
          " of the call rolled back");
      said.push_back({"user", tool.says});
    }
    ASSIGN_OR_RETURN(auto prompt, model_.encode(said));
    return record("with tools", prompt);
  }

  /// Generates an answer of any length in a window: removes the oldest
  /// positions, except the first few, and reuses their cells. Widens a window
  /// that is smaller than the prompt. Returns nullopt after Ctrl-C.
  Result<std::optional<Decoding>> slide(int32_t* window, int32_t sinks) {
    RETURN_IF_ERROR(thread_.roll_back(0));
    Decoding one{"window: " + prompts_.back(), {}, options_.max_tokens};
    ASSIGN_OR_RETURN(one.prompt, model_.encode(prompts_.back()));
    RETURN_IF_ERROR(check_length(one.prompt.size(), cache_.capacity()));
    // All tokens of a step see each other, so the window must cover the step.
    if (const auto n = static_cast<int32_t>(one.prompt.size()); *window < n) {
      say("window: " + std::to_string(n) + " in place of " +
          std::to_string(*window) + ", as long as the prompt");
      *window = n;
    }
    ASSIGN_OR_RETURN(const bool begun, begin(model_, cache_, one, /*held=*/0));
    if (!begun) {
      return std::optional<Decoding>();
    }
    while (!one.stop && !interrupted()) {
      // The next token sees itself and `window - 1` positions before it.
      const auto oldest = static_cast<int32_t>(one.position()) - *window + 1;
      if (oldest > sinks) {
        RETURN_IF_ERROR(cache_.seq_rm(one.sequence, sinks, oldest));
      }
      ASSIGN_OR_RETURN(const bool fits, cache_.can_extend());
      if (!fits) {
        one.stop = FinishReason::capacity;
        break;
      }
      RETURN_IF_ERROR(step_together(model_, cache_, {&one}));
    }
    ASSIGN_OR_RETURN(const int32_t next, cache_.seq_next(one.sequence));
    ASSIGN_OR_RETURN(const int32_t held, cache_.length());
    RETURN_IF_ERROR(tell(one));
    say("window: " + std::to_string(next) + " positions were removed, " +
        std::to_string(held) + " are held");
    RETURN_IF_ERROR(cache_.seq_rm(one.sequence));
    return interrupted() ? std::nullopt : std::optional(std::move(one));
  }

  const std::vector<Decoding>& answers() const {
    return answers_;
  }

 private:
  /// Asks a question, and adds the answer to the conversation. Returns false
  /// after Ctrl-C.
  Result<bool> ask(std::vector<Message>& said, const std::string& question) {
    said.push_back({"user", question});
    ASSIGN_OR_RETURN(auto prompt, model_.encode(said));
    ASSIGN_OR_RETURN(const bool going, record(question, prompt));
    if (going) {
      ASSIGN_OR_RETURN(
          const std::string text, model_.decode(answers_.back().ids));
      said.push_back(
          {"assistant", text, model_.without_eos(answers_.back().ids)});
    }
    return going;
  }

  Result<bool> record(
      const std::string& title,
      const std::vector<int64_t>& prompt) {
    return record(title, prompt, options_.max_tokens);
  }

  /// Answers a prompt, and shows the answer so far. Returns false after Ctrl-C.
  Result<bool> record(
      const std::string& title,
      const std::vector<int64_t>& prompt,
      int64_t most) {
    ASSIGN_OR_RETURN(auto one, thread_.answer(title, prompt, most));
    if (!one.ids.empty()) {
      RETURN_IF_ERROR(tell(one));
    }
    answers_.push_back(std::move(one));
    return !interrupted();
  }

  Result<void> tell(const Decoding& one) const {
    if (one.stop) {
      say_stop(*one.stop, cache_.capacity());
    }
    return show(model_, options_, one.title, one.ids);
  }

  Model& model_;
  SeqCache& cache_;
  const RunnerOptions& options_;
  const std::vector<std::string>& prompts_;
  Thread thread_;
  std::vector<Decoding> answers_;
};

Result<void> run(const RunnerOptions& options, const WindowOptions& more) {
  ASSIGN_OR_RETURN(auto model, Model::open(options.model));
  ASSIGN_OR_RETURN(
      auto session, make_seq_session(model.backend_id(), model.config()));
  RETURN_IF_ERROR(load_warm(model.program(), session, Logits::last));

  Rollback rollback(model, session.cache(), options);
  using Scene = Result<bool> (Rollback::*)();
  for (const Scene scene :
       {&Rollback::undo, &Rollback::regenerate, &Rollback::call_tools}) {
    ASSIGN_OR_RETURN(const bool going, (rollback.*scene)());
    if (!going) {
      return {};
    }
  }
  auto window = static_cast<int32_t>(more.window.value_or(48));
  const auto sinks = static_cast<int32_t>(more.sinks.value_or(4));
  ASSIGN_OR_RETURN(const auto windowed, rollback.slide(&window, sinks));
  if (!options.check || !windowed) {
    return {};
  }
  RETURN_IF_ERROR(check_answers(model, rollback.answers()));
  // Reference decoding has the same window as a property of its cache's layers.
  auto layers = model.config().layers;
  for (auto& layer : layers) {
    const auto seen = seen_in(layer, window, sinks);
    if (!seen) {
      say("window: not compared: --window " + std::to_string(window) +
          " and --sinks " + std::to_string(sinks) +
          " in a layer with a window of " + std::to_string(layer.window) +
          " are no single window");
      return {};
    }
    layer = *seen;
  }
  return check_answers(
      model, {*windowed}, [&](CacheConfig& config) { config.layers = layers; });
}

} // namespace
} // namespace etkv::examples

int main(int argc, char** argv) {
  using namespace etkv::examples;

  Runner runner(
      "etkv_rollback",
      "Rolls back parts of a sequence: undoes exchanges, generates answers\n"
      "again, slides a window over a long answer, and replaces tool calls by\n"
      "their results.\n");
  WindowOptions more;
  runner.arguments().integer(
      "--window",
      "N",
      "positions that a token of the windowed answer sees,\n"
      "itself among them (48)",
      1,
      1 << 20,
      &more.window);
  runner.arguments().integer(
      "--sinks",
      "N",
      "first positions that it sees in addition (4)",
      0,
      1 << 20,
      &more.sinks);
  return runner.main(argc, argv, [&](const RunnerOptions& options) {
    return run(options, more);
  });
}
