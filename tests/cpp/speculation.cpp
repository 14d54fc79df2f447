// Guesses and their verification: without a model where distributions and texts
// can be made up, and on tiny programs, where every answer has to be that of plain
// decoding.

#include <cmath>
#include <map>

#include "examples/common/generator.hpp"
#include "examples/common/model.hpp"
#include "examples/speculation/model_draft.hpp"
#include "examples/speculation/ngram.hpp"
#include "examples/speculation/speculator.hpp"
#include "fixture.hpp"

namespace etkv::tests {
namespace {

using examples::Chance;
using examples::Costs;
using examples::Distribution;
using examples::LogitsView;
using examples::NgramDraft;
using examples::Sampler;
using examples::TokenTree;
using examples::TreeShape;
using examples::Tuner;
using examples::Verdict;

// ---- Distributions, made up -----------------------------------------------------

/// How far counts are from what was expected, in standard deviations of the
/// chi-square distribution. Cells that expect less than 5 are taken as one.
class ChiSquare {
 public:
  void add(double expected, double found) {
    if (expected < 5.0) {
      rare_expected_ += expected;
      rare_found_ += found;
    } else {
      cell(expected, found);
    }
  }
  double deviations() {
    if (rare_expected_ >= 5.0) {
      cell(rare_expected_, rare_found_);
      rare_expected_ = rare_found_ = 0.0;
    }
    const double freedom = static_cast<double>(cells_) - 1.0;
    return (sum_ - freedom) / std::sqrt(2.0 * freedom);
  }
  long cells() const {
    return cells_;
  }

