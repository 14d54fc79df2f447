#include "examples/chat/options.hpp"

#include <limits>
#include <utility>

#include "examples/common/arguments.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

/// Options as parsed. Values that depend on several options are computed later.
struct ParsedOptions {
  std::optional<int64_t> max_tokens;
  std::optional<int64_t> prefix_store_mib;
  std::optional<int64_t> memory_budget_mib;
  double temperature = 0.0;
  double top_p = 1.0;
  double min_p = 0.0;
  double repetition_penalty = 1.0;
  std::optional<int64_t> top_k;
  std::optional<int64_t> seed;
  Options options;
};

void add_sampling_arguments(Arguments& arguments, ParsedOptions& parsed) {
  arguments.number(
      "--temperature",
      "T",
      "draw ids at random, with the logits divided by this;\n"
      "0, the default, chooses the greatest",
      0.0,
      100.0,
      &parsed.temperature);
  arguments.integer(
      "--top-k",
      "N",
      "draw from the N most probable ids; 0, the default,\n"
      "draws from all",
      0,
      std::numeric_limits<int32_t>::max(),
      &parsed.top_k);
  arguments.number(
      "--top-p",
      "P",
      "draw from the fewest ids that have this share of the\n"
      "probability (1)",
      1e-6,
      1.0,
      &parsed.top_p);
  arguments.number(
      "--min-p",
      "P",
      "draw from ids of at least this share of the greatest\n"
      "probability (0)",
      0.0,
      1.0,
      &parsed.min_p);
  arguments.number(
      "--repetition-penalty",
      "R",
      "divide positive logits of the last 64 ids by this\n"
      "(1)",
      0.01,
      100.0,
      &parsed.repetition_penalty);
  arguments.integer(
      "--seed",
      "N",
      "seed of the random numbers (0)",
      0,
      std::numeric_limits<int64_t>::max(),
      &parsed.seed);
}

Sampling sampling_of(const ParsedOptions& parsed) {
  Sampling sampling;
  sampling.temperature = static_cast<float>(parsed.temperature);
  sampling.top_k = static_cast<int32_t>(parsed.top_k.value_or(0));
  sampling.top_p = static_cast<float>(parsed.top_p);
  sampling.min_p = static_cast<float>(parsed.min_p);
  sampling.repetition_penalty = static_cast<float>(parsed.repetition_penalty);
  sampling.seed = static_cast<uint64_t>(parsed.seed.value_or(0));
  return sampling;
}

/// Returns the name of an option that is set and cannot be used with a draft;
/// nullptr if there is none.
const char* without_draft(const ParsedOptions& parsed) {
  return parsed.top_k                       ? "--top-k"
         : parsed.top_p != 1.0              ? "--top-p"
         : parsed.min_p != 0.0              ? "--min-p"
         : parsed.repetition_penalty != 1.0 ? "--repetition-penalty"
                                            : nullptr;
}

Arguments arguments_into(ParsedOptions& parsed) {
  Arguments arguments(
      "usage: etkv_chat [options]\n"
      "Answers with a language model that keeps its KV cache in etkv: one\n"
      "--prompt, or a conversation if there is none.\n");
  add_model_arguments(arguments, parsed.options.model);
  arguments.text(
      "--prompt", "TEXT", "answer this and exit", &parsed.options.prompt);
  arguments.text(
      "--system",
      "TEXT",
      "the system message that the conversation begins with",
      &parsed.options.system);
  arguments.integer(
      "--max-tokens",
      "N",
      "maximum tokens of an answer (256)",
      1,
      std::numeric_limits<int32_t>::max(),
      &parsed.max_tokens);
  add_sampling_arguments(arguments, parsed);
  add_speculation_arguments(
      arguments, parsed.options.speculation, "; none otherwise");
  arguments.choice(
      "--session",
      {"contiguous", "seq", "tree"},
      "the kind of cache; the answers are the same\n"
      "(contiguous, or tree with --draft)",
      &parsed.options.session);
  arguments.text(
      "--prefix-store",
      "DIR",
      "keep texts that the model has read in this folder\n"
      "or bucket (s3://bucket/prefix), and load from there\n"
      "what a prompt begins with",
      &parsed.options.prefix_store);
  arguments.integer(
      "--prefix-store-mib",
      "N",
      "maximum MiB of the files; those that were used\n"
      "least recently are removed first (4096)",
      1,
      std::numeric_limits<int32_t>::max(),
      &parsed.prefix_store_mib);
  arguments.integer(
      "--memory-budget-mib",
      "N",
      "refuse steps that would make the cache exceed this\n"
      "many MiB; weights do not count",
      1,
      std::numeric_limits<int32_t>::max(),
      &parsed.memory_budget_mib);
  arguments.flag(
      "--ids",
      "end with a line `ids: …` of the generated ids, the\n"
      "eos token id included",
      &parsed.options.ids);
  arguments.flag("--help", "print this and exit", &parsed.options.help);
  arguments.flag(
      "--version", "print the versions and exit", &parsed.options.version);
  return arguments;
}

} // namespace

