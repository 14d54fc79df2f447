// The text library for C++: see etkv_text.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/text/etkv_text.h"

namespace etkv::examples {

/// What one side of a conversation said.
struct Message {
  std::string role;
  std::string content;
};

namespace detail {
inline Result<void> check_text(char* error) {
  if (error == nullptr) {
    return {};
  }
  Error owned(ETKV_ERROR_INVALID_ARGUMENT, error);
  etkv_text_error_free(error);
  return owned;
}

/// Copies ids into the type that programs take, and gives them back.
inline Result<std::vector<int64_t>> take_ids(char* error, etkv_text_ids ids) {
  if (auto checked = check_text(error); !checked.ok()) {
    return checked.error();
  }
  std::vector<int64_t> copy(ids.data, ids.data + ids.length);
  etkv_text_ids_free(&ids);
  return copy;
}
} // namespace detail

/// The text of one answer, made from its ids one at a time.
class TextStream {
 public:
  /// The text that `id` completes: whole characters, maybe none; valid until
  /// the next call.
  Result<std::string_view> next(int64_t id) {
    const char* piece = nullptr;
    size_t length = 0;
    char* error = etkv_text_stream_next(
        raw_.get(), static_cast<uint32_t>(id), &piece, &length);
    if (auto checked = detail::check_text(error); !checked.ok()) {
      return checked.error();
    }
    return std::string_view(piece, length);
  }

  /// Ends the answer: the text that was held back; valid until the next call.
  Result<std::string_view> finish() {
    const char* piece = nullptr;
    size_t length = 0;
    char* error = etkv_text_stream_finish(raw_.get(), &piece, &length);
    if (auto checked = detail::check_text(error); !checked.ok()) {
      return checked.error();
    }
    return std::string_view(piece, length);
  }

 private:
  friend class Text;
  struct Free {
    void operator()(etkv_text_stream* stream) const {
      etkv_text_stream_free(stream);
    }
  };
  explicit TextStream(etkv_text_stream* raw) : raw_(raw) {}

  std::unique_ptr<etkv_text_stream, Free> raw_;
};

/// A tokenizer, and what its folder says about conversations.
class Text {
 public:
  /// Opens a tokenizer.json, or the folder that holds one.
  static Result<Text> open(const std::string& path) {
    etkv_text* raw = nullptr;
    char* error = etkv_text_open(path.c_str(), &raw);
    if (auto checked = detail::check_text(error); !checked.ok()) {
      return checked.error();
    }
    return Text(raw);
  }

  /// The ids of `text`; with the tokens that the tokenizer puts around a text
  /// if `special`.
  Result<std::vector<int64_t>> encode(std::string_view text, bool special)
      const {
    etkv_text_ids ids{};
    char* error =
        etkv_text_encode(raw_.get(), text.data(), text.size(), special, &ids);
    return detail::take_ids(error, ids);
  }

  bool has_chat_template() const {
    return etkv_text_has_chat_template(raw_.get());
  }

  /// The ids of a conversation, up to where the model's next message begins.
  Result<std::vector<int64_t>> encode_chat(
      const std::vector<Message>& messages) const {
    std::vector<etkv_text_message> raw;
    raw.reserve(messages.size());
    for (const auto& message : messages) {
      raw.push_back(
          {message.role.c_str(),
           message.content.data(),
           message.content.size()});
    }
    etkv_text_ids ids{};
    char* error = etkv_text_encode_chat(
        raw_.get(),
        raw.data(),
        raw.size(),
        /*add_generation_prompt=*/true,
        &ids);
    return detail::take_ids(error, ids);
  }

  /// The ids that end an answer; none if the folder does not tell.
  Result<std::vector<int64_t>> eos_token_ids() const {
    etkv_text_ids ids{};
    char* error = etkv_text_eos_token_ids(raw_.get(), &ids);
    return detail::take_ids(error, ids);
  }

  /// Begins an answer; the stream may outlive this.
  TextStream stream() const {
    return TextStream(etkv_text_stream_new(raw_.get()));
  }

 private:
  struct Free {
    void operator()(etkv_text* text) const {
      etkv_text_free(text);
    }
  };
  explicit Text(etkv_text* raw) : raw_(raw) {}

  std::unique_ptr<etkv_text, Free> raw_;
};

} // namespace etkv::examples
