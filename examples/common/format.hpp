// Sizes and rates, in words.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace etkv::examples {

/// "4.4 MiB".
std::string mebibytes(uint64_t bytes);

/// "4.4 MiB (4644864 bytes)".
std::string exact_bytes(uint64_t bytes);

/// A number with `digits` behind the point.
std::string fixed(double number, int digits);

/// `count` in `seconds`, as "73.8/s"; "-" where the time is too short to tell.
std::string rate(int64_t count, double seconds);

/// "1 token", "2 tokens".
std::string counted(int64_t count, const std::string& noun);

/// "ids: 4 8 15", a line of its own.
std::string ids_line(const std::vector<int64_t>& ids);

/// What `--version` prints of a runner.
std::string versions(const std::string& name);

} // namespace etkv::examples
