// What the runners of this folder have in common: a command line, built-in
// prompts, one line for an error, and an exit status.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "etkv/etkv.hpp"
#include "examples/common/arguments.hpp"
#include "examples/common/generator.hpp"
#include "examples/common/model.hpp"

namespace etkv::examples {

/// Exit statuses, beside 0: an error, a command line that cannot be, and what
/// shells report of a program that Ctrl-C ended.
inline constexpr int kFailed = 1;
inline constexpr int kMisused = 2;
inline constexpr int kInterrupted = 130;

/// What every runner can be asked.
struct RunnerOptions {
  ModelOptions model;
  /// In place of those that are built in.
  std::vector<std::string> prompts;
  int64_t max_tokens = 48;
  /// Compare with reference decoding.
  bool check = false;
  /// Print the ids of answers as well.
  bool ids = false;

  const std::vector<std::string>& prompts_or(
      const std::vector<std::string>& built_in) const {
    return prompts.empty() ? built_in : prompts;
  }
};

class Runner {
 public:
  /// @param name   of the executable
  /// @param about  what it shows, in lines of help
  Runner(std::string name, const std::string& about);

  /// Where a runner adds options of its own, and changes what is the default.
  Arguments& arguments() {
    return arguments_;
  }
  RunnerOptions& options() {
    return options_;
  }

  /// Adds something that a command line has to meet.
  void require(std::function<Result<void>()> check) {
    checks_.push_back(std::move(check));
  }

  /// Reads the command line and runs `body`, from opening the model to closing
  /// it, as often as was asked for. Returns what main() does: 0, 1 after an
  /// error, 2 for a command line that cannot be, 130 after Ctrl-C.
  int main(
      int argc,
      const char* const* argv,
      const std::function<Result<void>(const RunnerOptions&)>& body);

 private:
  int fail(const Error& error, int status) const;

  std::string name_;
  Arguments arguments_;
  RunnerOptions options_;
  std::vector<std::function<Result<void>()>> checks_;
  std::optional<int64_t> max_tokens_;
  std::optional<int64_t> repeat_;
  bool help_ = false;
  bool version_ = false;
};

/// Questions that a small model has something to say about.
const std::vector<std::string>& questions();

/// Writes the text of an answer under what it answers, and its ids if asked to.
Result<void> show(
    const Model& model,
    const RunnerOptions& options,
    const std::string& title,
    const std::vector<int64_t>& ids);

/// Says that an answer ended because the cache is full, if that is why.
void say_stop(Stop stop, const Cache& cache);

/// Requests that a server cannot take, while it goes on with the others.
class Refusals {
 public:
  /// Whether a prompt fits in a cache by itself; says so if it does not.
  bool
  admit(const std::string& title, size_t prompt_tokens, const Cache& cache);

  /// An error if any of them did not fit.
  Result<void> outcome() const;

 private:
  size_t admitted_ = 0;
  size_t refused_ = 0;
};

} // namespace etkv::examples
