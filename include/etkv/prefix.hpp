// Prefixes that caches go on from without a copy, for C++17. See prefix.h, and
// docs/prefixes.md.
#pragma once

#include <cstdint>

#include "etkv/cache.hpp"
#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/prefix.h"
#include "etkv/result.hpp"

namespace etkv {

/// What a cache held, frozen; see etkv_prefix.
class Prefix {
 public:
  /// Owns a handle.
  explicit Prefix(etkv_prefix* handle) : handle_(handle) {}

  /// Returns the number of positions.
  int32_t length() const {
    return etkv_prefix_length(raw());
  }
  /// Returns the least length that a cache can attach at.
  int32_t rewindable_to() const {
    return etkv_prefix_rewindable_to(raw());
  }
  /// Returns the bytes of the rows; see etkv_prefix_bytes.
  uint64_t bytes() const {
    return etkv_prefix_bytes(raw());
  }

  /// Returns the handle of the C interface. This object keeps its ownership.
  const etkv_prefix* raw() const {
    return handle_.get();
  }

 private:
  detail::Handle<etkv_prefix, etkv_prefix_free> handle_;
};

/// Freezes what a cache holds, and goes on from it itself; see
/// etkv_cache_freeze.
inline Result<Prefix> freeze(Cache& cache) {
  auto frozen =
      detail::ask<etkv_prefix*>([&](etkv_prefix** prefix, etkv_error** error) {
        return etkv_cache_freeze(cache.raw(), prefix, error);
      });
  if (!frozen.ok()) {
    return frozen.error();
  }
  return Prefix(*frozen);
}

/// Makes an empty cache hold the first `length` positions of a prefix; see
/// etkv_cache_attach.
inline Result<void> attach(Cache& cache, const Prefix& prefix, int32_t length) {
  return detail::run([&](etkv_error** error) {
    return etkv_cache_attach(cache.raw(), prefix.raw(), length, error);
  });
}

} // namespace etkv
