#include "examples/common/runner.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "examples/common/clock.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/log.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

/// Prints the memory that is still in use after a round has closed everything.
void say_memory(int64_t round) {
  say("round " + std::to_string(round) + ": " +
      counted(static_cast<int64_t>(etkv_live_handles()), "handle") + ", " +
      std::to_string(mlx_memory().active) + " bytes in MLX, " +
      mebibytes(memory_bytes()) + " in the process");
}

} // namespace

Runner::Runner(std::string name, const std::string& about)
    : name_(std::move(name)),
      arguments_("usage: " + name_ + " [options]\n" + about) {
  add_model_arguments(arguments_, options_.model);
  arguments_.texts(
      "--prompt",
      "TEXT",
      "replaces the built-in prompts; may be\n"
      "given several times",
      &options_.prompts);
  arguments_.integer(
      "--max-tokens",
      "N",
      "maximum tokens of an answer (48)",
      1,
      std::numeric_limits<int32_t>::max(),
      &max_tokens_);
  arguments_.flag(
      "--check",
      "compare with reference decoding of one sequence, and\n"
      "fail if an answer differs",
      &options_.check);
  arguments_.flag("--ids", "print the ids of each answer, too", &options_.ids);
  arguments_.integer(
      "--repeat",
      "N",
      "repeat the run this often, and print after each the\n"
      "memory that is still in use",
      1,
      std::numeric_limits<int32_t>::max(),
      &repeat_);
  arguments_.flag("--help", "print this and exit", &help_);
  arguments_.flag("--version", "print the versions and exit", &version_);
  require([this] { return check_format(options_.model.kv_format); });
  require([this]() -> Result<void> {
    const auto& prompts = options_.prompts;
    if (std::find(prompts.begin(), prompts.end(), "") != prompts.end()) {
      return Error(ETKV_ERROR_INVALID_ARGUMENT, "a prompt is empty");
    }
    return {};
  });
}

int Runner::main(
    int argc,
    const char* const* argv,
    const std::function<Result<void>(const RunnerOptions&)>& body) {
  quiet_executorch();
  if (const auto logs = print_log_as_asked(); !logs.ok()) {
    return fail(logs.error(), kMisused);
  }
  if (const auto parsed = arguments_.parse(argc, argv); !parsed.ok()) {
    return fail(parsed.error(), kMisused);
  }
  if (help_) {
    write_piece(
        arguments_.help() +
        "\nCtrl-C stops between two steps.\n"
        "ETKV_LOG=debug shows etkv's log, ETKV_VERBOSE=1 ExecuTorch's.\n");
    return 0;
  }
  if (version_) {
    write_piece(versions(name_));
    return 0;
  }
  for (const auto& check : checks_) {
    if (const auto met = check(); !met.ok()) {
      return fail(met.error(), kMisused);
    }
  }
  options_.max_tokens = max_tokens_.value_or(options_.max_tokens);

  arm_interrupt();
  for (int64_t round = 1; round <= repeat_.value_or(1); ++round) {
    if (const auto ran = body(options_); !ran.ok()) {
      return fail(ran.error(), kFailed);
    }
    if (interrupted()) {
      say("stopped: interrupted");
      return kInterrupted;
    }
    if (repeat_) {
      say_memory(round);
    }
  }
  return 0;
}

int Runner::fail(const Error& error, int status) const {
  say(name_ + ": " + error.message());
  return status;
}

const std::vector<std::string>& questions() {
  static const std::vector<std::string> all = {
      "What is the capital of France?",
      "Why is the sky blue?",
      "Name three animals that live in the sea.",
      "How do you make a cup of tea?",
      "What is the opposite of cold?",
      "Who wrote Hamlet?",
      "Give me a word that rhymes with moon.",
      "What do bees make?",
      "How many days does a week have?",
      "What is a library?",
  };
  return all;
}

Result<void> show(
    const Model& model,
    const RunnerOptions& options,
    const std::string& title,
    const std::vector<int64_t>& ids) {
  ASSIGN_OR_RETURN(const std::string text, model.decode(ids));
  std::string block = "## " + title + "\n" + text;
  block += block.back() == '\n' ? "" : "\n";
  if (options.ids) {
    block += ids_line(ids);
  }
  write_piece(block);
  return {};
}

void say_stop(FinishReason stop, int32_t capacity) {
  if (stop == FinishReason::capacity) {
    say("stopped: the cache is full at " + counted(capacity, "position") +
        " (--capacity)");
  }
}

bool Refusals::admit(
    const std::string& title,
    size_t prompt_tokens,
    const Cache& cache) {
  const auto checked = check_length(prompt_tokens, cache.capacity());
  if (!checked.ok()) {
    say("refused \"" + title + "\": " + checked.error().message());
  }
  ++(checked.ok() ? admitted_ : refused_);
  return checked.ok();
}

Result<void> Refusals::outcome() const {
  if (refused_ == 0) {
    return {};
  }
  return Error(
      ETKV_ERROR_CAPACITY,
      std::to_string(refused_) + " of " +
          counted(static_cast<int64_t>(admitted_ + refused_), "request") +
          (refused_ == 1 ? " was" : " were") + " refused");
}

} // namespace etkv::examples
