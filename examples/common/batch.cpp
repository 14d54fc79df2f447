#include "examples/common/batch.hpp"

#include <algorithm>

#include "examples/common/interrupt.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {

Result<std::optional<LogitsView>> prefill(
    Program& program,
    SeqCache& cache,
    int32_t sequence,
    int64_t position,
    const int64_t* tokens,
    size_t n) {
  std::optional<LogitsView> logits;
  for (size_t done = 0; done < n;) {
    if (interrupted()) {
      return std::optional<LogitsView>();
    }
    const size_t take = std::min(program.prefill_size(), n - done);
    Batch batch;
    batch.add(
        tokens + done, take, position + static_cast<int64_t>(done), sequence);
    ASSIGN_OR_RETURN(logits, batch.step(program, cache));
    done += take;
  }
  return logits;
}

Result<void> Decoding::take(
    const Model& model,
    const LogitsView& logits,
    int64_t row,
    int64_t max_new_tokens) {
  ASSIGN_OR_RETURN(const int64_t id, argmax(logits, row));
  ids.push_back(id);
  if (model.ends(id)) {
    stop = Stop::end;
  } else if (static_cast<int64_t>(ids.size()) >= max_new_tokens) {
    stop = Stop::limit;
  }
  return {};
}

} // namespace etkv::examples
