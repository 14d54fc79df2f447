// The face that every kind of cache has. A part of etkv.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "etkv/cache.h"
#include "etkv/config.hpp"
#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/memory.h"
#include "etkv/memory.hpp"
#include "etkv/result.hpp"

namespace etkv {

/// Names of the formats that rows are stored in.
struct Formats {
  std::string k;
  std::string v;
};

/// The face that every cache has: admission, length, rollback, memory. The face
/// owns a handle to a shared cache.
///
/// Facts are returned directly: they were fixed when the cache was made. All
/// other calls return a Result. A moved-from face has no cache: its facts are
/// zero or empty, and its other calls return ETKV_ERROR_INVALID_ARGUMENT.
class Cache {
 public:
  /// The kind of cache that a session with this face makes.
  static constexpr const char* kKind = "contiguous";

  /// Takes ownership of a handle of the C interface.
  explicit Cache(etkv_cache* raw) : handle_(raw) {}
  /// Takes ownership of a handle. Never fails; adopt() of other faces fails if
  /// the cache does not have the face.
  static Result<Cache> adopt(etkv_cache* raw) {
    return Cache(raw);
  }

  /// Returns whether `n` more positions fit; `n` is at least 0.
  Result<bool> can_extend(int32_t n = 1) const {
    return detail::ask<bool>(etkv_cache_can_extend, raw(), n);
  }
  /// Returns the maximum number of positions in the cache.
  int32_t capacity() const {
    return etkv_cache_capacity(raw());
  }
  /// Returns the number of positions that the cache holds now. A position that
  /// several sequences share counts once.
  Result<int32_t> length() const {
    return detail::ask<int32_t>(etkv_cache_length, raw());
  }
  /// Returns the number of attention layers.
  size_t n_layers() const {
    return etkv_cache_n_layers(raw());
  }
  /// Returns the number of recurrent layers.
  size_t n_recurrent_layers() const {
    return etkv_cache_n_recurrent_layers(raw());
  }
  /// Returns the maximum tokens of one step; see etkv_cache_max_step_tokens().
  int32_t max_step_tokens() const {
    return etkv_cache_max_step_tokens(raw());
  }
  /// Returns the name of the kind.
  std::string kind() const {
    const char* kind = etkv_cache_kind(raw());
    return kind == nullptr ? "" : kind;
  }
  /// Returns the formats that keys and values have now.
  Result<Formats> formats() const {
    const char* k = nullptr;
    const char* v = nullptr;
    return detail::run(etkv_cache_formats, raw(), &k, &v).transform([&] {
      return Formats{k, v};
    });
  }
  /// Converts the stored rows to other formats, and stores later rows in these
  /// formats until the cache is cleared; see etkv_cache_convert.
  Result<void> convert(
      const std::string& k_format,
      const std::string& v_format) {
    return detail::run(
        etkv_cache_convert, raw(), k_format.c_str(), v_format.c_str());
  }
  /// Removes every position, and frees the buffers if `release`.
  Result<void> clear(bool release = false) {
    return detail::run(etkv_cache_clear, raw(), release);
  }
  /// Removes the positions of the only sequence at or after `length`; see
  /// etkv_cache_rewind.
  Result<void> rewind(int32_t length) {
    return detail::run(etkv_cache_rewind, raw(), length);
  }
  /// Returns the smallest length such that rewind() accepts it and every
  /// greater length; see etkv_cache_rewindable_to.
  Result<int32_t> rewindable_to() const {
    return detail::ask<int32_t>(etkv_cache_rewindable_to, raw());
  }
  /// Returns the greatest length, at most `position`, that rewind() accepts now;
  /// see etkv_cache_reachable.
  Result<int32_t> reachable(int32_t position) const {
    return detail::ask<int32_t>(etkv_cache_reachable, raw(), position);
  }
  /// Makes a checkpoint of the only sequence at `position`, at once or when a
  /// step reaches it, and returns the position of the checkpoint, or 0 if the
  /// cache makes none. See etkv_cache_mark.
  Result<int32_t> mark(int32_t position) {
    return detail::ask<int32_t>(etkv_cache_mark, raw(), position);
  }
  /// Marks the prompt of a turn before it runs; see etkv_cache_mark_turn.
  Result<void> mark_turn(int32_t end) {
    return detail::run(etkv_cache_mark_turn, raw(), end);
  }
  /// Rewinds to the greatest length, at most `length`, that rewind() accepts,
  /// and returns this length; see etkv_cache_rewind_to_reachable.
  Result<int32_t> rewind_to_reachable(int32_t length) {
    return detail::ask<int32_t>(etkv_cache_rewind_to_reachable, raw(), length);
  }
  /// Returns the bytes of the buffers.
  Result<Memory> memory() const {
    return detail::ask_memory(
        n_layers(), n_recurrent_layers(), etkv_cache_memory, raw());
  }

  /// Returns another face of the same cache, for another owner.
  Cache share() const {
    return Cache(etkv_cache_share(raw()));
  }

  /// Returns the handle of the C interface. This object still owns the handle.
  etkv_cache* raw() const {
    return handle_.get();
  }

 private:
  detail::Handle<etkv_cache, etkv_cache_free> handle_;
};

/// Makes a cache that is not in the registry; see etkv_cache_new.
template <typename Face>
Result<Face> make_cache(
    const std::string& backend_id,
    const std::string& kind,
    const CacheConfig& config) {
  const detail::RawConfig raw(config);
  return detail::ask<etkv_cache*>(
             etkv_cache_new, backend_id.c_str(), kind.c_str(), raw.get())
      .and_then(Face::adopt);
}

} // namespace etkv
