// etkv_sequences: the time of a step of several sequences. The sequences have
// separate prompts, or are forks of one sequence. Prints one line of JSON.
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/common/arguments.hpp"
#include "examples/common/batch.hpp"
#include "examples/common/clock.hpp"
#include "examples/common/format.hpp"
#include "examples/common/log.hpp"
#include "examples/common/model.hpp"
#include "examples/common/program.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

struct Options {
  std::optional<std::string> model;
  std::optional<std::string> kv_format;
  std::optional<int64_t> sequences;
  std::optional<int64_t> context;
  std::optional<int64_t> steps;
  std::optional<int64_t> ids;
  std::optional<std::string> loop;
  bool fork = false;
  bool help = false;
};

Arguments arguments_into(Options& options) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  Arguments arguments(
      "usage: etkv_sequences --model MODEL.pte [options]\n"
      "Decodes several sequences together, greedily, and prints times and\n"
      "memory as one line of JSON.\n");
  arguments.text("--model", "FILE", "the program (.pte)", &options.model);
  add_format_argument(arguments, &options.kv_format);
  arguments.integer(
      "--sequences", "N", "sequences (8)", 1, kSequences, &options.sequences);
  arguments.integer(
      "--context",
      "N",
      "tokens of a sequence's prompt (128)",
      1,
      kMax,
      &options.context);
  arguments.integer(
      "--steps",
      "N",
      "steps after the prompts, with a token of each\n"
      "sequence (32)",
      1,
      kMax,
      &options.steps);
  arguments.integer(
      "--ids",
      "N",
      "the upper bound of the ids of prompts (200)",
      2,
      kMax,
      &options.ids);
  arguments.choice(
      "--loop",
      {"steps", "device"},
      "the host chooses tokens from the logits of each step\n"
      "(steps), or the device chooses (async decode)",
      &options.loop);
  arguments.flag(
      "--fork",
      "read one prompt, and fork it to the other sequences",
      &options.fork);
  arguments.flag("--help", "print this and leave", &options.help);
  return arguments;
}

/// Sequences with prompts, and the next token of each.
class Sequences {
 public:
  Sequences(Program& program, SeqCache& cache)
      : program_(program), cache_(cache) {}

  /// Runs a prompt of `n` ids below `most` in a new sequence.
  Result<void> read(int64_t n, int64_t most) {
    const auto sequence = static_cast<int32_t>(tokens_.size());
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < n; ++i) {
      ids.push_back(1 + (7919 * i + 31 * sequence) % (most - 1));
    }
    const size_t chunk = program_.prefill_size();
    for (size_t at = 0; at < ids.size(); at += chunk) {
      const size_t taken = std::min(chunk, ids.size() - at);
      Batch batch;
      batch.add(ids.data() + at, taken, static_cast<int64_t>(at), sequence);
      ASSIGN_OR_RETURN(const auto logits, batch.step(program_, cache_));
      ASSIGN_OR_RETURN(last_, argmax(logits, logits.last_row()));
    }
    tokens_.push_back(last_);
    position_ = n;
    return {};
  }

  /// Forks the first sequence: the new one shares its positions.
  Result<void> fork() {
    const auto sequence = static_cast<int32_t>(tokens_.size());
    tokens_.push_back(tokens_.front());
    return cache_.seq_cp(0, sequence);
  }

  /// Lets the device choose the next `n` tokens of each sequence.
  Result<void> begin_on_device(int64_t n) {
    std::vector<Prompt> prompts;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      prompts.push_back({{tokens_[i]}, static_cast<int32_t>(i)});
    }
    GenerationOptions options;
    options.max_tokens = static_cast<int32_t>(n);
    ASSIGN_OR_RETURN(
        auto generation, Generation::make(cache_, prompts, options));
    generation_.emplace(std::move(generation));
    return {};
  }

  /// Runs the next token of each sequence.
  Result<void> step() {
    if (generation_) {
      RETURN_IF_ERROR(generation_->next());
      return {};
    }
    const auto most = static_cast<size_t>(program_.params().prefill_chunk_size);
    for (size_t first = 0; first < tokens_.size(); first += most) {
      const size_t n = std::min(most, tokens_.size() - first);
      Batch batch;
      for (size_t i = first; i < first + n; ++i) {
        batch.add(tokens_[i], position_, static_cast<int32_t>(i));
      }
      ASSIGN_OR_RETURN(const auto logits, batch.step(program_, cache_));
      RETURN_IF_ERROR(check_rows(logits, n));
      for (size_t row = 0; row < n; ++row) {
        ASSIGN_OR_RETURN(
            tokens_[first + row], argmax(logits, static_cast<int64_t>(row)));
      }
    }
    ++position_;
    return {};
  }

 private:
  Program& program_;
  SeqCache& cache_;
  std::optional<Generation> generation_;
  std::vector<int64_t> tokens_;
  int64_t last_ = 0;
  int64_t position_ = 0;
};

