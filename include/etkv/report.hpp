// Reports as JSON, for C++17. See report.h, and docs/reports.md for the fields.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "etkv/cache.hpp"
#include "etkv/detail.hpp"
#include "etkv/report.h"
#include "etkv/result.hpp"

namespace etkv {

namespace detail {
/// Calls a C function that stores a string for the caller, and frees the
/// string.
template <typename Call>
Result<std::string> ask_string(Call call) {
  auto raw = ask<char*>(call);
  if (!raw.ok()) {
    return raw.error();
  }
  std::string text(*raw);
  etkv_string_free(*raw);
  return text;
}
} // namespace detail

/// Returns a report of a cache, as a JSON object; see etkv_cache_report.
inline Result<std::string> cache_report(const Cache& cache) {
  return detail::ask_string([&](char** json, etkv_error** error) {
    return etkv_cache_report(cache.raw(), json, error);
  });
}

/// Returns a report of this process, as a JSON object; see etkv_process_report.
inline Result<std::string> process_report() {
  return detail::ask_string([](char** json, etkv_error** error) {
    return etkv_process_report(json, error);
  });
}

/// Returns a description of a program, as a JSON object, from the delegate's
/// payload of `n_bytes` bytes; see etkv_program_describe.
inline Result<std::string> describe_program(
    const uint8_t* payload,
    size_t n_bytes) {
  return detail::ask_string([&](char** json, etkv_error** error) {
    return etkv_program_describe(payload, n_bytes, json, error);
  });
}

} // namespace etkv
