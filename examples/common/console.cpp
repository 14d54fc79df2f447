#include "examples/common/console.hpp"

#include <cstdio>

namespace etkv::examples {

void say(const std::string& sentence) {
  std::fprintf(stderr, "%s\n", sentence.c_str());
}

void write_piece(std::string_view piece) {
  std::fwrite(piece.data(), 1, piece.size(), stdout);
  std::fflush(stdout);
}

} // namespace etkv::examples