std::string field(const char* name, const std::string& value) {
  return std::string(", \"") + name + "\": " + value;
}

std::string field(const char* name, uint64_t value) {
  return field(name, std::to_string(value));
}

Result<void> run(const Options& options) {
  const int64_t n = options.sequences.value_or(8);
  const int64_t context = options.context.value_or(128);
  // The first step may compile kernels and grow buffers.
  const int64_t steps = options.steps.value_or(32) + 1;

  Stopwatch watch;
  ASSIGN_OR_RETURN(auto program, Program::open(*options.model));
  const int64_t prompts = options.fork ? 1 : n;
  const int64_t capacity = prompts * context + n * steps;
  if (context + steps > program.params().max_context_length ||
      capacity > std::numeric_limits<int32_t>::max()) {
    return refuse(
        std::to_string(context + steps) +
        " positions of a sequence, but the program has " +
        std::to_string(program.params().max_context_length));
  }
  const std::string format =
      options.kv_format.value_or(program.native_format());
  ASSIGN_OR_RETURN(
      auto session,
      make_seq_session(
          program.params().backend_id,
          make_config(
              program.params(), static_cast<int32_t>(capacity), format)));
  RETURN_IF_ERROR(program.load(session.key(), Logits::all));
  const double load_seconds = watch.lap();

  SeqCache& cache = session.cache();
  Sequences sequences(program, cache);
  for (int64_t i = 0; i < prompts; ++i) {
    RETURN_IF_ERROR(sequences.read(context, options.ids.value_or(200)));
  }
  const double prefill_seconds = watch.lap();
  ASSIGN_OR_RETURN(const Memory before, cache.memory());
  watch.lap();
  for (int64_t i = prompts; i < n; ++i) {
    RETURN_IF_ERROR(sequences.fork());
  }
  const double fork_seconds = watch.lap();
  ASSIGN_OR_RETURN(const Memory after, cache.memory());
  if (options.loop == "device") {
    RETURN_IF_ERROR(sequences.begin_on_device(steps));
  }
  std::string step_seconds;
  for (int64_t i = 0; i < steps; ++i) {
    watch.lap();
    RETURN_IF_ERROR(sequences.step());
    const double seconds = watch.lap();
    if (i > 0) {
      step_seconds += (i > 1 ? ", " : "") + fixed(seconds, 9);
    }
  }
  ASSIGN_OR_RETURN(const Memory memory, cache.memory());

  const std::string json =
      "{\"kv_format\": \"" + format + "\"" +
      field("sequences", static_cast<uint64_t>(n)) +
      field("context", static_cast<uint64_t>(context)) +
      field("load_seconds", fixed(load_seconds, 9)) +
      field("prefill_seconds", fixed(prefill_seconds, 9)) +
      field("fork_seconds", fixed(fork_seconds, 9)) +
      field("fork_bytes", after.allocated - before.allocated) +
      field("step_seconds", "[" + step_seconds + "]") +
      field("cache_allocated_bytes", memory.allocated) +
      field("cache_used_bytes", memory.used) +
      field("peak_memory_bytes", peak_memory_bytes()) +
      field("peak_mlx_bytes", mlx_memory().peak) + "}\n";
  std::fputs(json.c_str(), stdout);
  return {};
}

int fail(const Error& error, int status) {
  std::fprintf(stderr, "etkv_sequences: %s\n", error.message().c_str());
  return status;
}

} // namespace
} // namespace etkv::examples

int main(int argc, char** argv) {
  using namespace etkv::examples;

  quiet_executorch();
  Options options;
  const auto arguments = arguments_into(options);
  if (const auto parsed = arguments.parse(argc, argv); !parsed.ok()) {
    return fail(parsed.error(), 2);
  }
  if (options.help) {
    std::fputs(arguments.help().c_str(), stdout);
    return 0;
  }
  if (!options.model) {
    return fail(refuse("--model is required; --help lists all options"), 2);
  }
  if (const auto checked = check_format(options.kv_format); !checked.ok()) {
    return fail(checked.error(), 2);
  }
  const auto ran = run(options);
  return ran.ok() ? 0 : fail(ran.error(), 1);
}
