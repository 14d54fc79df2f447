// What a runner says: answers on standard output, everything else beside them.
#pragma once

#include <string>
#include <string_view>

namespace etkv::examples {

/// A message on standard error, on a line of its own.
void say(const std::string& sentence);

/// Writes a piece of an answer to standard output at once.
void write_piece(std::string_view piece);

} // namespace etkv::examples
