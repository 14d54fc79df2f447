#include "examples/common/generator.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "examples/common/clock.hpp"
#include "examples/common/interrupt.hpp"
#include "examples/common/shared_prefix.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {

Result<void> check_length(size_t prompt_tokens, int32_t capacity) {
  if (prompt_tokens == 0) {
    return Error(ETKV_ERROR_INVALID_ARGUMENT, "the prompt has no tokens");
  }
  if (prompt_tokens > static_cast<size_t>(capacity)) {
    return Error(
        ETKV_ERROR_CAPACITY,
        "the prompt is " + std::to_string(prompt_tokens) +
            " tokens long, and the cache holds " + std::to_string(capacity) +
            " (--capacity)");
  }
  return {};
}

std::optional<FinishReason> stop_of(End end) {
  switch (end) {
    case End::none:
      return std::nullopt;
    case End::stop:
      return FinishReason::stop;
    case End::length:
      return FinishReason::length;
    case End::capacity:
      return FinishReason::capacity;
  }
  return std::nullopt;
}

void SamplingStepper::begin(std::vector<int64_t> prompt, size_t start) {
  prompt_ = std::move(prompt);
  start_ = start;
}

Result<int64_t> SamplingStepper::first(const LogitsView& logits) {
  return choose(logits, prompt_);
}

Result<std::vector<int64_t>> SamplingStepper::next(
    const std::vector<int64_t>& text,
    size_t) {
  ASSIGN_OR_RETURN(
      const auto logits,
      program_.step_at(
          &text.back(), static_cast<int64_t>(text.size()) - 1, /*n=*/1));
  ASSIGN_OR_RETURN(const int64_t id, choose(logits, text));
  return std::vector<int64_t>{id};
}

Result<int64_t> SamplingStepper::choose(
    const LogitsView& logits,
    const std::vector<int64_t>& text) {
  row_.resize(static_cast<size_t>(logits.vocabulary));
  copy_row(logits, logits.last_row(), row_.data());
  return etkv::choose(
      sampling_,
      row_.data(),
      row_.size(),
      text.data() + start_,
      text.size() - start_,
      /*n=*/text.size() - prompt_.size());
}

Generator::Generator(
    Program& program,
    TextCache cache,
    std::vector<int64_t> eos_token_ids,
    Stepper* stepper,
    Sampling sampling)
    : program_(program),
      cache_(cache),
      eos_token_ids_(std::move(eos_token_ids)),
      sampling_(std::move(sampling)),
      own_stepper_(program, sampling_),
      stepper_(stepper) {}

Result<Answer> Generator::answer(
    const std::vector<int64_t>& prompt,
    int64_t max_tokens,
    const Listener& listener) {
  if (auto checked = check_length(prompt.size(), cache_.capacity());
      !checked.ok()) {
    return checked.error();
  }
  const size_t shared = matched(prompt);
  ASSIGN_OR_RETURN(const size_t kept, rewind(shared));
  RETURN_IF_ERROR(cache_.mark_turn(static_cast<int32_t>(prompt.size())));

  Answer answer;
  answer.reused_tokens = kept;
  answer.matched_tokens = shared;
  const bool on_device = stepper_ == nullptr &&
                         cache_.of_session() != nullptr &&
                         program_.params().backend_id == kMLXBackend;
  const auto ran = on_device
                       ? run_on_device(prompt, max_tokens, listener, answer)
                       : run(prompt, max_tokens, listener, answer);
  if (ran.ok() && !answer.ids.empty()) {
    return answer;
  }
  const auto rewound = rewind(kept);
  // Return the first error, because it caused the others.
  RETURN_IF_ERROR(ran);
  RETURN_IF_ERROR(rewound);
  return answer;
}

Result<void> Generator::run_on_device(
    const std::vector<int64_t>& prompt,
    int64_t max_tokens,
    const Listener& listener,
    Answer& answer) {
  const size_t start = answer.reused_tokens;
  const auto first = prompt.begin() + static_cast<std::ptrdiff_t>(start);
  const size_t total = prompt.size() - start;
  RETURN_IF_ERROR(program_.check_ids(prompt.data() + start, total));
  GenerationOptions options;
  options.sampling = sampling_;
  options.max_tokens = static_cast<int32_t>(max_tokens);
  options.stop = eos_token_ids_;
  ASSIGN_OR_RETURN(
      auto generation,
      Generation::make(
          *cache_.of_session(),
          {{std::vector<int64_t>(first, prompt.end())}},
          options));
  if (listener.on_prefill) {
    listener.on_prefill(0, total);
  }
  Stopwatch watch;
  for (size_t waiting = total; waiting > 0;) {
    if (waiting < total && interrupted()) {
      answer.stop = FinishReason::cancelled;
      return {};
    }
    ASSIGN_OR_RETURN(waiting, generation.read_prompts());
    held_.assign(
        prompt.begin(), prompt.end() - static_cast<std::ptrdiff_t>(waiting));
    answer.prefill_tokens = total - waiting;
    answer.prefill_seconds += watch.lap();
    if (listener.on_prefill) {
      listener.on_prefill(total - waiting, total);
    }
  }
  if (interrupted()) {
    answer.stop = FinishReason::cancelled;
    return {};
  }
  const auto decoded = decode_on_device(generation, listener, answer);
  answer.decode_seconds = watch.lap();
  return decoded;
}

