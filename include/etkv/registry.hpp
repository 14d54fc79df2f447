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

/// The process-wide registry: programs find their caches in it, by key.
/// Sessions use it; call it only to choose the keys yourself.
struct CacheRegistry {
  /// Adds a cache under a key, until the key is erased; see
  /// etkv_registry_install.
  static Result<void> install(
      const std::string& key,
      const std::string& backend_id,
      const Cache& cache) {
    return detail::run([&](etkv_error** error) {
      return etkv_registry_install(
          key.c_str(), backend_id.c_str(), cache.raw(), error);
    });
  }
  /// Returns a face on the cache under a key. ETKV_ERROR_NO_CACHE where there
  /// is none.
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
  /// Removes a key. The cache lives on while it has other owners.
  static Result<void> erase(const std::string& key) {
    return detail::run([&](etkv_error** error) {
      return etkv_registry_erase(key.c_str(), error);
    });
  }
};

} // namespace etkv
