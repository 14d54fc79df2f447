// Sizes, rates and KV formats, in words.
#pragma once

#include <cstdint>
#include <string>

#include "etkv/etkv.hpp"

namespace etkv::examples {

/// "f32", "f16" or "bf16".
const char* format_name(etkv_format format);

/// The format of that name; ETKV_FORMAT_DEFAULT if there is none.
etkv_format format_named(const std::string& name);

/// "4.4 MiB".
std::string mebibytes(uint64_t bytes);

/// A number with `digits` behind the point.
std::string fixed(double number, int digits);

/// `count` in `seconds`, as "73.8/s"; "-" where the time is too short to tell.
std::string rate(int64_t count, double seconds);

/// "1 token", "2 tokens".
std::string counted(int64_t count, const std::string& noun);

} // namespace etkv::examples
