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
    stop = FinishReason::stop;
  } else if (static_cast<int64_t>(ids.size()) >= max_tokens) {
    stop = FinishReason::length;
  }
  return {};
}

Result<std::optional<LogitsView>> read_ids(
    Model& model,
    SeqCache& cache,
    int32_t sequence,
    const std::vector<int64_t>& ids,
    size_t held,
    size_t end) {
  std::optional<LogitsView> last;
  while (held < end) {
    if (interrupted()) {
      return std::optional<LogitsView>();
    }
    const size_t n = std::min(model.program().prefill_size(), end - held);
    Batch batch;
    batch.add(ids.data() + held, n, static_cast<int64_t>(held), sequence);
    ASSIGN_OR_RETURN(last, batch.step(model.program(), cache));
    held += n;
  }
  return last;
}

Result<size_t> cut(SeqCache& cache, int32_t sequence, size_t length) {
  const auto removed =
      cache.seq_rm(sequence, static_cast<int32_t>(length), kAll);
  if (!removed.ok() && removed.error().status() == ETKV_ERROR_POSITION) {
    RETURN_IF_ERROR(cache.seq_rm(sequence));
    return size_t{0};
  }
  RETURN_IF_ERROR(removed);
  return length;
}

Result<bool> begin(Model& model, SeqCache& cache, Decoding& one, size_t held) {
  ASSIGN_OR_RETURN(
      const auto logits,
      read_ids(
          model, cache, one.sequence, one.prompt, held, one.prompt.size()));
  if (!logits) {
    return false;
  }
  RETURN_IF_ERROR(one.take(model, *logits, logits->last_row()));
  return true;
}

Result<void> step_together(
    Model& model,
    SeqCache& cache,
    const std::vector<Decoding*>& active) {
  const auto most =
      static_cast<size_t>(model.program().params().prefill_chunk_size);
  for (size_t first = 0; first < active.size(); first += most) {
    const size_t n = std::min(most, active.size() - first);
    Batch batch;
    for (size_t i = first; i < first + n; ++i) {
      const Decoding& one = *active[i];
      batch.add(one.ids.back(), one.position(), one.sequence);
    }
    ASSIGN_OR_RETURN(const auto logits, batch.step(model.program(), cache));
    RETURN_IF_ERROR(check_rows(logits, n));
    for (size_t row = 0; row < n; ++row) {
      RETURN_IF_ERROR(
          active[first + row]->take(model, logits, static_cast<int64_t>(row)));
    }
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
