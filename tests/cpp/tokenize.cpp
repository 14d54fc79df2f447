// Answers requests about texts, one per line, so that tests can compare the
// runners' tokenizer with Python's. Texts are in hexadecimal, so that each fits
// one line.
//
//   open PATH              reads a tokenizer, for the requests that follow
//   encode 0|1 TEXT        ids, with special tokens if 1
//   decode 0|1 ID...       pieces of text, without special tokens if 1
//   render VARIABLES       the text of a conversation: {"messages": [...], ...}
//   chat VARIABLES         its ids
//   eos                    the eos token ids
//
// A reply is "ok" and the result, or "error" and the message.

#include <iostream>
#include <optional>
#include <sstream>
#include <string>

#include "examples/tokenizer/tokenizer.hpp"

namespace {

using etkv::Result;
using etkv::examples::Tokenizer;

std::string hex(std::string_view text) {
  static const char kDigits[] = "0123456789abcdef";
  std::string made;
  for (const unsigned char byte : text) {
    made += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return made;
}

std::string text(const std::string& hex) {
  std::string made;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    made += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return made;
}

void reply(const std::vector<int64_t>& ids) {
  std::cout << "ok";
  for (const int64_t id : ids) {
    std::cout << ' ' << id;
  }
  std::cout << std::endl;
}

void reply(const std::string& text) {
  std::cout << "ok " << hex(text) << std::endl;
}

void reply(const etkv::Error& error) {
  std::cout << "error " << hex(error.message()) << std::endl;
}

template <typename T>
void reply(const Result<T>& result) {
  if (result.ok()) {
    reply(result.value());
  } else {
    reply(result.error());
  }
}

void decode(const Tokenizer& tokenizer, bool skip, std::istream& ids) {
  auto detokenizer = tokenizer.detokenizer(skip);
  std::string pieces;
  for (int64_t id; ids >> id;) {
    const auto piece = detokenizer.add_token(id);
    if (!piece.ok()) {
      return reply(piece.error());
    }
    pieces += hex(piece.value()) + ",";
  }
  const auto rest = detokenizer.finalize();
  if (!rest.ok()) {
    return reply(rest.error());
  }
  std::cout << "ok " << pieces << hex(rest.value()) << std::endl;
}

} // namespace

int main() {
  std::optional<Tokenizer> tokenizer;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream fields(line);
    std::string command;
    std::string argument;
    fields >> command;
    if (command == "open") {
      fields >> argument;
      auto opened = Tokenizer::from_pretrained(text(argument));
      if (opened.ok()) {
        tokenizer = std::move(*opened);
        reply(std::vector<int64_t>());
      } else {
        reply(opened.error());
      }
    } else if (!tokenizer) {
      reply(etkv::Error(ETKV_ERROR_INVALID_ARGUMENT, "no tokenizer is open"));
    } else if (command == "encode") {
      bool special = false;
      fields >> special >> argument;
      reply(tokenizer->encode(text(argument), special));
    } else if (command == "decode") {
      bool skip = false;
      fields >> skip;
      decode(*tokenizer, skip, fields);
    } else if (command == "render") {
      fields >> argument;
      reply(tokenizer->render_chat_template({}, false, text(argument)));
    } else if (command == "chat") {
      fields >> argument;
      reply(tokenizer->apply_chat_template({}, false, text(argument)));
    } else {
      reply(tokenizer->eos_token_ids());
    }
  }
  return 0;
}
