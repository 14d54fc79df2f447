// The contents of a cache in a file, and back, for C++17. See saving.h, and
// docs/saving.md for the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "etkv/cache.hpp"
#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/result.hpp"
#include "etkv/saving.h"
#include "etkv/seq.hpp"
#include "etkv/watch.hpp"

namespace etkv {

/// Labels that the caller adds to the contents of a cache; see
/// etkv_save_options.
struct SaveOptions {
  std::string fingerprint;
  std::vector<int64_t> tokens;
};

namespace detail {

/// Returns the options as the C struct, which points into `options`.
inline etkv_save_options raw_of(const SaveOptions& options) {
  etkv_save_options raw = {};
  raw.struct_size = sizeof(raw);
  raw.fingerprint = options.fingerprint.c_str();
  raw.tokens = options.tokens.data();
  raw.n_tokens = options.tokens.size();
  return raw;
}

/// Calls a C function that stores token ids, and returns these.
template <typename Function, typename... Arguments>
Result<std::vector<int64_t>> ask_tokens(
    Function function,
    Arguments... arguments) {
  int64_t* tokens = nullptr;
  size_t n = 0;
  if (auto loaded = run(function, arguments..., &tokens, &n); !loaded) {
    return loaded.error();
  }
  std::vector<int64_t> copy(tokens, tokens + n);
  etkv_tokens_free(tokens, n);
  return copy;
}

} // namespace detail

/// Writes the contents of a cache to a file; see etkv_cache_save.
inline Result<void> save_cache(
    const Cache& cache,
    const std::string& path,
    const SaveOptions& options = {}) {
  const auto raw = detail::raw_of(options);
  return detail::run(etkv_cache_save, cache.raw(), path.c_str(), &raw);
}

/// Replaces the contents of a cache with those of a file, and returns the token
/// ids of the file; see etkv_cache_load.
inline Result<std::vector<int64_t>> load_cache(
    Cache& cache,
    const std::string& path,
    const std::string& fingerprint = "") {
  return detail::ask_tokens(
      etkv_cache_load, cache.raw(), path.c_str(), fingerprint.c_str());
}

/// Writes one sequence to a file; see etkv_seq_cache_save.
inline Result<void> save_sequence(
    const SeqCache& cache,
    int32_t sequence,
    const std::string& path,
    const SaveOptions& options = {}) {
  const auto raw = detail::raw_of(options);
  return detail::run(
      etkv_seq_cache_save, cache.raw_sequences(), sequence, path.c_str(), &raw);
}

/// Adds the only sequence of a file as `sequence`, which must be empty, and
/// returns the token ids of the file; see etkv_seq_cache_load.
inline Result<std::vector<int64_t>> load_sequence(
    SeqCache& cache,
    int32_t sequence,
    const std::string& path,
    const std::string& fingerprint = "") {
  return detail::ask_tokens(
      etkv_seq_cache_load,
      cache.raw_sequences(),
      sequence,
      path.c_str(),
      fingerprint.c_str());
}

/// Returns the fingerprint of a file, such as a program; see etkv_fingerprint.
inline Result<std::string> fingerprint(const std::string& path) {
  return detail::ask_string(etkv_fingerprint, path.c_str());
}

} // namespace etkv
