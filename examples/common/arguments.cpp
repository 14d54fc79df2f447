#include "examples/common/arguments.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <utility>

#include "examples/common/format.hpp"

namespace etkv::examples {
namespace {

/// Returns the edit distance of two words: the minimum number of characters to
/// insert, remove or replace.
size_t distance(const std::string& from, const std::string& to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= from.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= to.size(); ++j) {
      const size_t replaced = diagonal + (from[i - 1] == to[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

std::optional<int64_t> whole_number(const std::string& text) {
  int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data(), end, number);
  return code == std::errc() && stop == end ? std::optional(number)
                                            : std::nullopt;
}

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string all;
  for (const auto& word : words) {
    all += all.empty() ? word : between + word;
  }
  return all;
}

} // namespace

Error refuse(std::string sentence) {
  return Error(ETKV_ERROR_INVALID_ARGUMENT, std::move(sentence));
}

void Arguments::flag(std::string name, std::string help, bool* value) {
  options_.push_back(
      {std::move(name), "", std::move(help), [value](const std::string&) {
         *value = true;
         return Result<void>();
       }});
}

void Arguments::text(
    std::string name,
    std::string placeholder,
    std::string help,
    std::optional<std::string>* value) {
  options_.push_back(
      {std::move(name),
       std::move(placeholder),
       std::move(help),
       [value](const std::string& given) {
         *value = given;
         return Result<void>();
       }});
}

void Arguments::texts(
    std::string name,
    std::string placeholder,
    std::string help,
    std::vector<std::string>* values) {
  const auto first = std::make_shared<bool>(true);
  options_.push_back(
      {std::move(name),
       std::move(placeholder),
       std::move(help),
       [values, first](const std::string& given) {
         if (std::exchange(*first, false)) {
           values->clear();
         }
         values->push_back(given);
         return Result<void>();
       }});
}

void Arguments::choice(
    std::string name,
    std::vector<std::string> words,
    std::string help,
    std::optional<std::string>* value) {
  std::string placeholder = joined(words, "|");
  auto take = [name, words = std::move(words), value](
                  const std::string& given) -> Result<void> {
    if (std::find(words.begin(), words.end(), given) == words.end()) {
      return refuse(
          name + " takes one of " + joined(words, ", ") + ", not \"" + given +
          "\"");
    }
    *value = given;
    return {};
  };
  options_.push_back(
      {std::move(name),
       std::move(placeholder),
       std::move(help),
       std::move(take)});
}

void Arguments::integer(
    std::string name,
    std::string placeholder,
    std::string help,
    int64_t least,
    int64_t most,
    std::optional<int64_t>* value) {
  auto take =
      [name, least, most, value](const std::string& given) -> Result<void> {
    const auto number = whole_number(given);
    if (!number || *number < least || *number > most) {
      return refuse(
          name + " takes a whole number from " + std::to_string(least) +
          " to " + std::to_string(most) + ", not \"" + given + "\"");
    }
    *value = number;
    return {};
  };
  options_.push_back(
      {std::move(name),
       std::move(placeholder),
       std::move(help),
       std::move(take)});
}

void Arguments::integer_or(
    std::string word,
    std::string name,
    std::string help,
    int64_t least,
    int64_t most,
    std::optional<int64_t>* value) {
  std::string placeholder = "N|" + word;
  auto take = [word = std::move(word), name, least, most, value](
                  const std::string& given) -> Result<void> {
    const auto number = whole_number(given);
    if (given != word && (!number || *number < least || *number > most)) {
      return refuse(
          name + " takes " + word + " or a whole number from " +
          std::to_string(least) + " to " + std::to_string(most) + ", not \"" +
          given + "\"");
    }
    *value = number;
    return {};
  };
  options_.push_back(
      {std::move(name),
       std::move(placeholder),
       std::move(help),
       std::move(take)});
}

void Arguments::number(
    std::string name,
    std::string placeholder,
    std::string help,
    double least,
    double most,
    double* value) {
  auto take =
      [name, least, most, value](const std::string& given) -> Result<void> {
    char* stop = nullptr;
    const double number = std::strtod(given.c_str(), &stop);
    // The negation also refuses NaN.
    if (given.empty() || *stop != '\0' || !(number >= least) ||
        !(number <= most)) {
      return refuse(
          name + " takes a number from " + fixed(least, 1) + " to " +
          fixed(most, 1) + ", not \"" + given + "\"");
    }
    *value = number;
    return {};
  };
  options_.push_back(
      {std::move(name),
       std::move(placeholder),
       std::move(help),
       std::move(take)});
}

void Arguments::alias(std::string other, std::string name) {
  aliases_.emplace(std::move(other), std::move(name));
}

Result<void> Arguments::parse(int argc, const char* const* argv) const {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const size_t equals = word.find('=');
    const auto other = aliases_.find(word.substr(0, equals));
    const std::string name =
        other == aliases_.end() ? word.substr(0, equals) : other->second;
    if (word.rfind("--", 0) != 0) {
      return refuse("\"" + word + "\" is not an option; --help lists them");
    }
    const Option* option = find(name);
    if (option == nullptr) {
      return unknown(name);
    }
    std::string value;
    if (option->placeholder.empty()) {
      if (equals != std::string::npos) {
        return refuse(name + " takes no value");
      }
    } else if (equals != std::string::npos) {
      value = word.substr(equals + 1);
    } else if (i + 1 < argc) {
      value = argv[++i];
    } else {
      return refuse(name + " needs a value: " + option->placeholder);
    }
    if (auto taken = option->take(value); !taken.ok()) {
      return taken;
    }
  }
  return {};
}

std::string Arguments::help() const {
  constexpr size_t kColumn = 28;
  std::string text = usage_ + "\n";
  for (const auto& option : options_) {
    std::string line = "  " + option.name;
    if (!option.placeholder.empty()) {
      line += " " + option.placeholder;
    }
    line += line.size() < kColumn ? std::string(kColumn - line.size(), ' ')
                                  : "\n" + std::string(kColumn, ' ');
    for (const char letter : option.help) {
      line += letter;
      if (letter == '\n') {
        line += std::string(kColumn, ' ');
      }
    }
    text += line + "\n";
  }
  return text;
}

const Arguments::Option* Arguments::find(const std::string& name) const {
  const auto found =
      std::find_if(options_.begin(), options_.end(), [&](const Option& option) {
        return option.name == name;
      });
  return found == options_.end() ? nullptr : &*found;
}

Error Arguments::unknown(const std::string& name) const {
  const auto closest = std::min_element(
      options_.begin(), options_.end(), [&](const Option& a, const Option& b) {
        return distance(name, a.name) < distance(name, b.name);
      });
  // Suggest an option only if at most a third of the characters differ.
  if (closest == options_.end() ||
      distance(name, closest->name) > std::max<size_t>(2, name.size() / 3)) {
    return refuse("there is no option " + name + "; --help lists them");
  }
  return refuse(
      "there is no option " + name + "; did you mean " + closest->name + "?");
}

} // namespace etkv::examples
