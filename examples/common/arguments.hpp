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

/// An error for something that was asked for and cannot be.
Error refuse(std::string sentence);

/// The options that a runner knows, and where their values go. A value that the
/// command line does not give stays as it was.
class Arguments {
 public:
  /// @param usage  the lines of help above the options.
  explicit Arguments(std::string usage) : usage_(std::move(usage)) {}

  /// An option that stands alone.
  void flag(std::string name, std::string help, bool* value);

  /// An option whose value is taken as it is.
  void text(
      std::string name,
      std::string placeholder,
      std::string help,
      std::optional<std::string>* value);

  /// The same for an option that may be given several times: all of its values,
  /// in order, in place of those that were there.
  void texts(
      std::string name,
      std::string placeholder,
      std::string help,
      std::vector<std::string>* values);

  /// An option whose value is one of a few words.
  void choice(
      std::string name,
      std::vector<std::string> words,
      std::string help,
      std::optional<std::string>* value);

  /// An option whose value is an integer from `least` to `most`.
  void integer(
      std::string name,
      std::string placeholder,
      std::string help,
      int64_t least,
      int64_t most,
      std::optional<int64_t>* value);

  /// The same where `word` stands for leaving the number open.
  void integer_or(
      std::string word,
      std::string name,
      std::string help,
      int64_t least,
      int64_t most,
      std::optional<int64_t>* value);

  /// An option whose value is a decimal number from `least` to `most`.
  void number(
      std::string name,
      std::string placeholder,
      std::string help,
      double least,
      double most,
      double* value);

  /// Another name for an option, which the help does not list.
  void alias(std::string other, std::string name);

  /// Reads the command line. The last of an option that is given twice counts.
  Result<void> parse(int argc, const char* const* argv) const;

  /// The help text.
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
