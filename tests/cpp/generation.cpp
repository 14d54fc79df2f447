// Answers whose tokens the device chooses, compared with steps of the host.

#include <atomic>
#include <limits>
#include <numeric>
#include <thread>

#include "fixture.hpp"

namespace etkv::tests {
namespace {

constexpr int32_t kTokens = 24;

/// Room for a prompt of two steps, and its answer.
void large(CacheConfig& config) {
  config.capacity = 128;
}

/// Returns the answer of steps in which the host chooses each token from the
/// last logits.
Ids by_steps(
    const Ids& prompt,
    const Sampling& sampling,
    size_t answer = 0,
    const Change& change = nullptr) {
  On<Cache> bound(change);
  Rows rows = bound.model.read(prompt, 16);
  Ids text = prompt;
  for (uint64_t n = 0;; ++n) {
    const auto last = rows.last();
    text.push_back(must(choose(
        sampling,
        last.values.data(),
        last.values.size(),
        text.data(),
        text.size(),
        n,
        answer)));
    if (n + 1 == kTokens) {
      return slice(text, prompt.size(), kTokens);
    }
    rows = bound.model.at(static_cast<int64_t>(text.size()) - 1, {text.back()});
  }
}

GenerationOptions options(const Sampling& sampling = {}) {
  GenerationOptions made;
  made.sampling = sampling;
  made.max_tokens = kTokens;
  made.run_ahead = RunAhead::always;
  return made;
}

std::vector<Sampling> samplings() {
  std::vector<Sampling> all(6);
  for (size_t i = 1; i < all.size(); ++i) {
    all[i].temperature = 1.3F;
    all[i].seed = i;
  }
  all[2].top_k = 30;
  all[3].top_p = 0.8F;
  all[4].min_p = 0.1F;
  all[4].repetition_penalty = 1.6F;
  all[4].repetition_context = 7;
  all[5].logit_bias = {{5, 6.0F}, {9, -INFINITY}};
  return all;
}

/// The same seed gives the same ids, on caches of each kind, with async decode
/// or without.
template <typename Face>
void same_as_steps() {
  const Ids prompt = text(kMaxTokens + 8, 3);
  for (const auto& sampling : samplings()) {
    const Ids wanted = by_steps(prompt, sampling, 0, large);
    for (const RunAhead ahead : {RunAhead::always, RunAhead::never}) {
      On<Face> bound(large);
      auto how = options(sampling);
      how.run_ahead = ahead;
      CHECK(must(generate(bound.cache(), prompt, how)) == wanted);
      CHECK_INT(*bound->length(), prompt.size() + kTokens - 1);
    }
  }
}

/// At every token the cache holds the prompt and the earlier tokens, even if
/// windows have moved. The host can continue as without async decode.
void holds_what_was_delivered() {
  const Change windows = [](CacheConfig& config) {
    windows_of(6)(config);
    config.max_step_tokens = 16;
  };
  const Ids prompt = text(30, 7);
  const Ids wanted = by_steps(prompt, {}, 0, windows);
  for (size_t taken = 1; taken < kTokens; taken += 5) {
    On<Cache> bound(windows);
    size_t delivered = 0;
    const auto answer =
        must(generate(bound.cache(), prompt, options(), [&](int64_t, End) {
          CHECK_INT(*bound->length(), prompt.size() + delivered);
          return ++delivered < taken;
        }));
    CHECK(answer == slice(wanted, 0, taken));
    CHECK_INT(*bound->length(), prompt.size() + taken - 1);
    const auto position = static_cast<int64_t>(prompt.size() + taken) - 1;
    CHECK_INT(bound.model.at(position, {answer.back()}).best(), wanted[taken]);
  }
}

void ends() {
  const Ids prompt = text(20, 5);
  const Ids wanted = by_steps(prompt, {});
  On<Cache> bound;
  auto how = options();
  how.stop = {wanted[9], -3};
  const auto first = static_cast<size_t>(
      std::find(wanted.begin(), wanted.end(), wanted[9]) - wanted.begin());
  End end = End::none;
  const auto last = [&](int64_t, End reason) {
    end = reason;
    return true;
  };
  CHECK(
      must(generate(bound.cache(), prompt, how, last)) ==
      slice(wanted, 0, first + 1));
  CHECK(end == End::stop);
  CHECK_INT(*bound->length(), 20 + first);

  On<Cache> small([](CacheConfig& config) { config.capacity = 25; });
  CHECK(
      must(generate(small.cache(), prompt, options(), last)) ==
      slice(wanted, 0, 6));
  CHECK(end == End::capacity);
  CHECK_INT(*small->length(), 25);
  how = options();
  how.max_tokens = 0;
  On<Cache> nothing;
  CHECK(must(generate(nothing.cache(), prompt, how)).empty());
  CHECK_INT(*nothing->length(), 20);
}

/// Answers in several sequences end at different times. Each equals the answer
/// of a sequence that runs alone.
void batches() {
  const std::vector<Ids> prompts = {text(9, 3), text(17, 4), text(1, 5)};
  Sampling sampling;
  sampling.temperature = 0.9F;
  sampling.repetition_penalty = 1.2F;
  for (const auto& one : {Sampling(), sampling}) {
    std::vector<Ids> wanted;
    std::vector<Prompt> given;
    for (size_t i = 0; i < prompts.size(); ++i) {
      wanted.push_back(by_steps(prompts[i], one, i));
      given.push_back({prompts[i], static_cast<int32_t>(2 * i)});
    }
    On<SeqCache> bound([](CacheConfig& config) { config.capacity = 200; });
    auto how = options(one);
    how.stop = {wanted[1][5]};
    auto generation = must(Generation::make(bound.cache(), given, how));
    std::vector<Ids> answers(prompts.size());
    std::vector<bool> ended(prompts.size());
    for (auto next = must(generation.next()); !next.empty();
         next = must(generation.next())) {
      for (const auto& [prompt, token, end] : next) {
        CHECK(!ended[prompt]);
        answers[prompt].push_back(token);
        ended[prompt] = end != End::none;
      }
    }
    for (size_t i = 0; i < prompts.size(); ++i) {
      CHECK(ended[i]);
      const auto stop =
          std::find(wanted[i].begin(), wanted[i].end(), how.stop[0]);
      const auto n = static_cast<size_t>(stop - wanted[i].begin());
      CHECK(
          answers[i] == slice(wanted[i], 0, std::min<size_t>(n + 1, kTokens)));
      CHECK_INT(
          *bound->seq_len(static_cast<int32_t>(2 * i)),
          prompts[i].size() + answers[i].size() - 1);
    }
  }
}

/// The host may use the cache between two tokens.
void between_tokens() {
  const Ids prompt = text(12, 9);
  const Ids wanted = by_steps(prompt, {});
  On<SeqCache> bound;
  auto one = must(Generation::make(bound.cache(), {{prompt, 0}}, options()));
  auto two = must(Generation::make(bound.cache(), {{prompt, 1}}, options()));
  Ids first;
  Ids second;
  for (size_t n = 0; n < 8; ++n) {
    first.push_back(must(one.next()).at(0).token);
    if (n % 2 == 0) {
      second.push_back(must(two.next()).at(0).token);
    }
    if (n == 3) {
      must(one.pause());
      must(bound->seq_cp(0, 2));
      must(bound->begin_step({2}));
      bound.model.at(12 + 3, {1});
      CHECK_INT(*bound->seq_len(0), 12 + 3);
    }
  }
  CHECK(first == slice(wanted, 0, 8));
  CHECK(second == slice(wanted, 0, 4));
  // The host changed the answer's sequence.
  must(bound->seq_rm(0, 10, kAll));
  CHECK_REFUSED(
      one.next(), ETKV_ERROR_POSITION, "the next position of the cache is 10");
}

/// After a cancel, even from another thread, there are no more tokens. The
/// cache holds the returned tokens, and another answer can continue from them.
void cancels() {
  const Ids prompt = text(kMaxTokens + 8, 3);
  const Ids wanted = by_steps(prompt, {}, 0, large);
  On<Cache> bound(large);
  auto one = must(Generation::make(bound.cache(), {{prompt, 0}}, options()));
  for (size_t n = 0; n < 3; ++n) {
    CHECK(must(one.next()).at(0).token == wanted[n]);
  }
  must(one.cancel());
  CHECK(must(one.next()).empty());
  CHECK(must(one.next()).empty());
  CHECK_INT(*bound->length(), prompt.size() + 2);
  auto how = options();
  how.max_tokens = 4;
  CHECK(must(generate(bound.cache(), {wanted[2]}, how)) == slice(wanted, 3, 4));

  On<Cache> other;
  how.max_tokens = std::numeric_limits<int32_t>::max();
  auto endless = must(Generation::make(other.cache(), {{{1}, 0}}, how));
  std::atomic<int> delivered = 0;
  std::thread reader([&] {
    while (!must(endless.next()).empty()) {
      ++delivered;
    }
  });
  while (delivered < 2) {
    std::this_thread::yield();
  }
  must(endless.cancel());
  reader.join();
  CHECK(must(endless.next()).empty());
}

/// Steps of the host with ids that the device chooses: the argmax of each row
/// of logits, for text and trees. A refused step changes nothing.
void choices() {
  const Ids prompt = text(20, 11);
  Ids wanted;
  On<TreeCache> logits;
  const Rows rows = logits.model.at(0, prompt);
  for (int64_t row = 0; row < rows.count; ++row) {
    wanted.push_back(rows.row(row).best());
  }
  On<TreeCache> bound;
  const TreeCache& cache = bound.cache();
  const auto at = [](int32_t first, size_t n) {
    std::vector<int32_t> positions(n);
    std::iota(positions.begin(), positions.end(), first);
    return positions;
  };
  CHECK(must(choose(cache, prompt, at(0, 20))) == wanted);
  CHECK_INT(*bound->length(), 20);

  // Four tokens: the other three are candidates after the first.
  const Ids tree = {1, 2, 3, 4};
  const std::vector<int32_t> positions = {20, 21, 21, 22};
  must(bound->propose({-1, 0, 0, 2}));
  const auto chosen = must(choose(cache, tree, positions));
  for (const Ids& path : {Ids{1}, Ids{1, 2}, Ids{1, 3}, Ids{1, 3, 4}}) {
    must(logits->rewind(20));
    const auto node = static_cast<size_t>(path.back()) - 1;
    CHECK_INT(logits.model.at(20, path).best(), chosen[node]);
  }
  must(bound->commit({0, 2}));
  CHECK_INT(*bound->length(), 22);

  const auto invalid = ETKV_ERROR_INVALID_ARGUMENT;
  CHECK_REFUSED(choose(cache, {}, {}), invalid, "0 tokens");
  CHECK_REFUSED(
      choose(cache, {1, 2}, {22}), invalid, "2 tokens at 1 positions");
  CHECK_REFUSED(choose(cache, {1}, {30}), ETKV_ERROR_POSITION, "30");
  CHECK_REFUSED(choose(cache, text(65), at(22, 65)), invalid, "tokens, got 65");
  CHECK_INT(*bound->length(), 22);
}

/// A warm-up leaves the cache empty, and does nothing if the cache holds
/// positions.
template <typename Face>
void warm_ups() {
  On<Face> bound;
  size_t last = 0;
  must(warm_up(bound.cache(), [&](size_t done, size_t steps) {
    CHECK(done >= last && done <= steps);
    last = done;
  }));
  CHECK_INT(*bound->length(), 0);
  const Ids prompt = text(12, 9);
  const Ids wanted = by_steps(prompt, {});
  CHECK(must(generate(bound.cache(), prompt, options())) == wanted);
  must(warm_up(bound.cache()));
  CHECK_INT(*bound->length(), 12 + kTokens - 1);
}

void refusals() {
  On<SeqCache> bound;
  const auto refused = [&](const std::vector<Prompt>& prompts,
                           const GenerationOptions& how,
                           etkv_status status,
                           const char* words) {
    CHECK_REFUSED(Generation::make(bound.cache(), prompts, how), status, words);
  };
  const auto invalid = ETKV_ERROR_INVALID_ARGUMENT;
  refused({}, options(), invalid, "at least one prompt, got none");
  refused({{{}, 0}}, options(), invalid, "prompt 0 has no tokens");
  refused({{{1}, 0}, {{1}, 0}}, options(), invalid, "second for sequence 0");
  refused({{{1}, 256}}, options(), invalid, "256");
  refused({{text(65), 0}}, options(), ETKV_ERROR_CAPACITY, "65 tokens");
  auto how = options();
  how.max_tokens = -1;
  refused({{{1}, 0}}, how, invalid, "max_tokens is -1, the minimum is 0");
  how = options();
  how.sampling.top_p = 1.5F;
  refused({{{1}, 0}}, how, invalid, "top_p is 1.5");
  CHECK_REFUSED(
      generate(bound.cache(), {kVocabulary}, options()),
      invalid,
      "from 0 to 319, got 320");
  CHECK_INT(*bound->length(), 0);

  On<Cache> one;
  CHECK_REFUSED(
      Generation::make(one.cache(), {{{1}, 3}}, options()),
      invalid,
      "no sequence 3");
  Model model("tiny-llama-f32");
  auto session = session_for(model);
  CHECK_REFUSED(
      Generation::make(session.cache(), {{{1}, 0}}, options()),
      invalid,
      "no loaded program has this cache");
  Model for_cpu("cpu-tiny-llama-f32");
  auto on_cpu = session_for(for_cpu);
  must(for_cpu.load(on_cpu.key()));
  CHECK_REFUSED(
      Generation::make(on_cpu.cache(), {{{1}, 0}}, options()),
      ETKV_ERROR_KIND,
      "only MLX programs");
  On<SeqCache> last;
  Model narrow("tiny-llama-f32");
  must(narrow.load(last.session.key(), Logits::last));
  CHECK_REFUSED(
      Generation::make(last.cache(), {{{1}, 0}, {{1}, 1}}, options()),
      invalid,
      "load it with logits=all");
  CHECK_REFUSED(
      choose(last.cache(), {1, 2}, {0, 1}),
      ETKV_ERROR_UNSUPPORTED,
      "load it with logits=all");
  CHECK_REFUSED(
      choose(on_cpu.cache(), {1}, {0}), ETKV_ERROR_KIND, "only MLX programs");
  CHECK_INT(*last->length(), 0);
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  same_as_steps<etkv::Cache>();
  same_as_steps<etkv::SeqCache>();
  same_as_steps<etkv::TreeCache>();
  holds_what_was_delivered();
  ends();
  batches();
  between_tokens();
  cancels();
  choices();
  warm_ups<etkv::Cache>();
  warm_ups<etkv::TreeCache>();
  refusals();
  return check_report();
}
