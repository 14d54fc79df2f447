// etkv_chat: a language model's .pte, answering on a cache that this program
// makes and hands over.

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "etkv/executorch.hpp"
#include "examples/chat/chat.hpp"
#include "examples/chat/options.hpp"
#include "examples/chat/terminal.hpp"
#include "examples/common/log.hpp"
#include "examples/common/program.hpp"
#include "examples/text/text.hpp"

namespace etkv::examples {
namespace {

constexpr int kFailed = 1;
constexpr int kMisused = 2;
/// What shells report of a program that Ctrl-C ended.
constexpr int kInterrupted = 130;

Result<int32_t> capacity_of(const Options& options, const Program& program) {
  const int32_t most = program.params().max_context_length;
  const int64_t capacity = options.capacity.value_or(most);
  if (capacity > most) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT,
        "--capacity " + std::to_string(capacity) + " is above " +
            std::to_string(most) + ", the context length that " +
            options.model + " was exported for");
  }
  return static_cast<int32_t>(capacity);
}

Result<std::vector<int64_t>> end_ids_of(
    const Program& program,
    const Text& text) {
  if (program.end_ids()) {
    return *program.end_ids();
  }
  return text.end_ids();
}

Result<int> run(const Options& options) {
  auto program = Program::open(options.model);
  if (!program.ok()) {
    return program.error();
  }
  const auto capacity = capacity_of(options, *program);
  if (!capacity.ok()) {
    return capacity.error();
  }
  const auto text = Text::open(options.tokenizer);
  if (!text.ok()) {
    return text.error();
  }
  if (!options.raw && !text.value().has_chat_template()) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT,
        "there is no chat template beside " + options.tokenizer +
            "; --raw takes the prompt as it is");
  }
  auto end_ids = end_ids_of(*program, text.value());
  if (!end_ids.ok()) {
    return end_ids.error();
  }

  const std::string format =
      options.kv_format.value_or(program->native_format());
  auto session = make_decode_session(
      kMLXBackend, make_config(program->params(), capacity.value(), format));
  if (!session.ok()) {
    return session.error();
  }
  if (auto loaded = program->load(session->key(), Logits::last); !loaded.ok()) {
    return loaded.error();
  }

  Chat chat(
      {*program, session->cache(), text.value(), format, std::move(*end_ids)},
      options);
  if (!options.prompt) {
    chat.converse();
    return 0;
  }
  const auto answer = chat.ask(*options.prompt);
  if (!answer.ok()) {
    return answer.error();
  }
  return answer.value().stop == Stop::interrupted ? kInterrupted : 0;
}

int fail(const Error& error, int status) {
  say("etkv_chat: " + error.message());
  return status;
}

} // namespace
} // namespace etkv::examples

int main(int argc, char** argv) {
  using namespace etkv::examples;

  quiet_executorch();
  const auto options = parse_options(argc, argv);
  if (!options.ok()) {
    return fail(options.error(), kMisused);
  }
  if (options.value().help) {
    write_piece(help_text());
    return 0;
  }
  if (options.value().version) {
    write_piece(
        std::string("etkv_chat ") + etkv_version() + ", MLX " +
        etkv_mlx_version() + "\n");
    return 0;
  }
  const auto status = run(options.value());
  return status.ok() ? status.value() : fail(status.error(), kFailed);
}
