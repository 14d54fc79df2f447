#include "examples/chat/chat.hpp"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "examples/chat/terminal.hpp"
#include "examples/common/console.hpp"
#include "examples/common/format.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/runner.hpp"

namespace etkv::examples {
namespace {

constexpr char kCommands[] =
    "/undo   undo the last exchange\n"
    "/reset  begin a new conversation\n"
    "/stats  figures of this conversation; /stats json: the cache's report\n"
    "/help   this list\n"
    "/quit leave; the end of the input does the same";

} // namespace

Chat::Chat(
    Model& model,
    TextCache cache,
    const Options& options,
    Speculator* speculator,
    StoredTexts* stored)
    : model_(model),
      cache_(cache),
      options_(options),
      speculator_(speculator),
      stored_(stored),
      generator_(
          model.program(),
          cache,
          model.eos_token_ids(),
          speculator,
          options.sampling),
      conversation_(model, options.model.raw, options.system) {}

Result<Answer> Chat::ask(const std::string& said) {
  arm_interrupt();
  auto prompt = conversation_.prompt(said);
  if (!prompt.ok()) {
    return prompt.error();
  }

  // Count the matching tokens first: a stored text replaces the text in the
  // cache.
  const size_t matched = generator_.matched(*prompt);
  if (stored_ != nullptr) {
    // If the load fails, the model reads the prompt itself.
    if (auto loaded = stored_->load(*cache_.of_session(), generator_, *prompt);
        !loaded.ok()) {
      say(loaded.error().message());
    }
  }
  std::string text;
  const auto write = [&text](std::string_view piece) {
    text += piece;
    write_piece(piece);
  };
  Detokenizer detokenizer = model_.detokenizer();
  std::optional<PrefillProgress> progress(model_.program().prefill_size());
  Listener listener;
  listener.on_prefill = [&](size_t done, size_t total) {
    progress->show(done, total);
    if (done == total && stored_ != nullptr && stored_->keeps_prompts()) {
      store();
    }
  };
  listener.on_token = [&](int64_t id) -> Result<void> {
    const auto piece = detokenizer.add_token(id);
    if (!piece.ok()) {
      return piece.error();
    }
    write(piece.value());
    return {};
  };
  auto answer = generator_.answer(*prompt, options_.max_tokens, listener);
  progress.reset();
  if (const auto rest = detokenizer.finalize(); answer.ok() && rest.ok()) {
    write(rest.value());
  }
  if (!text.empty() && text.back() != '\n') {
    write_piece("\n");
  }
  if (!answer.ok()) {
    return answer.error();
  }

  Answer& made = answer.value();
  made.matched_tokens = std::max(made.matched_tokens, matched);
  if (!made.ids.empty()) {
    conversation_.add(
        said, std::move(*prompt), made.ids, text, made.matched_tokens);
  }
  tokens_made_ += static_cast<int64_t>(made.ids.size());
  tokens_read_ += static_cast<int64_t>(made.prefill_tokens);
  decode_tokens_ += made.decode_tokens;
  decode_seconds_ += made.decode_seconds;
  report(made);
  if (stored_ != nullptr) {
    store();
  }
  return answer;
}

void Chat::store() {
  // The answer is valid even if its text cannot be stored.
  if (auto saved = stored_->save(*cache_.of_session(), generator_);
      !saved.ok()) {
    say(saved.error().message());
  }
}

void Chat::report(const Answer& answer) const {
  say_stop(answer.stop, cache_.capacity());
  if (answer.stop == FinishReason::cancelled) {
    say("stopped: interrupted");
  }
  const auto cache = describe_cache();
  say(cache.ok() ? describe(answer) + " · cache " + *cache
                 : cache.error().message());
  if (speculator_ != nullptr && answer.decode_steps > 0) {
    say(describe(speculator_->take_statistics()));
  }
  if (options_.ids) {
    write_piece(ids_line(answer.ids));
  }
}

/// Returns the memory of the cache, or the length of a cache in the graph.
Result<std::string> Chat::describe_cache() const {
  if (const Cache* cache = cache_.of_session()) {
    const auto memory = cache->memory();
    if (!memory.ok()) {
      return memory.error();
    }
    return mebibytes(memory->allocated + memory->shared) + " of " +
           mebibytes(memory->at_capacity) + " (" + model_.format() + ")";
  }
  const auto length = cache_.length();
  if (!length.ok()) {
    return length.error();
  }
  return std::to_string(*length) + " of " +
         counted(cache_.capacity(), "position") + " (in the program)";
}

void Chat::converse() {
  say("/help lists the commands");
  for (;;) {
    arm_interrupt();
    const auto line = read_line();
    if (!line) {
      return;
    }
    if (line->empty()) {
      continue;
    }
    if (line->front() == '/') {
      if (!follow(*line)) {
        return;
      }
    } else if (const auto answer = ask(*line); !answer.ok()) {
      say(answer.error().message());
      if (answer.error().status() == ETKV_ERROR_CAPACITY) {
        say("/undo and /reset make room");
      }
    }
  }
}

bool Chat::follow(const std::string& command) {
  if (command == "/quit") {
    return false;
  }
  if (command == "/undo") {
    undo();
  } else if (command == "/reset") {
    reset();
  } else if (command == "/stats") {
    stats();
  } else if (command == "/stats json") {
    report();
  } else if (command == "/help") {
    say(kCommands);
  } else {
    say("there is no command " + command + "; /help lists them");
  }
  return true;
}

void Chat::undo() {
  const auto kept = conversation_.undo();
  if (!kept) {
    say("there is nothing to undo");
    return;
  }
  if (const auto rewound = generator_.rewind(*kept); !rewound.ok()) {
    say(rewound.error().message());
    return;
  }
  const auto length = cache_.length();
  say(length.ok() ? "undid the last exchange; the cache holds " +
                        counted(*length, "position")
                  : length.error().message());
}

void Chat::reset() {
  conversation_.reset();
  // Clears rather than rewinds: this works for a poisoned cache too.
  if (const auto cleared = cache_.clear(); !cleared.ok()) {
    say(cleared.error().message());
    return;
  }
  if (const auto rewound = generator_.rewind(0); !rewound.ok()) {
    say(rewound.error().message());
    return;
  }
  say("began a new conversation");
}

void Chat::stats() const {
  std::string line =
      counted(static_cast<int64_t>(conversation_.exchanges()), "exchange") +
      " · " + counted(tokens_read_, "token") + " read, " +
      std::to_string(tokens_made_) + " made";
  if (decode_tokens_ > 0) {
    line += " at " + rate(decode_tokens_, decode_seconds_);
  }
  say(line);
  const Cache* cache = cache_.of_session();
  if (cache == nullptr) {
    const auto held = describe_cache();
    say(held.ok() ? "cache " + *held : held.error().message());
    return;
  }
  const auto length = cache->length();
  const auto memory = cache->memory();
  if (!length.ok() || !memory.ok()) {
    say((length.ok() ? memory.error() : length.error()).message());
    return;
  }
  say("cache " + std::to_string(*length) + " of " +
      counted(cache_.capacity(), "position") + " · " + mebibytes(memory->used) +
      " in use, " + mebibytes(memory->allocated) + " held, " +
      mebibytes(memory->at_capacity) + " at capacity (" + model_.format() +
      ")");
}

void Chat::report() const {
  const Cache* cache = cache_.of_session();
  if (cache == nullptr) {
    say("there is no report of a cache that is part of the program");
    return;
  }
  const auto report = cache_report(*cache);
  say(report.ok() ? report.value() : report.error().message());
}

} // namespace etkv::examples
