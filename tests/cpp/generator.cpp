// The positions that a generator keeps in a cache that cannot be rewound to
// every position, and its state after a failed step.

#include "speculative.hpp"

namespace etkv::tests {
namespace {

using examples::Generator;
using examples::Listener;

/// The number of tokens of an answer: more than a window and a step, so that
/// positions are dropped.
constexpr int64_t kLong = 160;

/// If windows have moved past the position where two prompts differ, the second
/// prompt is read from its beginning. Its answer equals that of a fresh cache.
template <typename Face>
void windows() {
  const Ids first = text(9, 3);
  Ids second = slice(first, 0, 5);
  second.push_back(7);
  ModelOn<Face> fresh("tiny-llama-f32", 200, windows_of(8));
  Generator alone(fresh.model.program(), fresh.cache(), {});
  const auto wanted = must(alone.answer(second, kLong, Listener()));

  ModelOn<Face> target("tiny-llama-f32", 200, windows_of(8));
  Generator generator(target.model.program(), target.cache(), {});
  const auto before = must(generator.answer(first, kLong, Listener()));
  CHECK_INT(generator.held().size(), 9 + kLong - 1);
  const auto again = must(generator.answer(second, kLong, Listener()));
  CHECK_INT(again.reused_tokens, 0);
  CHECK_INT(again.matched_tokens, 5);
  CHECK_INT(again.prefill_tokens, second.size());
  CHECK(again.ids == wanted.ids);
  CHECK(again.ids != before.ids);

  CHECK_INT(must(generator.rewind(1000)), 6 + kLong - 1);
  CHECK_INT(must(generator.rewind(20)), 0);
  CHECK(generator.held().empty());
  CHECK_INT(*target.cache().length(), 0);
  CHECK(must(generator.answer(second, kLong, Listener())).ids == wanted.ids);
}

/// Without windows, a generator rewinds exactly to the requested length.
void without_windows() {
  ModelOn<Cache> target;
  Generator generator(target.model.program(), target.cache(), {});
  must(generator.answer(text(9, 3), 60, Listener()));
  CHECK_INT(must(generator.rewind(20)), 20);
  CHECK_INT(generator.held().size(), 20);
  CHECK_INT(*target.cache().length(), 20);
  const auto more = must(generator.answer(text(12, 3), 4, Listener()));
  CHECK_INT(more.reused_tokens, 9);
  CHECK_INT(more.matched_tokens, 9);
}

/// A stepper that fails after the first id, when the cache can no longer be
/// rewound.
class Failing : public examples::Stepper {
 public:
  explicit Failing(SeqCache& cache) : cache_(cache) {}

  Result<int64_t> first(const examples::LogitsView& logits) override {
    return argmax(logits, logits.last_row());
  }
  Result<std::vector<int64_t>> next(const Ids&, size_t) override {
    must(cache_.seq_cp(0, 1));
    REQUIRE(!cache_.rewind(0).ok());
    return Error(ETKV_ERROR_INTERNAL, "the step failed");
  }

 private:
  SeqCache& cache_;
};

void the_first_error_is_told() {
  ModelOn<SeqCache> target;
  Failing failing(target.cache());
  Generator generator(target.model.program(), target.cache(), {}, &failing);
  CHECK_REFUSED(
      generator.answer(text(9), 4, Listener()),
      ETKV_ERROR_INTERNAL,
      "the step failed");
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  windows<etkv::Cache>();
  windows<etkv::SeqCache>();
  windows<etkv::TreeCache>();
  without_windows();
  the_first_error_is_told();
  return check_report();
}
