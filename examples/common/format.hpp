// Sizes and rates as text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace etkv::examples {

/// Returns a size as text: "4.4 MiB".
std::string mebibytes(uint64_t bytes);

/// Returns a size as text: "4.4 MiB (4644864 bytes)".
std::string exact_bytes(uint64_t bytes);

/// Returns a number with `digits` digits after the point.
std::string fixed(double number, int digits);

/// Returns `count` in `seconds` as text: "73.8/s", or "-" if the time is too
/// short.
std::string rate(int64_t count, double seconds);

/// Returns a number with its noun: "1 token", "2 tokens".
std::string counted(int64_t count, const std::string& noun);

/// Returns a line of ids: "ids: 4 8 15".
std::string ids_line(const std::vector<int64_t>& ids);

/// Returns the text that `--version` prints.
std::string versions(const std::string& name);

} // namespace etkv::examples
