#include "examples/chat/options.hpp"

#include <limits>
#include <utility>

#include "examples/common/arguments.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

/// Options as written; their consequences are computed later.
struct Given {
  std::optional<int64_t> max_tokens;
  Options options;
};

Arguments arguments_into(Given& given) {
  Arguments arguments(
      "usage: etkv_chat [options]\n"
      "Answers with a language model that keeps its KV cache in etkv: one\n"
      "--prompt, or a conversation if there is none.\n");
  add_model_arguments(arguments, given.options.model);
  arguments.text(
      "--prompt", "TEXT", "answer this and leave", &given.options.prompt);
  arguments.text(
      "--system",
      "TEXT",
      "the system message that the conversation begins with",
      &given.options.system);
  arguments.integer(
      "--max-tokens",
      "N",
      "stop an answer after so many tokens (256)",
      1,
      std::numeric_limits<int32_t>::max(),
      &given.max_tokens);
  add_speculation_arguments(
      arguments, given.options.speculation, "; none otherwise");
  arguments.choice(
      "--session",
      {"contiguous", "seq", "tree"},
      "the kind of cache; the answers are the same\n"
      "(contiguous, or tree with --draft)",
      &given.options.session);
  arguments.flag(
      "--ids",
      "end with a line `ids: …` of the generated ids, the\n"
      "one that ended the answer among them",
      &given.options.ids);
  arguments.flag("--help", "print this and leave", &given.options.help);
  arguments.flag(
      "--version", "print the versions and leave", &given.options.version);
  return arguments;
}

} // namespace

Result<Options> parse_options(int argc, const char* const* argv) {
  Given given;
  const Arguments arguments = arguments_into(given);
  if (auto parsed = arguments.parse(argc, argv); !parsed.ok()) {
    return parsed.error();
  }
  Options options = std::move(given.options);
  if (options.help || options.version) {
    return options;
  }
  RETURN_IF_ERROR(check_format(options.model.kv_format));
  if (options.model.raw && options.system) {
    return refuse(
        "--system is a part of the chat template, which --raw leaves out");
  }
  if (options.speculation.draft && options.session.value_or("tree") != "tree") {
    return refuse(
        "--draft takes --session tree, not " + *options.session +
        ": draft tokens are a tree");
  }
  if (!options.speculation.draft &&
      (options.speculation.depth || options.speculation.width)) {
    return refuse(
        std::string(options.speculation.depth ? "--depth" : "--width") +
        " is the shape of a draft's tree, and there is no --draft");
  }
  if (options.prompt && options.prompt->empty()) {
    return refuse("the prompt is empty");
  }
  options.max_tokens = given.max_tokens.value_or(options.max_tokens);
  return options;
}

std::string help_text() {
  Given unused;
  return arguments_into(unused).help() +
         "\nIn a conversation: /undo, /reset, /stats, /help, /quit; Ctrl-C "
         "stops "
         "an answer.\nETKV_LOG=debug shows etkv's log, "
         "ETKV_VERBOSE=1 ExecuTorch's.\n";
}

} // namespace etkv::examples
