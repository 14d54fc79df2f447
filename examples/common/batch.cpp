#include "examples/common/batch.hpp"

#include <algorithm>

#include "examples/common/interrupt.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {

Result<void>
Decoding::take(const Model& model, const LogitsView& logits, int64_t row) {
  ASSIGN_OR_RETURN(const int64_t id, argmax(logits, row));
  ids.push_back(id);
  log_probability += examples::log_probability(logits, row, id);
  if (model.ends(id)) {
    stop = Stop::end;
  } else if (static_cast<int64_t>(ids.size()) >= max_new_tokens) {
    stop = Stop::limit;
  }
  return {};
}

Result<bool> begin(Model& model, SeqCache& cache, Decoding& one, size_t held) {
  const std::vector<int64_t>& prompt = one.prompt;
  while (held < prompt.size()) {
    if (interrupted()) {
      return false;
    }
    const size_t n =
        std::min(model.program().prefill_size(), prompt.size() - held);
    Batch batch;
    batch.add(
        prompt.data() + held, n, static_cast<int64_t>(held), one.sequence);
    ASSIGN_OR_RETURN(const auto logits, batch.step(model.program(), cache));
    held += n;
    if (held == prompt.size()) {
      RETURN_IF_ERROR(one.take(model, logits, logits.last_row()));
    }
  }
  return true;
}

Result<void> step_together(
    Model& model,
    SeqCache& cache,
    const std::vector<Decoding*>& active) {
  Batch batch;
  for (const Decoding* one : active) {
    batch.add(one->ids.back(), one->position(), one->sequence);
  }
  ASSIGN_OR_RETURN(const auto logits, batch.step(model.program(), cache));
  for (size_t row = 0; row < active.size(); ++row) {
    RETURN_IF_ERROR(
        active[row]->take(model, logits, static_cast<int64_t>(row)));
  }
  return {};
}

std::vector<Decoding*> unfinished(std::vector<Decoding>& all) {
  std::vector<Decoding*> found;
  for (auto& one : all) {
    if (!one.stop) {
      found.push_back(&one);
    }
  }
  return found;
}

} // namespace etkv::examples
