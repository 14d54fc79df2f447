// Tests the C++ interface of the tokenizer: text to ids and back, and errors as
// results. libetkv, another Rust library with cxx, is in the same process.

#include <filesystem>
#include <optional>

#include "examples/tokenizer/tokenizer.hpp"
#include "fixture.hpp"

namespace etkv::tests {
namespace {

using examples::check_template_variables;
using examples::Detokenizer;
using examples::Message;
using examples::Tokenizer;

std::string folder() {
  return std::filesystem::path(program_path("tiny-llama-f32"))
      .parent_path()
      .string();
}

Tokenizer tokenizer() {
  return must(Tokenizer::from_pretrained(folder()));
}

std::string decoded(Detokenizer detokenizer, const Ids& ids) {
  std::string text;
  for (const int64_t id : ids) {
    text += must(detokenizer.add_token(id));
  }
  text += must(detokenizer.finalize());
  return text;
}

void text_and_back() {
  std::optional<Tokenizer> opened = tokenizer();
  const Ids ids = must(opened->encode("na\u00efve \u20ac", false));
  Detokenizer detokenizer = opened->detokenizer();
  opened.reset(); // A detokenizer outlives its tokenizer.
  CHECK(decoded(std::move(detokenizer), ids) == "na\u00efve \u20ac");

  const Tokenizer file =
      must(Tokenizer::from_pretrained(folder() + "/tokenizer.json"));
  CHECK(must(file.encode("na\u00efve \u20ac", false)) == ids);
  CHECK(must(file.encode("", false)).empty());
  CHECK(must(file.encode(std::string_view("a\0b", 3), false)).size() == 3);

  // An incomplete character.
  Ids cut = must(file.encode("\u20ac", false));
  cut.pop_back();
  CHECK(decoded(file.detokenizer(), cut) == "\ufffd");
  CHECK(decoded(file.detokenizer(), {1 << 20}).empty());

  // Special tokens in an answer, and a second BOS.
  const Ids special = must(file.encode("<|im_end|>a", false));
  CHECK(decoded(file.detokenizer(), special) == "a");
  CHECK(
      decoded(file.detokenizer(/*skip_special_tokens=*/false), special) ==
      "<|im_end|>a");
  CHECK(!must(file.begins_with_bos("a")));
}

void conversations() {
  const Tokenizer opened = tokenizer();
  CHECK(opened.has_chat_template());
  const std::vector<Message> messages{{"system", "Be brief."}, {"user", "Hi"}};
  const Ids closed = must(opened.apply_chat_template(messages, false));
  const Ids open = must(opened.apply_chat_template(messages, true));
  CHECK(open.size() > closed.size());
  CHECK(std::equal(closed.begin(), closed.end(), open.begin()));
  CHECK_INT(opened.eos_token_ids().size(), 1);
  CHECK(
      std::count(closed.begin(), closed.end(), opened.eos_token_ids()[0]) > 0);

  // An answer keeps the ids that the model generated.
  const Ids made{300, 65, 300};
  const Ids kept = must(
      opened.apply_chat_template({{"assistant", "A", made}}, /*add=*/false));
  CHECK(
      std::search(kept.begin(), kept.end(), made.begin(), made.end()) !=
      kept.end());

  // Variables of the template.
  const char kMessages[] = R"({"messages": [{"role": "x", "content": "y"}]})";
  CHECK(
      must(opened.render_chat_template(messages, false, kMessages))
          .find("x\ny") != std::string::npos);
}

template <typename T>
std::string refusal(const Result<T>& result) {
  return result.ok() ? "" : result.error().message();
}

void errors() {
  const Tokenizer opened = tokenizer();
  CHECK(
      refusal(Tokenizer::from_pretrained("/nowhere")) ==
      "there is no tokenizer at /nowhere");
  CHECK(
      refusal(opened.encode("a\xff", false)) ==
      "the text is not valid UTF-8 at byte 1");
  CHECK(
      refusal(opened.apply_chat_template({{"\xff", "a"}}, true)) ==
      "the role is not valid UTF-8 at byte 0");
  CHECK(
      refusal(opened.apply_chat_template({{"user", "a\xff"}}, true)) ==
      "the text is not valid UTF-8 at byte 1");

  CHECK(
      refusal(opened.detokenizer().add_token(-1)) ==
      "the tokenizer cannot decode token -1: expected an id from 0 to "
      "4294967295");
  CHECK(check_template_variables("{}").ok());
  CHECK(
      refusal(check_template_variables("[]")).find("expected a JSON object") !=
      std::string::npos);

  // libetkv's bridge has separate errors: neither library affects the other.
  Module module(program_path("tiny-llama-f32"));
  LoadOptions options("no such key");
  const auto lost = load_method(module, "forward", options);
  CHECK(!lost.ok() && lost.error().status() == ETKV_ERROR_NO_CACHE);
  CHECK(!opened.encode("\xff", false).ok());
  CHECK(must(opened.encode("a", false)).size() == 1);
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  text_and_back();
  conversations();
  errors();
  return check_report();
}
