#include "examples/common/model.hpp"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <utility>

#include "examples/common/console.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

/// The path that `make model` writes.
constexpr char kDefaultModel[] = "build/models/smollm2-135m/model.pte";

Result<std::string> path_of(const ModelOptions& options) {
  if (options.model) {
    return *options.model;
  }
  if (!std::filesystem::exists(kDefaultModel)) {
    return refuse(
        std::string("there is no model at ") + kDefaultModel +
        ": `make model` writes it there, or --model names another");
  }
  return std::string(kDefaultModel);
}

} // namespace

void add_model_arguments(Arguments& arguments, ModelOptions& options) {
  arguments.text(
      "--model",
      "FILE",
      "the program (.pte) to run; by default the one that\n"
      "`make model` writes",
      &options.model);
  arguments.text(
      "--tokenizer",
      "FILE",
      "its tokenizer.json, or the folder of that file;\n"
      "by default tokenizer.json next to the model",
      &options.tokenizer);
  arguments.integer(
      "--capacity",
      "N",
      "maximum positions of the cache; by default the\n"
      "number that the model was exported for",
      1,
      std::numeric_limits<int32_t>::max(),
      &options.capacity);
  add_format_argument(arguments, &options.kv_format);
  arguments.flag(
      "--raw",
      "use texts as they are, without the chat template",
      &options.raw);
  arguments.text(
      "--chat-template-kwargs",
      "JSON",
      "more variables of the chat template, as an object:\n"
      "{\"tools\": […], \"enable_thinking\": false}",
      &options.template_variables);
  arguments.flag(
      "--show-special",
      "write the special tokens of answers, such as those\n"
      "of tool calls",
      &options.show_special);
}

void add_format_argument(
    Arguments& arguments,
    std::optional<std::string>* format) {
  arguments.text(
      "--kv-format",
      "NAME",
      "how keys and values are stored: f32, f16, bf16,\n"
      "affine<bits>g<group>, mxfp8, mxfp4, nvfp4, row-int4\n"
      "or row-fp4; by default as the model computes",
      format);
  arguments.alias("--kv-dtype", "--kv-format");
}

Result<void> check_format(
    const std::optional<std::string>& format,
    const std::string& option) {
  if (!format) {
    return {};
  }
  // The size is a multiple of every format's group, so only the name is
  // checked.
  constexpr int32_t kHeadDim = 128;
  uint64_t bytes = 0;
  etkv_error* error = nullptr;
  const etkv_status status =
      etkv_format_row_bytes(format->c_str(), kHeadDim, &bytes, &error);
  if (status != ETKV_OK) {
    return refuse(option + ": " + Error::adopt(status, error).message());
  }
  return {};
}

Result<Model> Model::open(const ModelOptions& options, GraphCache graph_cache) {
  ASSIGN_OR_RETURN(const std::string path, path_of(options));
  ASSIGN_OR_RETURN(auto program, Program::open(path, graph_cache));
  if (program.draft_tap()) {
    return refuse(path + " is a draft of a model: give it with --draft");
  }
  // 0 if the program does not report it.
  const int32_t most = program.params().max_context_length;
  if (most == 0 && !options.capacity) {
    return refuse(
        path +
        " does not report the context length that it was exported for: "
        "set the maximum positions of the cache with --capacity");
  }
  const int64_t capacity = options.capacity.value_or(most);
  if (most > 0 && capacity > most) {
    return refuse(
        "--capacity " + std::to_string(capacity) + " is above " +
        std::to_string(most) + ", the context length that " + path +
        " was exported for");
  }
  const std::string tokenizer_path = options.tokenizer.value_or(
      std::filesystem::path(path).replace_filename("tokenizer.json").string());
  ASSIGN_OR_RETURN(auto tokenizer, Tokenizer::from_pretrained(tokenizer_path));
  if (!options.raw && !tokenizer.has_chat_template()) {
    return refuse(
        "there is no chat template next to " + tokenizer_path +
        "; --raw uses the prompt as it is");
  }
  if (options.template_variables) {
    if (options.raw) {
      return refuse(
          "--chat-template-kwargs does not go with --raw, which uses no chat "
          "template");
    }
    // Report an error in the variables before the weights are loaded.
    if (auto read = check_template_variables(*options.template_variables);
        !read.ok()) {
      return refuse("--chat-template-kwargs: " + read.error().message());
    }
  }
  Model model(path, std::move(program), std::move(tokenizer));
  if (model.program_.eos_token_ids()) {
    model.eos_token_ids_ = *model.program_.eos_token_ids();
  } else {
    model.eos_token_ids_ = model.tokenizer_.eos_token_ids();
  }
  model.format_ = options.kv_format.value_or(model.program_.native_format());
  model.capacity_ = static_cast<int32_t>(capacity);
  model.template_variables_ = options.template_variables.value_or("");
  model.raw_ = options.raw;
  model.show_special_ = options.show_special;
  return model;
}

Result<std::vector<int64_t>> Model::encode(
    const std::vector<Message>& messages) const {
  if (!raw_) {
    return tokenizer_.apply_chat_template(
        messages, /*add_generation_prompt=*/true, template_variables_);
  }
  std::string all;
  for (const auto& message : messages) {
    all += (all.empty() ? "" : "\n") + message.content;
  }
  return encode_text(all);
}

Result<std::vector<int64_t>> Model::encode_text(const std::string& text) const {
  ASSIGN_OR_RETURN(const bool has_bos, tokenizer_.begins_with_bos(text));
  if (has_bos) {
    say("the text begins with the tokenizer's first token (BOS), which is not "
        "added again");
  }
  return tokenizer_.encode(text, /*add_special_tokens=*/true);
}

std::vector<int64_t> Model::without_eos(std::vector<int64_t> ids) const {
  if (!ids.empty() && ends(ids.back())) {
    ids.pop_back();
  }
  return ids;
}

Result<std::string> Model::decode(const std::vector<int64_t>& ids) const {
  Detokenizer detokenizer = this->detokenizer();
  std::string all;
  for (const int64_t id : without_eos(ids)) {
    ASSIGN_OR_RETURN(const std::string_view piece, detokenizer.add_token(id));
    all += piece;
  }
  ASSIGN_OR_RETURN(const std::string_view rest, detokenizer.finalize());
  all += rest;
  return all;
}

bool Model::ends(int64_t id) const {
  return std::find(eos_token_ids_.begin(), eos_token_ids_.end(), id) !=
         eos_token_ids_.end();
}

} // namespace etkv::examples
