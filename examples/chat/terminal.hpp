// The person's side: lines in, text out, and a word on how it went.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "etkv/etkv.hpp"
#include "examples/common/generator.hpp"

namespace etkv::examples {

/// The next line that the person types, behind a prompt if someone watches;
/// nothing at the end of the input and after Ctrl-C.
std::optional<std::string> read_line();

/// Shows how far a prompt is that takes more than one step of `step` tokens. On
/// a terminal a line that is redrawn, and erased when the prompt is done; else
/// a line for each tenth.
class PrefillProgress {
 public:
  explicit PrefillProgress(size_t step) : step_(step) {}
  ~PrefillProgress();
  void show(size_t done, size_t total);

 private:
  void erase();

  size_t step_;
  bool drawn_ = false;
  size_t tenth_ = 0;
};

/// "12 tokens · prefill 31 tokens in 0.42 s (73.8/s) · …"
std::string
describe(const Answer& answer, const Memory& memory, const std::string& format);

} // namespace etkv::examples
