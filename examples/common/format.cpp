#include "examples/common/format.hpp"

#include <cstdio>

#include "etkv/etkv.h"

namespace etkv::examples {

std::string mebibytes(uint64_t bytes) {
  return fixed(static_cast<double>(bytes) / (1024.0 * 1024.0), 1) + " MiB";
}

std::string exact_bytes(uint64_t bytes) {
  return mebibytes(bytes) + " (" + std::to_string(bytes) + " bytes)";
}

std::string fixed(double number, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, number);
  return text;
}

std::string rate(int64_t count, double seconds) {
  if (seconds <= 0.0) {
    return "-";
  }
  return fixed(static_cast<double>(count) / seconds, 1) + "/s";
}

std::string counted(int64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string ids_line(const std::vector<int64_t>& ids) {
  std::string line = "ids:";
  for (const int64_t id : ids) {
    line += " " + std::to_string(id);
  }
  return line + "\n";
}

std::string versions(const std::string& name) {
  return name + " " + etkv_version() + ", MLX " + etkv_mlx_version() +
         ", BLAS " + etkv_mlx_blas() + "\n";
}

} // namespace etkv::examples
