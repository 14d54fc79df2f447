// Ids drawn at random: for any proposal, each id has the probability that the
// model assigns to it.

#include <cmath>
#include <limits>
#include <map>

#include "speculative.hpp"

namespace etkv::tests {
namespace {

/// The deviation of counts from the expected ones, in standard deviations of
/// the chi-square distribution. Cells with an expected count below 5 are
/// merged.
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

// ---- Made-up distributions
// -----------------------------------------------------

/// Returns logits of a language of a few letters, in which the next letter
/// depends on the last two.
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

Distribution probabilities(const std::vector<float>& row, double temperature) {
  return must(examples::softmax(view(row), 0, temperature));
}

Ids way_to(const TokenTree& tree, int32_t node) {
  Ids ids;
  for (; node >= 0; node = tree.parents[static_cast<size_t>(node)]) {
    ids.insert(ids.begin(), tree.tokens[static_cast<size_t>(node)]);
  }
  return ids;
}

/// The choice of a tree's children.
enum class Drawn { at_random, likeliest };

/// Returns a tree of two levels with `width` children per node, from the
/// language `seed`.
TokenTree
grow(uint32_t seed, size_t width, Drawn how, double temperature, Rng& rng) {
  TokenTree tree(/*root=*/0);
  std::vector<int32_t> level = {0};
  for (int depth = 0; depth < 2; ++depth) {
    std::vector<int32_t> next;
    for (const int32_t node : level) {
      Distribution q =
          probabilities(language(seed, way_to(tree, node), 3.0F), temperature);
      if (how == Drawn::at_random) {
        tree.drawn_from[static_cast<size_t>(node)] = q;
      }
      for (size_t i = 0; i < width; ++i) {
        const int64_t token =
            how == Drawn::at_random
                ? examples::draw(q, rng)
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

/// Verifies trees of another language with `judge`. Returns the deviation of
/// the first two ids after a root from the target's distribution.
using Judge = std::function<
    VerificationResult(const TokenTree&, const LogitsView&, Sampler&)>;
double deviations(
    uint32_t seed,
    uint32_t draft_seed,
    size_t width,
    Drawn how,
    double temperature,
    const Judge& judge,
    long n = 4000) {
  Sampler sampler(temperature, /*seed=*/seed * 31 + width);
  std::map<std::pair<int64_t, int64_t>, double> found;
  for (long i = 0; i < n; ++i) {
    const auto tree = grow(draft_seed, width, how, temperature, sampler.rng);
    std::vector<float> rows;
    for (size_t node = 0; node < tree.size(); ++node) {
      const auto row =
          language(seed, way_to(tree, static_cast<int32_t>(node)), 2.0F);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    const VerificationResult verified = judge(tree, view(rows), sampler);
    Ids ids;
    for (const int32_t node : verified.accepted) {
      ids.push_back(tree.tokens[static_cast<size_t>(node)]);
    }
    ids.push_back(verified.next);
    if (ids.size() == 2) {
      // The second id comes from a step without a tree.
      ids.push_back(
          examples::draw(
              probabilities(language(seed, ids, 2.0F), temperature),
              sampler.rng));
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
  for (const Drawn how : {Drawn::at_random, Drawn::likeliest}) {
    for (const size_t width : {1, 2, 3, 6}) {
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

  // The test detects judges that are almost right. One accepts a child by its
  // probability alone. The other does not change the distribution after a
  // rejection.
  const Judge careless =
      [](const auto& tree, const auto& logits, auto& sampler) {
        const auto child = tree.children(0)[0];
        const auto p = must(examples::softmax(logits, 0, sampler.temperature));
        const int64_t token = tree.tokens[static_cast<size_t>(child)];
        VerificationResult judged{{0}, 0};
        judged.next = sampler.rng.uniform() < p[static_cast<size_t>(token)]
                          ? token
                          : examples::draw(p, sampler.rng);
        return judged;
      };
  CHECK(deviations(3, 4, 2, Drawn::at_random, 1.0, careless, 10000) > 20.0);
  const Judge forgetful =
      [](const auto& tree, const auto& logits, auto& sampler) {
        auto p = must(examples::softmax(logits, 0, sampler.temperature));
        const auto& q = tree.drawn_from[0];
        for (const int32_t child : tree.children(0)) {
          const int64_t token = tree.tokens[static_cast<size_t>(child)];
          // A mistake: after the first child, q should lack it.
          if (examples::accept(p, q, token, sampler.rng)) {
            return VerificationResult{{0}, token};
          }
        }
        return VerificationResult{{0}, examples::draw(p, sampler.rng)};
      };
  CHECK(deviations(3, 4, 3, Drawn::at_random, 1.0, forgetful, 10000) > 10.0);
}

void drawing() {
  Rng rng(1);
  const Distribution certain = {0.0F, 1.0F, 0.0F};
  for (int i = 0; i < 100; ++i) {
    CHECK_INT(examples::draw(certain, rng), 1);
  }
  Distribution p = {0.25F, 0.5F, 0.25F};
  CHECK(examples::remove(p, 1));
  CHECK(p == (Distribution{0.5F, 0.0F, 0.5F}));
  CHECK(examples::remove(p, 0));
  CHECK(p == (Distribution{0.0F, 0.0F, 1.0F}));
  CHECK(!examples::remove(p, 2));
  // The same seed gives the same numbers on every machine.
  Rng again(42);
  CHECK(again.uniform() == 0.75515553295453897);
  // With equal distributions, every id is accepted.
  for (int i = 0; i < 1000; ++i) {
    Distribution equal = {0.1F, 0.2F, 0.7F};
    const Distribution q = equal;
    CHECK(examples::accept(equal, q, examples::draw(q, rng), rng));
  }
}

/// Every caller refuses logits without a softmax, and draws nothing.
void no_numbers() {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto refused = [](const std::vector<float>& row, const char* words) {
    Sampler sampler(1.0, 7);
    CHECK_REFUSED(sampler.choose(view(row), 0), ETKV_ERROR_PROGRAM, words);
    // The row is the second one of a tree. Its node is always reached.
    TokenTree tree(0);
    tree.add(1, 0);
    tree.add(2, 1);
    std::vector<float> rows(3 * kLetters, -kInfinity);
    rows[1] = rows[2 * kLetters] = 0.0F;
    std::copy(row.begin(), row.end(), rows.begin() + kLetters);
    const auto verified = examples::verify(tree, view(rows), sampler);
    CHECK_REFUSED(
        verified, ETKV_ERROR_PROGRAM, "row 1 of the program's logits");
  };
  refused({kNan, kNan, kNan, kNan, kNan, kNan}, "row 0");
  refused({kNan, 1, 2, 3, 4, 5}, "has no softmax: logit 0 is nan");
  refused({0, 1, 2, 3, kNan, 5}, "logit 4 is nan");
  refused({0, 1, kInfinity, 3, 4, 5}, "logit 2 is inf");
  refused({kInfinity, 1, 2, 3, 4, kNan}, "logit 5 is nan");
  refused(std::vector<float>(kLetters, -kInfinity), "logit 0 is -inf");
  // A masked id is never drawn.
  const std::vector<float> masked = {-kInfinity, 0, 0, -kInfinity, 0, 0};
  Sampler sampler(1.0, 7);
  for (int i = 0; i < 200; ++i) {
    const int64_t id = must(sampler.choose(view(masked), 0));
    CHECK(id != 0 && id != 3);
  }
}

// ---- On programs ----------------------------------------------------------------

/// Counts or probabilities of each first id and each pair of ids.
struct Pairs {
  std::vector<double> first = std::vector<double>(kVocabulary);
  std::vector<std::vector<double>> both = {kVocabulary, first};
};

/// Returns the target's probabilities, from its logits.
Pairs probabilities_after(const Ids& before, double temperature) {
  Bound bound("tiny-llama-f32", 64);
  const auto distribution = [&](int64_t position, const Ids& ids) {
    const Rows rows = bound.at(position, ids).last();
    return must(
        examples::softmax(
            {rows.values.data(), ScalarType::Float, 1, rows.vocabulary},
            0,
            temperature));
  };
  Pairs p;
  const auto n = static_cast<int64_t>(before.size());
  const auto first = distribution(0, before);
  std::copy(first.begin(), first.end(), p.first.begin());
  for (size_t a = 0; a < p.both.size(); ++a) {
    must(bound.cache().rewind(static_cast<int32_t>(n)));
    const auto second = distribution(n, {static_cast<int64_t>(a)});
    for (size_t b = 0; b < second.size(); ++b) {
      p.both[a][b] = p.first[a] * static_cast<double>(second[b]);
    }
  }
  return p;
}

/// Returns the deviation of `found` from `n` times `p`, for the first id and
/// for pairs.
std::pair<ChiSquare, ChiSquare>
compare(const Pairs& p, const Pairs& found, double n) {
  std::pair<ChiSquare, ChiSquare> tests;
  for (size_t a = 0; a < p.first.size(); ++a) {
    tests.first.add(n * p.first[a], found.first[a]);
    for (size_t b = 0; b < p.first.size(); ++b) {
      tests.second.add(n * p.both[a][b], found.both[a][b]);
    }
  }
  return tests;
}

/// The first two ids have the distribution of the target's logits.
void same_distribution() {
  const double temperature = 0.5;
  constexpr long kSamples = 1000;
  const Ids before = prompt();
  const Pairs p = probabilities_after(before, temperature);

  // There are enough samples to detect a temperature that is a fifth too high:
  // its mean deviation exceeds the limit, and noise only adds to the deviation.
  Pairs other = probabilities_after(before, 1.2 * temperature);
  for (size_t a = 0; a < other.first.size(); ++a) {
    other.first[a] *= kSamples;
    for (double& both : other.both[a]) {
      both *= kSamples;
    }
  }
  auto power = compare(p, other, kSamples);
  const double in_one = power.first.deviations();
  const double in_two = power.second.deviations();
  std::printf(
      "a temperature of %.2f: %.2f deviations for one id, %.2f for two\n",
      1.2 * temperature,
      in_one,
      in_two);
  CHECK(in_one > 5.0 && in_two > 5.0);

  struct Kind {
    const char* draft;
    int64_t depth;
    int64_t width;
  };
  Target target;
  for (const Kind kind :
       {Kind{"tiny-qwen3-f32", 2, 3},
        Kind{"tiny-llama-f32", 2, 4},
        Kind{"ngram", 3, 2}}) {
    const auto proposer = draft(kind.draft, target);
    examples::Speculator speculator(
        target.model,
        target.cache(),
        *proposer,
        {{}, kind.depth, kind.width},
        Sampler(temperature, 7));
    must(target.cache().clear());
    must(target.model.program().step_at(before.data(), 0, before.size() - 1));
    Pairs found;
    for (long i = 0; i < kSamples; ++i) {
      Ids ids = before;
      while (ids.size() < before.size() + 2) {
        const auto next =
            must(speculator.next(ids, before.size() + 2 - ids.size()));
        ids.insert(ids.end(), next.begin(), next.end());
      }
      const auto a = static_cast<size_t>(ids[before.size()]);
      const auto b = static_cast<size_t>(ids[before.size() + 1]);
      found.first[a] += 1.0;
      found.both[a][b] += 1.0;
      must(target.cache().rewind(static_cast<int32_t>(before.size()) - 1));
    }
    auto [one, two] = compare(p, found, kSamples);
    const double of_one = one.deviations();
    const double of_two = two.deviations();
    const auto took = speculator.take_statistics();
    std::printf(
        "%s, depth %lld, width %lld: %.2f deviations in %ld cells for one id, "
        "%.2f in %ld for two; %.2f draft tokens accepted a step\n",
        kind.draft,
        static_cast<long long>(kind.depth),
        static_cast<long long>(kind.width),
        of_one,
        one.cells(),
        of_two,
        two.cells(),
        static_cast<double>(took.accepted) / static_cast<double>(took.steps));
    CHECK(one.cells() > 15 && two.cells() > 15);
    CHECK(std::abs(of_one) < 5.0);
    CHECK(std::abs(of_two) < 5.0);
  }
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  drawing();
  no_numbers();
  sampling_keeps_the_distribution();
  same_distribution();
  return check_report();
}
