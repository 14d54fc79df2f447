// mlx-c formats its error messages with std::format and plain {} fields. This header supplies std::format for older
// standard libraries (libstdc++ 12).
#pragma once
#ifdef __cplusplus
#include <version>
#ifndef __cpp_lib_format
#include <sstream>
#include <string>
#include <string_view>

namespace std {
inline void etkv_format_rest(ostringstream& out, string_view text) {
  out << text;
}

template <typename First, typename... Rest>
void etkv_format_rest(
    ostringstream& out,
    string_view text,
    const First& first,
    const Rest&... rest) {
  const auto field = text.find("{}");
  if (field == string_view::npos) {
    out << text;
    return;
  }
  out << text.substr(0, field) << first;
  etkv_format_rest(out, text.substr(field + 2), rest...);
}

template <typename... Args>
string format(string_view text, const Args&... args) {
  ostringstream out;
  etkv_format_rest(out, text, args...);
  return out.str();
}
} // namespace std
#endif
#endif