Result<Options> parse_options(int argc, const char* const* argv) {
  ParsedOptions parsed;
  const Arguments arguments = arguments_into(parsed);
  if (auto parsed = arguments.parse(argc, argv); !parsed.ok()) {
    return parsed.error();
  }
  Options options = std::move(parsed.options);
  if (options.help || options.version) {
    return options;
  }
  RETURN_IF_ERROR(check_format(options.model.kv_format));
  if (options.model.raw && options.system) {
    return refuse(
        "--system does not go with --raw, which uses no chat template");
  }
  if (options.speculation.draft && options.session.value_or("tree") != "tree") {
    return refuse(
        "--draft requires --session tree, got " + *options.session +
        ": draft tokens are a tree");
  }
  if (!options.speculation.draft &&
      (options.speculation.depth || options.speculation.width)) {
    return refuse(
        std::string(options.speculation.depth ? "--depth" : "--width") +
        " requires --draft: it sets the shape of a draft's tree");
  }
  if (const char* unused = without_draft(parsed);
      options.speculation.draft && unused != nullptr) {
    return refuse(
        std::string(unused) +
        " does not go with --draft, which accepts only --temperature");
  }
  if (options.speculation.draft && options.prefix_store) {
    return refuse(
        "--prefix-store does not go with --draft: a draft must read the text "
        "too");
  }
  if (parsed.prefix_store_mib && !options.prefix_store) {
    return refuse("--prefix-store-mib requires --prefix-store");
  }
  if (options.prompt && options.prompt->empty()) {
    return refuse("the prompt is empty");
  }
  options.max_tokens = parsed.max_tokens.value_or(options.max_tokens);
  options.prefix_store_bytes =
      static_cast<uint64_t>(parsed.prefix_store_mib.value_or(4096)) << 20;
  options.memory_budget_bytes =
      static_cast<uint64_t>(parsed.memory_budget_mib.value_or(0)) << 20;
  options.sampling = sampling_of(parsed);
  return options;
}

Result<void> require_no_session(const Options& options) {
  const char* option = options.session                   ? "--session"
                       : options.model.kv_format         ? "--kv-format"
                       : options.speculation.draft       ? "--draft"
                       : options.prefix_store            ? "--prefix-store"
                       : options.memory_budget_bytes > 0 ? "--memory-budget-mib"
                                                         : nullptr;
  if (option == nullptr) {
    return {};
  }
  return refuse(
      std::string(option) +
      " requires a cache that etkv makes, but the program keeps its cache in "
      "its graph (it does not report `get_n_caches`)");
}

std::string help_text() {
  ParsedOptions unused;
  return arguments_into(unused).help() +
         "\nIn a conversation: /undo, /reset, /stats, /help, /quit; Ctrl-C "
         "stops an answer.\nETKV_LOG=debug shows etkv's log, "
         "ETKV_VERBOSE=1 ExecuTorch's.\n";
}

} // namespace etkv::examples
