// The output of a runner: answers on standard output, messages on standard
// error.
#pragma once

#include <string>
#include <string_view>

namespace etkv::examples {

/// Prints a message on standard error, on a line of its own.
void say(const std::string& sentence);

/// Writes a piece of an answer to standard output at once.
void write_piece(std::string_view piece);

} // namespace etkv::examples
