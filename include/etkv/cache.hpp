// A cache: the face that every kind has. A part of etkv.hpp.
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

/// The face that every cache has: admission, length, rollback, memory.
///
/// What is returned as it is and not as a Result is zero, empty or false for a face
/// that was moved from, and where the cache is poisoned: the next change or
/// step says so.
class Cache {
 public:
  /// The kind that carries this face and no other.
  static constexpr const char* kKind = "contiguous";

  /// Takes over a handle of the C interface.
  explicit Cache(etkv_cache* raw) : handle_(raw) {}
  /// The same, for every face alike: refused where the cache cannot do what the
  /// face is for.
  static Result<Cache> adopt(etkv_cache* raw) {
    return Cache(raw);
  }

  /// Whether `n` more positions fit; false if `n` is negative.
  bool can_extend(int32_t n = 1) const {
    bool fits = false;
    etkv_cache_can_extend(raw(), n, &fits, nullptr);
    return fits;
  }
  /// The most positions that it holds.
  int32_t capacity() const {
    int32_t capacity = 0;
    etkv_cache_capacity(raw(), &capacity, nullptr);
    return capacity;
  }
  /// The positions that it holds now; one that several sequences share counts
  /// once.
  int32_t length() const {
    int32_t length = 0;
    etkv_cache_length(raw(), &length, nullptr);
    return length;
  }
  size_t n_layers() const {
    size_t n_layers = 0;
    etkv_cache_n_layers(raw(), &n_layers, nullptr);
    return n_layers;
  }
  /// The name of its kind; empty for a face that was moved from.
  std::string kind() const {
    const char* kind = "";
    etkv_cache_kind(raw(), &kind, nullptr);
    return kind;
  }
  /// The formats that its rows have now.
  Formats formats() const {
    const char* k = "";
    const char* v = "";
    etkv_cache_formats(raw(), &k, &v, nullptr);
    return {k, v};
  }
  /// Stores what is there, and what comes, in other formats, until it is cleared.
  Result<void> convert(
      const std::string& k_format,
      const std::string& v_format) {
    return detail::run([&](etkv_error** error) {
      return etkv_cache_convert(
          raw(), k_format.c_str(), v_format.c_str(), error);
    });
  }
  /// Forgets every position, and gives the buffers back if `release`.
  Result<void> clear(bool release = false) {
    return detail::run([&](etkv_error** error) {
      return etkv_cache_clear(raw(), release, error);
    });
  }
  /// Forgets the positions from `length` on, of the one sequence that there is.
  Result<void> rewind(int32_t length) {
    return detail::run([&](etkv_error** error) {
      return etkv_cache_rewind(raw(), length, error);
    });
  }
  /// The least length, apart from 0, that it can be rewound to now.
  Result<int32_t> rewindable_to() const {
    return detail::ask<int32_t>([&](int32_t* length, etkv_error** error) {
      return etkv_cache_rewindable_to(raw(), length, error);
    });
  }
  /// Nothing for a face that was moved from.
  Memory memory() const {
    auto memory = detail::ask_memory(
        n_layers(), [&](etkv_memory* raw_memory, auto error) {
          return etkv_cache_memory(raw(), raw_memory, error);
        });
    return memory.ok() ? std::move(memory.value()) : Memory{};
  }

  /// Another face on the same cache, for another owner.
  Result<Cache> share() const {
    auto shared =
        detail::ask<etkv_cache*>([&](etkv_cache** made, etkv_error** error) {
          return etkv_cache_share(raw(), made, error);
        });
    if (!shared.ok()) {
      return shared.error();
    }
    return Cache(*shared);
  }

  /// The handle of the C interface, which stays this object's.
  etkv_cache* raw() const {
    return handle_.get();
  }

 private:
  detail::Handle<etkv_cache, etkv_cache_free> handle_;
};

/// A cache that no key leads to yet.
template <typename Face>
Result<Face> make_cache(
    const std::string& backend_id,
    const std::string& kind,
    const CacheConfig& config) {
  const detail::RawConfig raw(config);
  auto made =
      detail::ask<etkv_cache*>([&](etkv_cache** cache, etkv_error** error) {
        return etkv_cache_new(
            backend_id.c_str(), kind.c_str(), raw.get(), cache, error);
      });
  if (!made.ok()) {
    return made.error();
  }
  return Face::adopt(*made);
}

} // namespace etkv
