// Many sequences in the steps of one program. Each sequence has the same
// results as alone on a contiguous cache.

#include "tap.hpp"

namespace etkv::tests {
namespace {

/// The tokens of one step.
struct Batch {
  Ids ids;
  Ids positions;
  std::vector<int32_t> sequences;

  void add(int64_t id, int64_t position, int32_t sequence) {
    ids.push_back(id);
    positions.push_back(position);
    sequences.push_back(sequence);
  }
};

Rows step(On<SeqCache>& on, const Batch& batch) {
  must(on->begin_step(batch.sequences));
  return must(on.model.step(batch.ids, batch.positions));
}

void batches(const Change& change) {
  constexpr int32_t kSequences = 3;
  std::vector<Ids> texts;
  std::vector<Rows> wanted;
  for (uint32_t i = 0; i < kSequences; ++i) {
    texts.push_back(text(16, i + 1));
    wanted.push_back(alone(texts.back(), change));
  }
  On<SeqCache> on(change);
  // Prompts of 2, 3 and 4 tokens, mixed token by token.
  std::vector<int64_t> done(kSequences, 0);
  const auto add = [&](Batch& batch, int32_t s) {
    batch.add(texts[s][done[s]], done[s], s);
    ++done[s];
  };
  const auto check = [&](const Batch& batch, const Rows& rows) {
    for (size_t i = 0; i < batch.ids.size(); ++i) {
      CHECK(close(
          rows.row(static_cast<int64_t>(i)),
          wanted[batch.sequences[i]].row(batch.positions[i])));
    }
  };
  Batch prompt;
  for (int64_t t = 0; t < 4; ++t) {
    for (int32_t s = 0; s < kSequences; ++s) {
      if (t < s + 2) {
        add(prompt, s);
      }
    }
  }
  // A step has at most 8 tokens of each sequence, and more than 8 in total.
  check(prompt, step(on, prompt));
  CHECK_INT(*on->length(), 9);
  for (int32_t s = 0; s < kSequences; ++s) {
    CHECK_INT(must(on->seq_len(s)), s + 2);
    CHECK_INT(must(on->seq_next(s)), s + 2);
  }
  CHECK(must(on->sequences()) == std::vector<int32_t>({0, 1, 2}));
  // Then steps with one token of each sequence. The last step has two tokens of
  // one sequence and one token of another.
  while (done[2] < 12) {
    Batch batch;
    for (int32_t s = kSequences; s-- > 0;) {
      add(batch, s);
    }
    check(batch, step(on, batch));
  }
  Batch uneven;
  add(uneven, 1);
  add(uneven, 0);
  add(uneven, 1);
  check(uneven, step(on, uneven));
}

/// Branches share a trunk, and one branch is kept.
void forks(const Change& change) {
  const Ids trunk = text(10);
  On<SeqCache> on(change);
  on.model.read(trunk, 5);
  const uint64_t used = on->memory()->used;
  for (int32_t branch = 1; branch <= 3; ++branch) {
    must(on->seq_cp(0, branch));
    CHECK_INT(must(on->seq_len(branch)), 10);
  }
  // The branches take no bytes and no positions yet.
  CHECK_INT(*on->length(), 10);
  CHECK(change != nullptr || on->memory()->used == used);

  std::vector<Ids> branches;
  for (uint32_t branch = 1; branch <= 3; ++branch) {
    branches.push_back(joined(trunk, text(6, branch + 10)));
  }
  for (size_t at = 10; at < 16; ++at) {
    Batch batch;
    for (int32_t branch = 1; branch <= 3; ++branch) {
      batch.add(branches[branch - 1][at], static_cast<int64_t>(at), branch);
    }
    const Rows rows = step(on, batch);
    for (int64_t branch = 0; branch < 3; ++branch) {
      const Rows wanted = alone(branches[branch], change);
      CHECK(close(rows.row(branch), wanted.row(static_cast<int64_t>(at))));
    }
  }
  CHECK_INT(*on->length(), 10 + 3 * 6);
  must(on->seq_keep(2));
  CHECK(must(on->sequences()) == std::vector<int32_t>({2}));
  CHECK_INT(*on->length(), 16);
  must(on->compact());

  // Only one sequence is left: the next step needs no declaration.
  const Ids more = text(4, 99);
  const Rows wanted = alone(joined(branches[1], more), change);
  CHECK(close(on.model.at(16, more), wanted.tail(4)));
}

bool is(const std::vector<Range>& found, std::initializer_list<Range> wanted) {
  return found.size() == wanted.size() &&
         std::equal(
             found.begin(),
             found.end(),
             wanted.begin(),
             [](const Range& a, const Range& b) {
               return a.begin == b.begin && a.end == b.end;
             });
}

void removal() {
  const Ids ids = text(20);
  On<SeqCache> on;
  on.model.at(0, slice(ids, 0, 12));
  // Backtracking: repeat the last answer with other tokens.
  must(on->seq_rm(0, 8));
  CHECK_INT(must(on->seq_next(0)), 8);
  const Ids more = text(5, 7);
  const Rows wanted = alone(joined(slice(ids, 0, 8), more));
  CHECK(close(on.model.at(8, more), wanted.tail(5)));
  // After a removal in the middle or at the front, other tokens keep their
  // positions.
  must(on->seq_rm(0, 4, 6));
  CHECK(is(must(on->seq_positions(0)), {{0, 4}, {6, 13}}));
  must(on->seq_rm(0, 0, 2));
  CHECK(is(must(on->seq_positions(0)), {{2, 4}, {6, 13}}));
  CHECK_INT(must(on->seq_len(0)), 9);
  CHECK_INT(must(on->seq_next(0)), 13);
  CHECK_INT(*on->length(), 9);
  const Rows before = on.model.at(13, {ids[13]});
  must(on->seq_rm(0, 13));
  must(on->compact());
  CHECK(close(on.model.at(13, {ids[13]}), before));
  must(on->rewind(7));
  CHECK(is(must(on->seq_positions(0)), {{2, 4}, {6, 7}}));
  must(on->clear());
  CHECK(is(must(on->seq_positions(0)), {}));
  CHECK(must(on->sequences()).empty());

  // A rewind to dropped positions is refused.
  On<SeqCache> windowed([](CacheConfig& config) {
    config.layers[0].window = 4;
    config.max_step_tokens = 4;
  });
  windowed.model.read(text(40), 4);
  const int32_t least = must(windowed->seq_rewindable_to(0));
  CHECK_INT(must(windowed->rewindable_to()), least);
  CHECK(least > 0 && least < 40);
  CHECK_REFUSED(
      windowed->seq_rm(0, least - 1),
      ETKV_ERROR_POSITION,
      std::to_string(least).c_str());
  CHECK_INT(must(windowed->seq_next(0)), 40);
  must(windowed->seq_rm(0, least));
  CHECK_INT(must(windowed->seq_next(0)), least);
  must(windowed->seq_rm(0));
}

/// A token that belongs to two sequences is in one cell.
void shared_tokens() {
  const Ids trunk = text(6);
  On<SeqCache> on;
  must(on->begin_step_shared(
      std::vector<std::vector<int32_t>>(trunk.size(), {4, 9})));
  const Rows rows = must(on.model.step(trunk, run(0, 6)));
  CHECK(close(rows, alone(trunk)));
  CHECK_INT(*on->length(), 6);
  CHECK_INT(must(on->seq_len(4)), 6);
  CHECK_INT(must(on->seq_len(9)), 6);

  Batch apart;
  apart.add(11, 6, 9);
  apart.add(12, 6, 4);
  const Rows two = step(on, apart);
  CHECK(close(two.row(0), alone(joined(trunk, {11})).last()));
  CHECK(close(two.row(1), alone(joined(trunk, {12})).last()));
  // Tokens that are removed from one sequence stay in the other.
  must(on->seq_rm(9));
  CHECK_INT(*on->length(), 7);
  CHECK_INT(must(on->seq_len(4)), 7);
}

/// A refused step is rolled back, and its declaration still applies.
void refusals() {
  const Ids ids = text(12);
  On<SeqCache> on([](CacheConfig& config) { config.capacity = 12; });
  Batch first;
  for (int64_t i = 0; i < 4; ++i) {
    first.add(ids[i], i, static_cast<int32_t>(i % 2));
    first.positions.back() = i / 2;
  }
  step(on, first);
  const CacheState before(on.cache());

  // Several sequences without a declaration.
  CHECK_REFUSED(
      on.model.step({1}, {2}), ETKV_ERROR_INVALID_ARGUMENT, "2 sequences");
  CHECK_REFUSED(on->rewind(1), ETKV_ERROR_INVALID_ARGUMENT, "2 sequences");
  CHECK_REFUSED(
      on->rewindable_to(), ETKV_ERROR_INVALID_ARGUMENT, "2 sequences");
  must(on->begin_step({0, 1}));
  CHECK_REFUSED(
      on.model.step({1}, {2}), ETKV_ERROR_INVALID_ARGUMENT, "declared 2");
  CHECK_REFUSED(on.model.step({1, 2}, {2, 3}), ETKV_ERROR_POSITION, "got 3");
  CHECK(CacheState(on.cache()) == before);
  // The declaration still applies.
  must(on.model.step({1, 2}, {2, 2}));
  CHECK_INT(*on->length(), 6);

  must(on->begin_step(std::vector<int32_t>(7, 1)));
  CHECK_REFUSED(
      on.model.step(slice(ids, 0, 7), run(3, 7)),
      ETKV_ERROR_CAPACITY,
      "6 of 12 cells");
  // A sequence that has cells at these positions cannot share others.
  CHECK_REFUSED(on->seq_cp(0, 1), ETKV_ERROR_POSITION, "sequence 1");
  CHECK_INT(*on->length(), 6);
}

/// The face is checked when the session is made.
void faces() {
  Model model("tiny-llama-f32");
  const auto config = make_config(model.params(), 64);
  const auto refused =
      CacheSession<SeqCache>::make(backend(), Cache::kKind, config);
  CHECK_REFUSED(refused, ETKV_ERROR_KIND, "`contiguous`");
  const auto no_trees =
      CacheSession<TreeCache>::make(backend(), SeqCache::kKind, config);
  CHECK_REFUSED(no_trees, ETKV_ERROR_KIND, "`seq`");

  auto made = must(make_seq_session_and_options(backend(), config));
  auto& [session, options] = made;
  must(load_method(model.module(), "forward", options));
  model.at(0, text(3));
  CHECK_INT(must(session->seq_len(0)), 3);
  CHECK(session->kind() == "seq");
  // The registry returns the cache with a smaller face and with the same face.
  auto plain = must(CacheRegistry::get(session.key()));
  CHECK_INT(*plain.length(), 3);
  auto again = must(CacheRegistry::get<SeqCache>(session.key()));
  must(again.seq_rm(0, 2));
  CHECK_INT(*session->length(), 2);
  CHECK_REFUSED(
      CacheRegistry::get<TreeCache>(session.key()), ETKV_ERROR_KIND, "`seq`");

  auto moved = std::move(session);
  CHECK_INT(must(moved->seq_len(0)), 2);
  CHECK_REFUSED(
      session->seq_len(0), // NOLINT: on purpose
      ETKV_ERROR_INVALID_ARGUMENT,
      "cache is NULL");
  const auto found = kinds();
  CHECK_INT(found.size(), 6);
  for (const auto& kind : found) {
    CHECK(kind.backend_id == kMLXBackend || kind.backend_id == kCPUBackend);
    auto cache = must(make_cache<Cache>(kind.backend_id, kind.name, config));
    CHECK(cache.kind() == kind.name);
  }
}

/// A step of several sequences that fails when its rows are written is rolled back.
void undone_steps() {
  const Ids ids = text(12);
  Tapped tapped(64, nullptr, SeqCache::kKind);
  auto cache = must(CacheRegistry::get<SeqCache>(tapped.key()));
  must(cache.begin_step({0, 0, 0, 1, 1}));
  must(tapped.step(slice(ids, 0, 5), {0, 1, 2, 0, 1}, nullptr));
  must(cache.seq_cp(0, 2));
  const CacheState before(tapped.cache());
  must(cache.begin_step({2, 1, 0}));
  CHECK_REFUSED(
      tapped.step({7, 8, 9}, {3, 2, 3}, no_output),
      ETKV_ERROR_SHAPE,
      "expected a tensor to write to");
  CHECK_INT(*cache.length(), before.length);
  CHECK_INT(must(cache.seq_len(2)), 3);
  const Rows rows = must(tapped.step({7, 8, 9}, {3, 2, 3}, nullptr));
  CHECK(close(rows.row(0), alone({ids[0], ids[1], ids[2], 7}).row(3)));
  CHECK(close(rows.row(1), alone({ids[3], ids[4], 8}).row(2)));
  CHECK(close(rows.row(2), alone({ids[0], ids[1], ids[2], 9}).row(3)));
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  open_tap();
  const Change windows = [](etkv::CacheConfig& config) {
    for (auto& layer : config.layers) {
      layer.window = 5;
      layer.sinks = 2;
    }
    config.max_step_tokens = 8;
  };
  for (const Change& change : {Change(), windows}) {
    batches(change);
    forks(change);
  }
  removal();
  shared_tokens();
  refusals();
  faces();
  if (!on_cpu()) {
    undone_steps();
  }
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
