// A runner's command line: `--name value`, `--name=value` and bare flags.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "etkv/etkv.hpp"

namespace etkv::examples {

/// Returns an error for a request that is not valid.
Error refuse(std::string sentence);

/// The options of a runner, and the variables that receive their values. A
/// variable stays as it is if the command line does not set its option.
class Arguments {
 public:
  /// @param usage  the help text above the options.
  explicit Arguments(std::string usage) : usage_(std::move(usage)) {}

  /// Adds an option without a value.
  void flag(std::string name, std::string help, bool* value);

  /// Adds an option whose value is a text.
  void text(
      std::string name,
      std::string placeholder,
      std::string help,
      std::optional<std::string>* value);

  /// Adds an option that may be set several times. Its values, in order,
  /// replace the contents of `values`.
  void texts(
      std::string name,
      std::string placeholder,
      std::string help,
      std::vector<std::string>* values);

  /// Adds an option whose value is one of `words`.
  void choice(
      std::string name,
      std::vector<std::string> words,
      std::string help,
      std::optional<std::string>* value);

  /// Adds an option whose value is an integer from `least` to `most`.
  void integer(
      std::string name,
      std::string placeholder,
      std::string help,
      int64_t least,
      int64_t most,
      std::optional<int64_t>* value);

  /// Adds the same option, whose value may also be `word`. `word` sets no
  /// number.
  void integer_or(
      std::string word,
      std::string name,
      std::string help,
      int64_t least,
      int64_t most,
      std::optional<int64_t>* value);

  /// Adds an option whose value is a decimal number from `least` to `most`.
  void number(
      std::string name,
      std::string placeholder,
      std::string help,
      double least,
      double most,
      double* value);

  /// Adds another name for an option. The help does not list it.
  void alias(std::string other, std::string name);

  /// Reads the command line. If an option is set twice, the last value counts.
  Result<void> parse(int argc, const char* const* argv) const;

  /// Returns the help text.
  std::string help() const;

 private:
  using Take = std::function<Result<void>(const std::string& value)>;
  struct Option {
    std::string name;
    std::string placeholder; // empty for a flag
    std::string help;
    Take take;
  };
  const Option* find(const std::string& name) const;
  Error unknown(const std::string& name) const;

  std::string usage_;
  std::vector<Option> options_;
  std::map<std::string, std::string> aliases_;
};

} // namespace etkv::examples
