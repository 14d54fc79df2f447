// A cache and the key under which programs find it. A part of etkv.hpp.
#pragma once

#include <string>
#include <utility>

#include "etkv/cache.h"
#include "etkv/cache.hpp"
#include "etkv/config.hpp"
#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/result.hpp"
#include "etkv/seq.hpp"
#include "etkv/session.h"
#include "etkv/tree.hpp"

namespace etkv {

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
  /// ETKV_ERROR_KIND for another kind.
  static Result<CacheSession> make(
      const std::string& backend_id,
      const std::string& kind,
      const CacheConfig& config) {
    const detail::RawConfig raw(config);
    auto made = detail::ask<etkv_session*>(
        [&](etkv_session** session, etkv_error** error) {
          return etkv_session_new(
              backend_id.c_str(), kind.c_str(), raw.get(), session, error);
        });
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
  /// Returns nullptr for a session that was moved from.
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

/// Makes a session of one growing sequence, for decoding a token a step.
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

} // namespace etkv
