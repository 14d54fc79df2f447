// etkv_chat: a language model's .pte, answering on a cache that this program
// makes and hands over.

#include "etkv/executorch.hpp"
#include "examples/chat/chat.hpp"
#include "examples/chat/options.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/log.hpp"
#include "examples/common/model.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

constexpr int kFailed = 1;
constexpr int kMisused = 2;
/// What shells report of a program that Ctrl-C ended.
constexpr int kInterrupted = 130;

Result<int> run(const Options& options) {
  ASSIGN_OR_RETURN(auto model, Model::open(options.model));
  ASSIGN_OR_RETURN(
      auto session, make_decode_session(kMLXBackend, model.config()));
  RETURN_IF_ERROR(model.program().load(session.key(), Logits::last));

  Chat chat(model, session.cache(), options);
  if (!options.prompt) {
    chat.converse();
    return 0;
  }
  ASSIGN_OR_RETURN(const auto answer, chat.ask(*options.prompt));
  return answer.stop == Stop::interrupted ? kInterrupted : 0;
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
    write_piece(versions("etkv_chat"));
    return 0;
  }
  const auto status = run(options.value());
  return status.ok() ? status.value() : fail(status.error(), kFailed);
}
