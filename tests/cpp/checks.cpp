// What `--check` of the example runners finds: an answer that is not that of plain
// decoding, or ends for no reason.

#include "examples/common/plain.hpp"
#include "fixture.hpp"

namespace etkv::tests {
namespace {

using examples::Decoding;
using examples::Stop;

examples::Model open(const std::string& name) {
  examples::ModelOptions options;
  options.model = program_path(name);
  options.raw = true;
  return must(examples::Model::open(options));
}

/// Plain decoding's answer, of `n` ids.
Decoding answer(const Ids& prompt, size_t n, int32_t window = 0) {
  On<Cache> on([&](CacheConfig& config) {
    for (auto& layer : config.layers) {
      layer.window = window;
    }
  });
  Decoding one{"the answer", prompt, static_cast<int64_t>(n)};
  one.stop = Stop::limit;
  Rows rows = on.model.at(0, prompt);
  while (one.ids.size() < n) {
    one.ids.push_back(rows.best());
    rows = on.model.at(one.position(), {one.ids.back()});
  }
  return one;
}

void right_and_wrong() {
  auto model = open("llama-f32");
  model.end_with({});
  const Decoding first = answer(text(7), 12);
  // Shares its beginning with the one before, which is not read again.
  Ids longer = text(7);
  longer.push_back(3);
  const Decoding second = answer(longer, 12);
  must(check_answers(model, {first, second, first}));

  for (const size_t at : {size_t{0}, size_t{5}, size_t{11}}) {
    Decoding wrong = first;
    wrong.ids[at] = (wrong.ids[at] + 1) % kVocabulary;
    const auto refused = check_answers(model, {second, wrong});
    CHECK_REFUSED(
        refused,
        ETKV_ERROR_INTERNAL,
        ("check: the answer to \"the answer\" parts from plain decoding at "
         "token " +
         std::to_string(at))
            .c_str());
    CHECK_HAS(refused.error().message().c_str(), "whose logit is greater by");
  }
  Decoding other_prompt = first;
  other_prompt.prompt[0] += 1;
  CHECK(!check_answers(model, {other_prompt}).ok());
}

void ends() {
  auto model = open("llama-f32");
  model.end_with({});
  Decoding one = answer(text(7), 12);
  Decoding cut = one;
  cut.ids.pop_back();
  CHECK_REFUSED(
      check_answers(model, {cut}),
      ETKV_ERROR_INTERNAL,
      "ended after 11 tokens for no reason");
  cut.stop = Stop::capacity;
  must(check_answers(model, {cut}));
  cut.stop = Stop::end;
  CHECK_REFUSED(
      check_answers(model, {cut}), ETKV_ERROR_INTERNAL, "for no reason");

  // An id that ends an answer is its last.
  model.end_with({one.ids.back()});
  REQUIRE(std::count(one.ids.begin(), one.ids.end(), one.ids.back()) == 1);
  CHECK_REFUSED(
      check_answers(model, {one}), ETKV_ERROR_INTERNAL, "for no reason");
  one.stop = Stop::end;
  must(check_answers(model, {one}));
  one.ids.push_back(1);
  CHECK_REFUSED(
      check_answers(model, {one}),
      ETKV_ERROR_INTERNAL,
      "goes on after the id that ends it, the 12. of 13");
}

/// Plain decoding on another cache, where that is what an answer was made with.
void windows() {
  auto model = open("llama-f32");
  model.end_with({});
  const Decoding one = answer(text(7), 20, /*window=*/8);
  REQUIRE(one.ids != answer(text(7), 20).ids);
  const auto window = [](CacheConfig& config) {
    for (auto& layer : config.layers) {
      layer.window = 8;
    }
  };
  must(check_answers(model, {one, one}, window));
  CHECK(!check_answers(model, {one}).ok());
}

void margins() {
  using examples::rounding_margin;
  // Wider for shorter floats, and for greater logits.
  CHECK(rounding_margin("f32", 20.0) < 1e-2);
  CHECK(rounding_margin("f32", 20.0) < rounding_margin("f16", 20.0));
  CHECK(rounding_margin("f16", 20.0) < rounding_margin("bf16", 20.0));
  CHECK(rounding_margin("f32", 10.0) < rounding_margin("f32", 20.0));
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  right_and_wrong();
  ends();
  windows();
  margins();
  return check_report();
}
