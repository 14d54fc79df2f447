// The common parts of the runners in this folder: a command line, built-in
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

/// Exit statuses besides 0: an error, an invalid command line, and the status
/// that shells report for a program that Ctrl-C ended.
inline constexpr int kFailed = 1;
inline constexpr int kMisused = 2;
inline constexpr int kInterrupted = 130;

/// The options of every runner.
struct RunnerOptions {
  ModelOptions model;
  /// The prompts that replace the built-in ones.
  std::vector<std::string> prompts;
  int64_t max_tokens = 48;
  /// Whether to compare answers with reference decoding.
  bool check = false;
  /// Whether to print the ids of answers in addition to their text.
  bool ids = false;

  const std::vector<std::string>& prompts_or(
      const std::vector<std::string>& built_in) const {
    return prompts.empty() ? built_in : prompts;
  }
};

class Runner {
 public:
  /// @param name   the name of the executable
  /// @param about  the description in the help text
  Runner(std::string name, const std::string& about);

  /// Returns the command line, for a runner to add options and change defaults.
  Arguments& arguments() {
    return arguments_;
  }
  RunnerOptions& options() {
    return options_;
  }

  /// Adds a condition that a command line must meet.
  void require(std::function<Result<void>()> check) {
    checks_.push_back(std::move(check));
  }

  /// Reads the command line. Then opens the model, runs `body` and closes the
  /// model, as many times as `--repeat` says. Returns the exit status: 0, 1
  /// after an error, 2 for an invalid command line, 130 after Ctrl-C.
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

/// Returns questions that a small model can answer.
const std::vector<std::string>& questions();

/// Prints the text of an answer below its title, and its ids with `--ids`.
Result<void> show(
    const Model& model,
    const RunnerOptions& options,
    const std::string& title,
    const std::vector<int64_t>& ids);

/// Prints a message if an answer ended because the cache is full.
void say_stop(FinishReason stop, int32_t capacity);

/// Counts refused requests. The runner goes on with other requests.
class Refusals {
 public:
  /// Returns whether a prompt fits in a cache alone, and prints a message if it
  /// does not.
  bool
  admit(const std::string& title, size_t prompt_tokens, const Cache& cache);

  /// Returns an error if any prompt did not fit.
  Result<void> outcome() const;

 private:
  size_t admitted_ = 0;
  size_t refused_ = 0;
};

} // namespace etkv::examples
