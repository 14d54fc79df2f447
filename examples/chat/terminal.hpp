// The terminal: reads lines, shows progress, and describes an answer's
// statistics.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "etkv/etkv.hpp"
#include "examples/common/generator.hpp"

namespace etkv::examples {

/// Returns the next line of input. Shows an input prompt if the input is a
/// terminal. Returns nullopt at the end of the input and after Ctrl-C.
std::optional<std::string> read_line();

/// Shows the progress of a prompt that needs more than one step of `step`
/// tokens. On a terminal the progress is one line, which is redrawn and finally
/// erased. Otherwise there is a line for each tenth of the prompt.
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
std::string describe(const Answer& answer);

} // namespace etkv::examples
