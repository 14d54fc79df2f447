// Kinds of caches, and the keys under which programs find caches. A part of
// etkv.hpp.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "etkv/cache.h"
#include "etkv/cache.hpp"
#include "etkv/config.hpp"
#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/result.hpp"
#include "etkv/seq.hpp"
#include "etkv/session.h"

namespace etkv {

// ---- Kinds -----------------------------------------------------------------

/// A kind of cache, and the backend that it is for.
struct Kind {
  std::string backend_id;
  std::string name;
};

/// Returns the kinds of caches, in order of backend id and name.
inline std::vector<Kind> kinds() {
  std::vector<Kind> found;
  etkv_kinds(
      [](void* context, const char* backend_id, const char* kind) {
        static_cast<std::vector<Kind>*>(context)->push_back({backend_id, kind});
      },
      &found);
  return found;
}

// ---- Sessions --------------------------------------------------------------

/// A session: a cache, in the registry for as long as this object lives.
///
/// `Face` is the face that the runner uses: `Cache`, `SeqCache` or `TreeCache`.
template <typename Face>
class CacheSession {
 public:
  /// Makes a session with a cache of the kind that has the face's name.
  static Result<CacheSession> make(
      const std::string& backend_id,
      const CacheConfig& config) {
    return make(backend_id, Face::kKind, config);
  }
  /// Makes a session with a cache of any kind that has the face.
  /// ETKV_ERROR_KIND for a kind without it.
  static Result<CacheSession> make(
      const std::string& backend_id,
      const std::string& kind,
      const CacheConfig& config) {
    const detail::RawConfig raw(config);
    auto made = detail::ask<etkv_session*>(
        etkv_session_new, backend_id.c_str(), kind.c_str(), raw.get());
    if (!made.ok()) {
      return made.error();
    }
    Raw session(*made);
    auto face = Face::adopt(etkv_session_cache(session.get()));
    if (!face.ok()) {
      return face.error();
    }
    return CacheSession(std::move(session), std::move(face.value()));
  }

  /// Returns the key. Load a program with it as the backend option `cache_key`.
  /// Returns nullptr for a moved-from session.
  const char* key() const {
    return etkv_session_key(handle_.get());
  }
  Face& cache() {
    return face_;
  }
  const Face& cache() const {
    return face_;
  }
  Face* operator->() {
    return &face_;
  }
  const Face* operator->() const {
    return &face_;
  }

 private:
  using Raw = detail::Handle<etkv_session, etkv_session_free>;

  CacheSession(Raw handle, Face face)
      : handle_(std::move(handle)), face_(std::move(face)) {}

  Raw handle_;
  Face face_;
};

/// Makes a session of one growing sequence, for decoding one token per step.
inline Result<CacheSession<Cache>> make_decode_session(
    const std::string& backend_id,
    const CacheConfig& config) {
  return CacheSession<Cache>::make(backend_id, config);
}

/// Makes a session of several sequences that share cells: batches, forks,
/// removal.
inline Result<CacheSession<SeqCache>> make_seq_session(
    const std::string& backend_id,
    const CacheConfig& config) {
  return CacheSession<SeqCache>::make(backend_id, config);
}

/// Makes a session of sequences that carry trees of candidates, for speculative
/// decoding.
inline Result<CacheSession<TreeCache>> make_tree_session(
    const std::string& backend_id,
    const CacheConfig& config) {
  return CacheSession<TreeCache>::make(backend_id, config);
}

// ---- The registry ----------------------------------------------------------

/// The process-wide registry: programs find their caches in it, by key.
/// Sessions use it; call these functions only to choose the keys yourself.
struct CacheRegistry {
  /// Adds a cache under a key, until the key is erased; see
  /// etkv_registry_install.
  static Result<void> install(
      const std::string& key,
      const std::string& backend_id,
      const Cache& cache) {
    return detail::run(
        etkv_registry_install, key.c_str(), backend_id.c_str(), cache.raw());
  }
  /// Returns a face of the cache that is registered under a key.
  /// ETKV_ERROR_NO_CACHE if no cache has this key.
  template <typename Face = Cache>
  static Result<Face> get(const std::string& key) {
    return detail::ask<etkv_cache*>(etkv_registry_get, key.c_str())
        .and_then(Face::adopt);
  }
  /// Removes a key. The cache lives on while it has other owners.
  static Result<void> erase(const std::string& key) {
    return detail::run(etkv_registry_erase, key.c_str());
  }
};

} // namespace etkv