Result<void> Generator::decode_on_device(
    Generation& generation,
    const Listener& listener,
    Answer& answer) {
  for (;;) {
    ASSIGN_OR_RETURN(const auto next, generation.next());
    if (next.empty()) {
      return {};
    }
    const auto& [_, id, end] = next.front();
    if (!answer.ids.empty()) {
      held_.push_back(answer.ids.back());
      ++answer.decode_tokens;
      ++answer.decode_steps;
    }
    answer.ids.push_back(id);
    if (!ends(id) && listener.on_token) {
      RETURN_IF_ERROR(listener.on_token(id));
    }
    if (end == End::none && interrupted()) {
      answer.stop = FinishReason::cancelled;
      return {};
    }
    if (const auto stop = stop_of(end)) {
      answer.stop = *stop;
      return {};
    }
  }
}

Result<void> Generator::run(
    const std::vector<int64_t>& prompt,
    int64_t max_tokens,
    const Listener& listener,
    Answer& answer) {
  Stepper& stepper = stepper_ == nullptr ? own_stepper_ : *stepper_;
  own_stepper_.begin(prompt, answer.reused_tokens);
  const size_t start = answer.reused_tokens;
  const auto on_chunk = [&](size_t done, size_t total, const LogitsView&) {
    stepper.read(static_cast<int64_t>(held_.size()));
    const auto* chunk = prompt.data() + held_.size();
    held_.insert(held_.end(), chunk, prompt.data() + start + done);
    if (listener.on_prefill) {
      listener.on_prefill(done, total);
    }
    return !interrupted();
  };
  if (listener.on_prefill) {
    listener.on_prefill(0, prompt.size() - start);
  }
  Stopwatch watch;
  const auto logits = prefill(
      program_,
      prompt.data() + start,
      static_cast<int64_t>(start),
      prompt.size() - start,
      /*chunk=*/0,
      on_chunk);
  answer.prefill_tokens = held_.size() - start;
  answer.prefill_seconds = watch.lap();
  if (!logits.ok()) {
    return logits.error();
  }
  if (!logits.value()) {
    answer.stop = FinishReason::cancelled;
    return {};
  }
  return decode(stepper, *logits.value(), max_tokens, listener, answer);
}

Result<void> Generator::decode(
    Stepper& stepper,
    const LogitsView& logits,
    int64_t max_tokens,
    const Listener& listener,
    Answer& answer) {
  Stopwatch watch;
  const auto most = static_cast<size_t>(max_tokens);
  ASSIGN_OR_RETURN(const int64_t first, stepper.first(logits));
  std::vector<int64_t> ids = {first};
  // The ids that the cache holds, and the last id, which has not run.
  std::vector<int64_t> text = held_;
  for (;;) {
    for (const int64_t id : ids) {
      answer.ids.push_back(id);
      text.push_back(id);
      if (!ends(id) && listener.on_token) {
        RETURN_IF_ERROR(listener.on_token(id));
      }
    }
    if (ends(ids.back())) {
      answer.stop = FinishReason::stop;
      break;
    }
    if (answer.ids.size() >= most) {
      answer.stop = FinishReason::length;
      break;
    }
    if (interrupted()) {
      answer.stop = FinishReason::cancelled;
      break;
    }
    ASSIGN_OR_RETURN(const bool fits, cache_.can_extend());
    if (!fits) {
      answer.stop = FinishReason::capacity;
      break;
    }
    ASSIGN_OR_RETURN(ids, stepper.next(text, most - answer.ids.size()));
    held_ = text;
    held_.insert(held_.end(), ids.begin(), ids.end() - 1);
    answer.decode_tokens += static_cast<int64_t>(ids.size());
    ++answer.decode_steps;
  }
  answer.decode_seconds = watch.lap();
  return {};
}

size_t Generator::matched(const std::vector<int64_t>& prompt) const {
  return prompt.empty()
             ? 0
             : std::min(shared_prefix(prompt, held_), prompt.size() - 1);
}

Result<size_t> Generator::rewind(size_t length) {
  // Use the length of the cache, not of `held_`: a failed step was either
  // rolled back or failed after its commit.
  ASSIGN_OR_RETURN(
      const int32_t left, cache_.rewind(static_cast<int32_t>(length)));
  held_.resize(std::min(held_.size(), static_cast<size_t>(left)));
  return held_.size();
}

bool Generator::ends(int64_t id) const {
  return std::find(eos_token_ids_.begin(), eos_token_ids_.end(), id) !=
         eos_token_ids_.end();
}

} // namespace etkv::examples
