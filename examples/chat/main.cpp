// etkv_chat: chats with a language model (.pte), on a cache that etkv or the
// program's graph holds.

#include "etkv/executorch.hpp"
#include "examples/chat/chat.hpp"
#include "examples/chat/options.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/log.hpp"
#include "examples/common/model.hpp"
#include "examples/common/runner.hpp"
#include "examples/common/try.hpp"
#include "examples/common/warm_up.hpp"

namespace etkv::examples {
namespace {

/// Answers one prompt, or holds a conversation.
Result<int> talk(Chat chat, const Options& options) {
  if (!options.prompt) {
    chat.converse();
    return 0;
  }
  ASSIGN_OR_RETURN(const auto answer, chat.ask(*options.prompt));
  return answer.stop == FinishReason::cancelled ? kInterrupted : 0;
}

/// Runs one token per step, on a cache of any kind.
template <typename Face>
Result<int> run_on(Model& model, const Options& options) {
  ASSIGN_OR_RETURN(
      auto session,
      CacheSession<Face>::make(model.backend_id(), model.config()));
  RETURN_IF_ERROR(load_warm(model.program(), session, Logits::last));
  ASSIGN_OR_RETURN(auto stored, StoredTexts::open(model, options));
  return talk(
      Chat(
          model,
          session.cache(),
          options,
          /*speculator=*/nullptr,
          stored ? &*stored : nullptr),
      options);
}

/// Verifies a draft's proposals in trees.
Result<int> run_with_draft(Model& model, const Options& options) {
  ASSIGN_OR_RETURN(
      auto session, make_tree_session(model.backend_id(), model.config()));
  RETURN_IF_ERROR(load_warm(model.program(), session, Logits::proposed));
  ASSIGN_OR_RETURN(
      const auto draft,
      make_draft(
          *options.speculation.draft, options.model, model, session.cache()));
  Speculator speculator(
      model,
      session.cache(),
      *draft,
      options.speculation,
      Sampler(options.sampling.temperature, options.sampling.seed));
  return talk(Chat(model, session.cache(), options, &speculator), options);
}

/// Runs a program that keeps its cache in its graph, without a session.
Result<int> run_with_graph_cache(Model& model, const Options& options) {
  RETURN_IF_ERROR(require_no_session(options));
  RETURN_IF_ERROR(model.program().load_with_graph_cache(Logits::last));
  say("the cache is part of the program: there is no session and no rewind; a "
      "text that does not continue the cached one resets the cache and is read "
      "whole");
  return talk(
      Chat(model, TextCache(model.program(), model.capacity()), options),
      options);
}

Result<int> run(const Options& options) {
  ASSIGN_OR_RETURN(auto model, Model::open(options.model, GraphCache::allowed));
  if (model.program().has_graph_cache()) {
    return run_with_graph_cache(model, options);
  }
  RETURN_IF_ERROR(set_memory_budget(options.memory_budget_bytes));
  if (options.speculation.draft) {
    return run_with_draft(model, options);
  }
  const std::string kind = options.session.value_or(Cache::kKind);
  if (kind == SeqCache::kKind) {
    return run_on<SeqCache>(model, options);
  }
  if (kind == TreeCache::kKind) {
    return run_on<TreeCache>(model, options);
  }
  return run_on<Cache>(model, options);
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
  if (const auto logs = print_log_as_asked(); !logs.ok()) {
    return fail(logs.error(), kMisused);
  }
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