 private:
  void cell(double expected, double found) {
    sum_ += (found - expected) * (found - expected) / expected;
    ++cells_;
  }
  double sum_ = 0.0;
  double rare_expected_ = 0.0;
  double rare_found_ = 0.0;
  long cells_ = 0;
};

constexpr int64_t kLetters = 6;

/// Logits of a language of a few letters: what follows a text hangs on its last
/// two of them.
std::vector<float> language(uint32_t seed, const Ids& text, float sharpness) {
  std::vector<float> logits(kLetters);
  const size_t n = text.size();
  const auto last = static_cast<uint32_t>(n > 0 ? text[n - 1] + 1 : 0);
  const auto before = static_cast<uint32_t>(n > 1 ? text[n - 2] + 1 : 0);
  uint32_t bits = seed + 7 * last + 91 * before;
  for (float& logit : logits) {
    bits = bits * 1664525U + 1013904223U;
    logit = sharpness * static_cast<float>(bits >> 16) / 65536.0F;
  }
  return logits;
}

LogitsView view(const std::vector<float>& rows) {
  return {
      rows.data(),
      ScalarType::Float,
      static_cast<int64_t>(rows.size()) / kLetters,
      kLetters};
}

Distribution probabilities(const std::vector<float>& row, double temperature) {
  return examples::softmax(view(row), 0, temperature);
}

Ids way_to(const TokenTree& tree, int32_t node) {
  Ids ids;
  for (; node >= 0; node = tree.parents[static_cast<size_t>(node)]) {
    ids.insert(ids.begin(), tree.tokens[static_cast<size_t>(node)]);
  }
  return ids;
}

/// How a tree's children come about.
enum class Drawn { by_chance, likeliest };

/// A tree of `width` children a node in two levels, by the language `seed`.
TokenTree grow(
    uint32_t seed,
    size_t width,
    Drawn how,
    double temperature,
    Chance& chance) {
  TokenTree tree(/*root=*/0);
  std::vector<int32_t> level = {0};
  for (int depth = 0; depth < 2; ++depth) {
    std::vector<int32_t> next;
    for (const int32_t node : level) {
      Distribution q =
          probabilities(language(seed, way_to(tree, node), 3.0F), temperature);
      if (how == Drawn::by_chance) {
        tree.drawn_from[static_cast<size_t>(node)] = q;
      }
      for (size_t i = 0; i < width; ++i) {
        const int64_t token =
            how == Drawn::by_chance
                ? examples::draw(q, chance)
                : std::max_element(q.begin(), q.end()) - q.begin();
        next.push_back(tree.add(token, node));
        if (!examples::remove(q, token)) {
          break;
        }
      }
    }
    level = std::move(next);
  }
  return tree;
}

/// The first two ids behind a root that the target of `seed` gives to trees of
/// another language, against what it gives alone. `judge` verifies.
using Judge =
    std::function<Verdict(const TokenTree&, const LogitsView&, Sampler&)>;
double deviations(
    uint32_t seed,
    uint32_t draft_seed,
    size_t width,
    Drawn how,
    double temperature,
    const Judge& judge,
    long n = 20000) {
  Sampler sampler(temperature, /*seed=*/seed * 31 + width);
  std::map<std::pair<int64_t, int64_t>, double> found;
  for (long i = 0; i < n; ++i) {
    const auto tree = grow(draft_seed, width, how, temperature, sampler.chance);
    std::vector<float> rows;
    for (size_t node = 0; node < tree.size(); ++node) {
      const auto row =
          language(seed, way_to(tree, static_cast<int32_t>(node)), 2.0F);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    const Verdict verdict = judge(tree, view(rows), sampler);
    Ids ids;
    for (const int32_t node : verdict.accepted) {
      ids.push_back(tree.tokens[static_cast<size_t>(node)]);
    }
    ids.push_back(verdict.next);
    if (ids.size() == 2) {
      // The second comes of a step without a tree.
      ids.push_back(
          examples::draw(
              probabilities(language(seed, ids, 2.0F), temperature),
              sampler.chance));
    }
    found[{ids[1], ids[2]}] += 1.0;
  }
  ChiSquare test;
  const auto first = probabilities(language(seed, {0}, 2.0F), temperature);
  for (int64_t a = 0; a < kLetters; ++a) {
    const auto second =
        probabilities(language(seed, {0, a}, 2.0F), temperature);
    for (int64_t b = 0; b < kLetters; ++b) {
      test.add(
          static_cast<double>(n) * first[static_cast<size_t>(a)] *
              second[static_cast<size_t>(b)],
          found[{a, b}]);
    }
  }
  return test.deviations();
}

void sampling_keeps_the_distribution() {
  const Judge verified =
      [](const auto& tree, const auto& logits, auto& sampler) {
        return must(examples::verify(tree, logits, sampler));
      };
  double most = 0.0;
  for (const Drawn how : {Drawn::by_chance, Drawn::likeliest}) {
    for (size_t width = 1; width <= 6; ++width) {
      for (const double temperature : {0.5, 1.0}) {
        for (const uint32_t draft : {3U, 4U}) {
          const double apart =
              deviations(3, draft, width, how, temperature, verified);
          most = std::max(most, apart);
          CHECK(std::abs(apart) < 5.0);
        }
      }
    }
  }
  std::printf("made-up languages: at most %.2f deviations\n", most);

  // What is almost right is found out: whoever takes a child by its probability
  // alone, or forgets what a refusal says of the rest.
  const Judge careless =
      [](const auto& tree, const auto& logits, auto& sampler) {
        const auto child = tree.children(0)[0];
        const auto p = examples::softmax(logits, 0, sampler.temperature);
        const int64_t token = tree.tokens[static_cast<size_t>(child)];
        Verdict verdict{{0}, 0};
        verdict.next = sampler.chance.uniform() < p[static_cast<size_t>(token)]
                           ? token
                           : examples::draw(p, sampler.chance);
        return verdict;
      };
  CHECK(deviations(3, 4, 2, Drawn::by_chance, 1.0, careless) > 20.0);
  const Judge forgetful =
      [](const auto& tree, const auto& logits, auto& sampler) {
        auto p = examples::softmax(logits, 0, sampler.temperature);
        const auto& q = tree.drawn_from[0];
        for (const int32_t child : tree.children(0)) {
          const int64_t token = tree.tokens[static_cast<size_t>(child)];
          // The second child was not drawn from all of q.
          if (examples::accept(p, q, token, sampler.chance)) {
            return Verdict{{0}, token};
          }
        }
        return Verdict{{0}, examples::draw(p, sampler.chance)};
      };
  CHECK(deviations(3, 4, 3, Drawn::by_chance, 1.0, forgetful) > 10.0);
}

void drawing() {
  Chance chance(1);
  const Distribution certain = {0.0F, 1.0F, 0.0F};
  for (int i = 0; i < 100; ++i) {
    CHECK_INT(examples::draw(certain, chance), 1);
  }
  Distribution p = {0.25F, 0.5F, 0.25F};
  CHECK(examples::remove(p, 1));
  CHECK(p == (Distribution{0.5F, 0.0F, 0.5F}));
  CHECK(examples::remove(p, 0));
  CHECK(p == (Distribution{0.0F, 0.0F, 1.0F}));
  CHECK(!examples::remove(p, 2));
  // The same seed, the same numbers, on every machine.
  Chance again(42);
  CHECK(again.uniform() == 0.75515553295453897);
  // Equal distributions: always taken.
  for (int i = 0; i < 1000; ++i) {
    Distribution equal = {0.1F, 0.2F, 0.7F};
    const Distribution q = equal;
    CHECK(examples::accept(equal, q, examples::draw(q, chance), chance));
  }
}

// ---- Greedy verification, made up ---------------------------------------------------

void greedy_verification() {
  TokenTree tree(5);
  const int32_t a = tree.add(1, 0);
  const int32_t b = tree.add(2, 0);
  const int32_t c = tree.add(3, b);
  tree.add(4, a);
  CHECK(tree.positions(10) == (Ids{10, 11, 11, 12, 12}));
  CHECK(tree.children(0) == (std::vector<int32_t>{a, b}));
  // What each node makes likeliest.
  const auto verdict = [&](const Ids& best) {
    std::vector<float> rows(best.size() * kLetters, 0.0F);
    for (size_t i = 0; i < best.size(); ++i) {
      rows[i * kLetters + static_cast<size_t>(best[i])] = 1.0F;
    }
    Sampler sampler;
    return must(examples::verify(tree, view(rows), sampler));
  };
  const auto accepted = [&](const Ids& best) { return verdict(best).accepted; };
  CHECK(accepted({2, 0, 3, 0, 0}) == (std::vector<int32_t>{0, b, c}));
  CHECK_INT(verdict({2, 0, 3, 4, 0}).next, 4);
  CHECK(accepted({2, 4, 1, 0, 0}) == (std::vector<int32_t>{0, b}));
  CHECK_INT(verdict({2, 4, 1, 0, 0}).next, 1);
  CHECK(accepted({3, 4, 3, 0, 0}) == (std::vector<int32_t>{0}));
  CHECK_INT(verdict({3, 4, 3, 0, 0}).next, 3);
}

// ---- Guesses from the text ----------------------------------------------------------

void ngrams() {
  const auto grow = [](const Ids& text, int64_t depth, int64_t width) {
    return NgramDraft::grow(text, {depth, width, 64});
  };
  // 7 8 was followed by 9 1; one id alone is no likeness.
  CHECK(grow({7, 8, 9, 1, 7, 8}, 2, 1).tokens == (Ids{8, 9, 1}));
  CHECK(grow({7, 8, 9, 1, 8}, 2, 1).tokens == (Ids{8}));
  CHECK(grow({7}, 3, 3).tokens == (Ids{7}));
  CHECK(grow({7, 8, 9, 1, 7, 8}, 0, 1).tokens == (Ids{8}));
  // Of two continuations the later one first, and both where there is room.
  const Ids twice = {7, 8, 1, 0, 7, 8, 2, 0, 7, 8};
  CHECK(grow(twice, 1, 1).tokens == (Ids{8, 2}));
  const auto both = grow(twice, 2, 2);
  CHECK(both.tokens == (Ids{8, 2, 1, 0, 0}));
  CHECK(both.parents == (std::vector<int32_t>{-1, 0, 0, 1, 2}));
  // A longer likeness outweighs a later one.
  CHECK(grow({5, 7, 8, 1, 6, 7, 8, 2, 5, 7, 8}, 1, 1).tokens == (Ids{8, 1}));
  // What repeats goes on past the end.
  CHECK(grow({1, 2, 3, 1, 2, 3, 1, 2}, 5, 1).tokens == (Ids{2, 3, 1, 2, 3, 1}));
  // No more nodes than asked for.
  CHECK_INT(NgramDraft::grow(twice, {3, 2, 3}).size(), 3);
}

/// Text with a period is guessed as deep as is asked for.
void repetition() {
  const Ids period = {3, 1, 4, 1, 5};
  Ids text(12);
  for (size_t i = 0; i < text.size(); ++i) {
    text[i] = period[i % period.size()];
  }
  size_t accepted = 0;
  constexpr size_t kSteps = 20;
  for (size_t step = 0; step < kSteps; ++step) {
    const auto tree = NgramDraft::grow(text, {4, 2, 64});
    std::vector<float> rows;
    for (const int32_t depth : tree.depths) {
      std::vector<float> row(kLetters, 0.0F);
      const size_t at = text.size() + static_cast<size_t>(depth);
      row[static_cast<size_t>(period[at % period.size()])] = 1.0F;
      rows.insert(rows.end(), row.begin(), row.end());
    }
    Sampler sampler;
    const auto verdict = must(examples::verify(tree, view(rows), sampler));
    accepted += verdict.accepted.size() - 1;
    for (size_t i = 1; i < verdict.accepted.size(); ++i) {
      text.push_back(tree.tokens[static_cast<size_t>(verdict.accepted[i])]);
    }
    text.push_back(verdict.next);
  }
  CHECK(accepted == 4 * kSteps);
}

// ---- Tuning -------------------------------------------------------------------------

void costs() {
  Costs costs;
  CHECK(costs.empty());
  CHECK(costs.at(5) == 0.0);
  costs.add(1, 2.0);
  CHECK(costs.at(9) == 2.0);
  costs.add(5, 4.0);
  CHECK(costs.at(1) == 2.0);
  CHECK(costs.at(3) == 3.0);
  CHECK(costs.at(9) == 6.0);
  costs.add(5, 8.0);
  CHECK(costs.at(5) == 5.0);
  // More tokens never take less.
  costs.add(9, 1.0);
  CHECK(costs.at(9) == 5.0);
}

/// Lets a tuner have its way in a world where a forward of n tokens takes
/// `fixed + each * n`, and candidates of each rank are right so often; returns the
/// shape that it ends with.
TreeShape settle(
    double fixed,
    double each,
    const std::vector<double>& ranks,
    double draft = 0.0,
    std::optional<int64_t> depth = std::nullopt) {
  Tuner tuner(depth, std::nullopt);
  Chance chance(1);
  const auto seconds = [&](int64_t levels, int64_t) {
    return draft * static_cast<double>(levels);
  };
  std::map<std::pair<int64_t, int64_t>, int> chosen;
  for (int step = 0; step < 600; ++step) {
    const auto shape = tuner.next(seconds);
    TokenTree tree(0);
    Verdict verdict{{0}, 0};
    std::vector<int32_t> level = {0};
    for (int64_t i = 0; i < shape.depth; ++i) {
      // All candidates hang on the first of the level before.
      const int32_t parent = level[0];
      level.clear();
      double at = chance.uniform();
      for (int64_t rank = 0; rank < shape.width; ++rank) {
        const int32_t node = tree.add(rank, parent);
        level.push_back(node);
        const double right =
            rank < static_cast<int64_t>(ranks.size()) ? ranks[rank] : 0.0;
        if (at >= 0.0 && at < right && verdict.accepted.back() == parent) {
          verdict.accepted.push_back(node);
        }
        at -= right;
      }
      // The accepted one is the one that goes on.
      if (verdict.accepted.back() >= level[0]) {
        level[0] = verdict.accepted.back();
      }
    }
    tuner.observe(
        shape, tree, verdict, fixed + each * static_cast<double>(tree.size()));
    if (step >= 300) {
      ++chosen[{shape.depth, shape.width}];
    }
  }
  const auto most = std::max_element(
      chosen.begin(), chosen.end(), [](const auto& a, const auto& b) {
        return a.second < b.second;
      });
  return {most->first.first, most->first.second, 0};
}

void tuning() {
  // Verification costs next to nothing more: as deep and wide as may be.
  auto shape = settle(1.0, 0.001, {0.6, 0.3});
  CHECK(shape.depth >= 5 && shape.width >= 2);
  // Every token costs the same: nothing pays.
  shape = settle(0.0, 1.0, {0.6, 0.1});
  CHECK_INT(shape.depth, 0);
  // Guesses are never right.
  shape = settle(1.0, 0.1, {});
  CHECK_INT(shape.depth, 0);
  // The second guess is never right, and costs.
  shape = settle(1.0, 0.1, {0.8});
  CHECK(shape.depth >= 2 && shape.width == 1);
  // The draft costs as much as the model.
  shape = settle(1.0, 0.1, {0.5}, /*draft=*/1.0);
  CHECK_INT(shape.depth, 0);
  // What is given stays.
  shape = settle(0.0, 1.0, {0.6}, 0.0, /*depth=*/4);
  CHECK_INT(shape.depth, 4);
  Tuner fixed(2, 3);
  const auto both = fixed.next([](int64_t, int64_t) { return 0.0; });
  CHECK(both.depth == 2 && both.width == 3);
}

// ---- On programs ----------------------------------------------------------------------

examples::Model open(const std::string& name) {
  examples::ModelOptions options;
  options.model = program_path(name);
  options.raw = true;
  return must(examples::Model::open(options));
}

using TreeSession = CacheSession<TreeCache>;

/// A target on a tree cache, ready for steps.
struct Target {
  explicit Target(
      const std::string& name = "llama-f32",
      int32_t capacity = 200,
      const std::string& format = "f32")
      : model(open(name)), session(make(model, capacity, format)) {
    must(model.program().load(session.key(), Logits::all));
  }
  static TreeSession
  make(examples::Model& model, int32_t capacity, const std::string& format) {
    auto config = make_config(model.program().params(), capacity, format, 4);
    return must(make_tree_session(kMLXBackend, config));
  }
  TreeCache& cache() {
    return session.cache();
  }

  examples::Model model;
  TreeSession session;
};

std::unique_ptr<examples::Draft>
draft(const std::string& name, Target& target, int32_t capacity = 200) {
  if (name == "ngram") {
    return std::make_unique<NgramDraft>();
  }
  return must(
      examples::ModelDraft::open(
          program_path(name),
          {target.model.program().vocabulary(), capacity, std::nullopt}));
}

/// A prompt with something to guess from in it.
Ids prompt() {
  Ids ids = text(9, 3);
  const Ids again = ids;
  ids.insert(ids.end(), again.begin(), again.end());
  return ids;
}

Ids plain(const std::string& name, const Ids& prompt, size_t n) {
  On<Cache> on([](CacheConfig& config) { config.capacity = 200; }, name);
  Ids wanted;
  Rows rows = on.model.at(0, prompt);
  while (wanted.size() < n) {
    wanted.push_back(rows.best());
    rows = on.model.at(
        static_cast<int64_t>(prompt.size() + wanted.size()) - 1,
        {wanted.back()});
  }
  return wanted;
}

/// Greedily: the ids of plain decoding, for every draft and shape.
void same_ids() {
  const size_t n = 24;
  const Ids wanted = plain("llama-f32", prompt(), n);
  Target target;
  std::map<std::string, int64_t> fewest;
  for (const char* name : {"ngram", "llama-f32", "qwen3-f32"}) {
    const auto guesses = draft(name, target);
    for (int64_t depth = 0; depth <= 6; ++depth) {
      for (int64_t width = 1; width <= (depth == 0 ? 1 : 8); ++width) {
        must(target.cache().clear());
        examples::Speculator speculator(
            target.model, target.cache(), *guesses, {{}, depth, width});
        examples::Generator generator(
            target.model.program(), target.cache(), {}, &speculator);
        const auto answer = must(generator.answer(
            prompt(), static_cast<int64_t>(n), examples::Listener()));
        CHECK(answer.ids == wanted);
        CHECK_INT(target.cache().length(), prompt().size() + wanted.size() - 1);
        const auto took = speculator.take_statistics();
        CHECK_INT(took.ids, n - 1);
        if (std::string(name) == "llama-f32") {
          // Its own guesses are all right.
          CHECK_INT(
              took.steps, (static_cast<int64_t>(n) - 1 + depth) / (depth + 1));
        }
        auto& least = fewest.try_emplace(name, took.steps).first->second;
        least = std::min(least, took.steps);
      }
    }
  }
  for (const auto& [name, steps] : fewest) {
    std::printf(
        "%s: %zu ids in %lld steps at best\n",
        name.c_str(),
        n - 1,
        static_cast<long long>(steps));
  }
}

/// The distribution of the first two ids, by the target's own logits.
void same_distribution() {
  const double temperature = 0.5;
  const Ids before = prompt();
  Target target;
  Bound bound("llama-f32", 64);
  const auto distribution = [&](const Ids& ids) {
    const Rows rows = bound.at(0, ids).last();
    return examples::softmax(
        {rows.values.data(), ScalarType::Float, 1, rows.vocabulary},
        0,
        temperature);
  };
  const auto first = distribution(before);
  std::vector<Distribution> second;
  for (int64_t id = 0; id < kVocabulary; ++id) {
    Ids ids = before;
    ids.push_back(id);
    second.push_back(distribution(ids));
  }

  struct Kind {
    const char* draft;
    int64_t depth;
    int64_t width;
  };
  for (const Kind kind :
       {Kind{"llama-f32", 2, 1},
        Kind{"qwen3-f32", 2, 3},
        Kind{"llama-f32", 2, 4},
        Kind{"ngram", 3, 2}}) {
    const auto guesses = draft(kind.draft, target);
    examples::Speculator speculator(
        target.model,
        target.cache(),
        *guesses,
        {{}, kind.depth, kind.width},
        Sampler(temperature, 7));
    must(target.cache().clear());
    must(target.model.program().step_at(before.data(), 0, before.size() - 1));
    constexpr long kSamples = 2000;
    std::vector<double> ones(kVocabulary);
    std::map<std::pair<int64_t, int64_t>, double> twos;
    for (long i = 0; i < kSamples; ++i) {
      Ids ids = before;
      while (ids.size() < before.size() + 2) {
        const auto next =
            must(speculator.next(ids, before.size() + 2 - ids.size()));
        ids.insert(ids.end(), next.begin(), next.end());
      }
      const int64_t a = ids[before.size()];
      const int64_t b = ids[before.size() + 1];
      ones[static_cast<size_t>(a)] += 1.0;
      twos[{a, b}] += 1.0;
      must(target.cache().rewind(static_cast<int32_t>(before.size()) - 1));
    }
    ChiSquare one;
    ChiSquare two;
    for (int64_t a = 0; a < kVocabulary; ++a) {
      const double pa = first[static_cast<size_t>(a)];
      one.add(kSamples * pa, ones[static_cast<size_t>(a)]);
      for (int64_t b = 0; b < kVocabulary; ++b) {
        const auto& pb = second[static_cast<size_t>(a)];
        two.add(kSamples * pa * pb[static_cast<size_t>(b)], twos[{a, b}]);
      }
    }
    const double of_one = one.deviations();
    const double of_two = two.deviations();
    const auto took = speculator.take_statistics();
    std::printf(
        "%s, depth %lld, width %lld: %.2f deviations in %ld cells for one id, "
        "%.2f in %ld for two; %.2f guesses accepted a step\n",
        kind.draft,
        static_cast<long long>(kind.depth),
        static_cast<long long>(kind.width),
        of_one,
        one.cells(),
        of_two,
        two.cells(),
        static_cast<double>(took.accepted) / static_cast<double>(took.steps));
    CHECK(one.cells() > 20 && two.cells() > 20);
    CHECK(std::abs(of_one) < 5.0);
    CHECK(std::abs(of_two) < 5.0);
  }
}

/// A full cache ends the answer; a rewind lets it go on, to the same ids.
void at_capacity() {
  const Ids wanted = plain("llama-f32", prompt(), 40);
  for (const char* name : {"ngram", "llama-f32"}) {
    Target target("llama-f32", /*capacity=*/40);
    const auto guesses = draft(name, target, /*capacity=*/40);
    examples::Speculator speculator(
        target.model, target.cache(), *guesses, {{}, 5, 2});
    examples::Generator generator(
        target.model.program(), target.cache(), {}, &speculator);
    const auto full =
        must(generator.answer(prompt(), 40, examples::Listener()));
    CHECK(full.stop == examples::Stop::capacity);
    CHECK_INT(full.ids.size(), 40 - prompt().size() + 1);
    CHECK(full.ids == slice(wanted, 0, full.ids.size()));
    CHECK_INT(target.cache().length(), 40);
    must(generator.rewind(prompt().size()));
    const auto again =
        must(generator.answer(prompt(), 10, examples::Listener()));
    CHECK(again.ids == slice(wanted, 0, 10));
    CHECK_INT(again.reused_tokens, prompt().size() - 1);
  }
  // A draft that has less room than the target guesses as long as it can.
  Target target;
  const auto guesses = draft("llama-f32", target, /*capacity=*/30);
  examples::Speculator speculator(
      target.model, target.cache(), *guesses, {{}, 3, 2});
  examples::Generator generator(
      target.model.program(), target.cache(), {}, &speculator);
  CHECK(
      must(generator.answer(prompt(), 40, examples::Listener())).ids == wanted);
}

/// An id that ends an answer is its last, wherever in a tree it was.
void ends_within_a_tree() {
  const Ids wanted = plain("llama-f32", prompt(), 24);
  Target target;
  const auto guesses = draft("llama-f32", target);
  for (size_t end = 0; end < 8; ++end) {
    if (std::find(
            wanted.begin(),
            wanted.begin() + static_cast<long>(end),
            wanted[end]) != wanted.begin() + static_cast<long>(end)) {
      continue;
    }
    must(target.cache().clear());
    target.model.end_with({wanted[end]});
    examples::Speculator speculator(
        target.model, target.cache(), *guesses, {{}, 6, 2});
    examples::Generator generator(
        target.model.program(),
        target.cache(),
        target.model.end_ids(),
        &speculator);
    const auto answer =
        must(generator.answer(prompt(), 24, examples::Listener()));
    CHECK(answer.stop == examples::Stop::end);
    CHECK(answer.ids == slice(wanted, 0, end + 1));
    CHECK_INT(target.cache().length(), prompt().size() + end);
    CHECK_INT(must(target.cache().tree_len()), 0);
  }
}

void refusals() {
  Target target;
  CHECK_REFUSED(
      examples::ModelDraft::open(program_path("llama-f32"), {1000, 64, {}}),
      ETKV_ERROR_PROGRAM,
      "a vocabulary of 320 ids, and the model one of 1000");
  CHECK_REFUSED(
      examples::ModelDraft::open("nowhere.pte", {320, 64, {}}),
      ETKV_ERROR_INVALID_ARGUMENT,
      "nowhere.pte");
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  drawing();
  sampling_keeps_the_distribution();
  greedy_verification();
  ngrams();
  repetition();
  costs();
  tuning();
  same_ids();
  same_distribution();
  at_capacity();
  ends_within_a_tree();
  refusals();
  return check_report();
}
