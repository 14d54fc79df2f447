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
/// What is returned as it is and not as a Result was fixed when the cache was made.
/// A face that was moved from has no cache: of it these are zero and empty, and all
/// else is ETKV_ERROR_INVALID_ARGUMENT.
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

  /// Whether `n` (at least 0) more positions fit.
  Result<bool> can_extend(int32_t n = 1) const {
    return detail::ask<bool>([&](bool* fits, etkv_error** error) {
      return etkv_cache_can_extend(raw(), n, fits, error);
    });
  }
  /// The most positions that it holds.
  int32_t capacity() const {
    return etkv_cache_capacity(raw());
  }
  /// The positions that it holds now; one that several sequences share counts
  /// once.
  Result<int32_t> length() const {
    return detail::ask<int32_t>([&](int32_t* length, etkv_error** error) {
      return etkv_cache_length(raw(), length, error);
    });
  }
  /// The number of its layers.
  size_t n_layers() const {
    return etkv_cache_n_layers(raw());
  }
  /// The name of its kind.
  std::string kind() const {
    const char* kind = etkv_cache_kind(raw());
    return kind == nullptr ? "" : kind;
  }
  /// The formats that its rows have now.
  Result<Formats> formats() const {
    const char* k = nullptr;
    const char* v = nullptr;
    if (auto asked = detail::run([&](etkv_error** error) {
          return etkv_cache_formats(raw(), &k, &v, error);
        });
        !asked) {
      return asked.error();
    }
    return Formats{k, v};
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
  /// Bytes of its buffers.
  Result<Memory> memory() const {
    return detail::ask_memory(
        n_layers(), [&](etkv_memory* raw_memory, etkv_error** error) {
          return etkv_cache_memory(raw(), raw_memory, error);
        });
  }

  /// Another face on the same cache, for another owner.
  Cache share() const {
    return Cache(etkv_cache_share(raw()));
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
