#include "examples/chat/terminal.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "examples/common/console.hpp"
#include "examples/common/format.hpp"

namespace etkv::examples {
namespace {

constexpr char kEraseLine[] = "\r\033[K";

bool watched(FILE* stream) {
  return isatty(fileno(stream)) != 0;
}

/// Returns as text the counts and the reason that etkv.Reuse has in Python;
/// empty if nothing matched.
std::string describe_reuse(const Answer& answer) {
  const auto cached = std::to_string(answer.reused_tokens);
  if (answer.matched_tokens > answer.reused_tokens) {
    return ", " + std::to_string(answer.matched_tokens) + " matched, " +
           cached + " cached, " +
           std::to_string(answer.matched_tokens - answer.reused_tokens) +
           " run again: the cache could only be rewound to length " + cached;
  }
  return answer.reused_tokens > 0 ? ", " + cached + " cached" : "";
}

} // namespace

std::optional<std::string> read_line() {
  if (watched(stdin)) {
    std::fputs("> ", stderr);
  }
  // The C function returns at Ctrl-C; a C++ stream would read on.
  char* line = nullptr;
  size_t room = 0;
  const ssize_t length = getline(&line, &room, stdin);
  std::optional<std::string> text;
  if (length >= 0) {
    text.emplace(line, static_cast<size_t>(length));
    if (!text->empty() && text->back() == '\n') {
      text->pop_back();
    }
  } else if (watched(stdin)) {
    std::fputc('\n', stderr);
  }
  std::free(line);
  return text;
}

PrefillProgress::~PrefillProgress() {
  erase();
}

void PrefillProgress::show(size_t done, size_t total) {
  if (total <= step_) {
    return;
  }
  const std::string line = "prefill " + std::to_string(done) + " of " +
                           std::to_string(total) + " tokens";
  if (!watched(stderr)) {
    if (done * 10 / total > tenth_) {
      tenth_ = done * 10 / total;
      say(line);
    }
  } else if (done == total) {
    erase();
  } else {
    std::fprintf(stderr, "%s%s", kEraseLine, line.c_str());
    std::fflush(stderr);
    drawn_ = true;
  }
}

void PrefillProgress::erase() {
  if (drawn_) {
    std::fputs(kEraseLine, stderr);
    std::fflush(stderr);
    drawn_ = false;
  }
}

std::string describe(const Answer& answer) {
  std::string text =
      counted(static_cast<int64_t>(answer.ids.size()), "token") +
      " · prefill " +
      counted(static_cast<int64_t>(answer.prefill_tokens), "token") + " in " +
      fixed(answer.prefill_seconds, 2) + " s (" +
      rate(
          static_cast<int64_t>(answer.prefill_tokens), answer.prefill_seconds) +
      ")";
  text += describe_reuse(answer);
  if (answer.decode_tokens > 0 && answer.decode_seconds > 0.0) {
    text +=
        " · decode " +
        fixed(
            static_cast<double>(answer.decode_tokens) / answer.decode_seconds,
            1) +
        " tokens/s";
  }
  return text;
}

} // namespace etkv::examples
