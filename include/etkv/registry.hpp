// Caches by key, for the whole process. A part of etkv.hpp.
#pragma once

#include <string>

#include "etkv/cache.h"
#include "etkv/cache.hpp"
#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/registry.h"
#include "etkv/result.hpp"

namespace etkv {

/// Caches by key, for the whole process: where programs find theirs. Sessions
/// use it; it is here for hosts that name keys themselves.
struct CacheRegistry {
  /// Makes a cache known under a key, until it is erased.
  static Result<void> install(
      const std::string& key,
      const std::string& backend_id,
      const Cache& cache) {
    return detail::run([&](etkv_error** error) {
      return etkv_registry_install(
          key.c_str(), backend_id.c_str(), cache.raw(), error);
    });
  }
  /// The cache under a key, as this face.
  template <typename Face = Cache>
  static Result<Face> get(const std::string& key) {
    auto found =
        detail::ask<etkv_cache*>([&](etkv_cache** cache, etkv_error** error) {
          return etkv_registry_get(key.c_str(), cache, error);
        });
    if (!found.ok()) {
      return found.error();
    }
    return Face::adopt(*found);
  }
  /// Forgets a key; who shares its cache keeps it.
  static Result<void> erase(const std::string& key) {
    return detail::run([&](etkv_error** error) {
      return etkv_registry_erase(key.c_str(), error);
    });
  }
};

} // namespace etkv
