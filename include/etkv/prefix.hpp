// Prefixes: frozen contents of caches, from which other caches continue. A part
// of etkv.hpp. See prefix.h, and docs/prefixes.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "etkv/cache.hpp"
#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/prefix.h"
#include "etkv/result.hpp"
#include "etkv/saving.hpp"

namespace etkv {

// ---- Frozen contents of a cache --------------------------------------------

/// The frozen contents of a cache; see etkv_prefix.
class Prefix {
 public:
  /// Owns a handle.
  explicit Prefix(etkv_prefix* handle) : handle_(handle) {}

  /// Returns the number of positions.
  int32_t length() const {
    return etkv_prefix_length(raw());
  }
  /// Returns the smallest length that a cache can attach at, apart from
  /// checkpoints.
  int32_t rewindable_to() const {
    return etkv_prefix_rewindable_to(raw());
  }
  /// Returns the bytes of the rows; see etkv_prefix_bytes.
  uint64_t bytes() const {
    return etkv_prefix_bytes(raw());
  }

  /// Returns the handle of the C interface. This object still owns the handle.
  const etkv_prefix* raw() const {
    return handle_.get();
  }

 private:
  detail::Handle<etkv_prefix, etkv_prefix_free> handle_;
};

/// Freezes the contents of a cache, and lets the cache continue from the frozen
/// contents; see etkv_cache_freeze.
inline Result<Prefix> freeze(Cache& cache) {
  return detail::ask<etkv_prefix*>(etkv_cache_freeze, cache.raw())
      .transform([](etkv_prefix* raw) { return Prefix(raw); });
}

/// Makes an empty cache hold the first `length` positions of a prefix; see
/// etkv_cache_attach.
inline Result<void> attach(Cache& cache, const Prefix& prefix, int32_t length) {
  return detail::run(etkv_cache_attach, cache.raw(), prefix.raw(), length);
}

// ---- Beginnings of texts that outlive the process --------------------------

/// A folder or a bucket of texts that caches have read; see etkv_prefix_store.
class PrefixStore {
 public:
  /// The number and the bytes of the files of a folder.
  struct Usage {
    size_t files = 0;
    uint64_t bytes = 0;
  };

  /// Opens a folder, or a bucket by its address. Its files take at most
  /// `max_bytes`; see etkv_prefix_store_open.
  static Result<PrefixStore> open(
      const std::string& folder,
      uint64_t max_bytes) {
    return detail::ask<etkv_prefix_store*>(
               etkv_prefix_store_open, folder.c_str(), max_bytes)
        .transform([](etkv_prefix_store* raw) { return PrefixStore(raw); });
  }

  /// Returns the number and the bytes of the files.
  Result<Usage> usage() const {
    Usage usage;
    return detail::run(
               etkv_prefix_store_usage,
               handle_.get(),
               &usage.files,
               &usage.bytes)
        .transform([&] { return usage; });
  }

  /// Stores the contents of a cache, whose text is `text.tokens`. Returns
  /// whether a file was written; see etkv_prefix_store_save.
  Result<bool> save(const Cache& cache, const SaveOptions& text) {
    const auto raw = detail::raw_of(text);
    return detail::ask<bool>(
        etkv_prefix_store_save, handle_.get(), cache.raw(), &raw);
  }

  /// Loads into an empty cache the longest beginning of `text.tokens` that the
  /// folder has. Returns its length; see etkv_prefix_store_load.
  Result<size_t> load(Cache& cache, const SaveOptions& text) const {
    const auto raw = detail::raw_of(text);
    return detail::ask<size_t>(
        etkv_prefix_store_load, handle_.get(), cache.raw(), &raw);
  }

  /// Returns how many tokens load() would load; see etkv_prefix_store_find.
  Result<size_t> find(const Cache& cache, const SaveOptions& text) const {
    const auto raw = detail::raw_of(text);
    return detail::ask<size_t>(
        etkv_prefix_store_find, handle_.get(), cache.raw(), &raw);
  }

  /// Returns the handle of the C interface. This object still owns the handle.
  const etkv_prefix_store* raw() const {
    return handle_.get();
  }

 private:
  explicit PrefixStore(etkv_prefix_store* handle) : handle_(handle) {}

  detail::Handle<etkv_prefix_store, etkv_prefix_store_free> handle_;
};

// ---- Prefixes in memory, by their texts ------------------------------------

/// Keeps a prefix in memory as long as this object lives; see etkv_prefix_pin.
class PrefixPin {
 public:
  /// Owns a handle.
  explicit PrefixPin(etkv_prefix_pin* handle) : handle_(handle) {}

 private:
  detail::Handle<etkv_prefix_pin, etkv_prefix_pin_free> handle_;
};

/// The contents of a prefix cache, and counts of its use; see
/// etkv_prefix_statistics.
struct PrefixStatistics {
  size_t prefixes = 0;           ///< prefixes in memory
  size_t pinned = 0;             ///< pinned prefixes in memory
  uint64_t bytes = 0;            ///< bytes of rows, each row once
  uint64_t tokens_asked = 0;     ///< in texts for attach()
  uint64_t tokens_in_memory = 0; ///< of those, found in memory
  uint64_t tokens_in_store = 0;  ///< of those, in the store
  size_t ahead_waiting = 0;      ///< texts that wait to be read ahead
  uint64_t ahead_read = 0;       ///< texts that were read ahead
  uint64_t tokens_ahead = 0;     ///< tokens of those texts
  uint64_t ahead_failed = 0;     ///< texts that could not be read ahead
};

/// Prefixes that caches share; see etkv_prefix_cache.
class PrefixCache {
 public:
  /// Makes a prefix cache of at most `max_bytes` bytes; 0 for no limit. The
  /// prefix cache uses `store`, which need not outlive this call; nullptr for
  /// none.
  static Result<PrefixCache> make(
      uint64_t max_bytes = 0,
      const PrefixStore* store = nullptr) {
    etkv_prefix_cache_options options{};
    options.struct_size = sizeof(options);
    options.max_bytes = max_bytes;
    options.store = store == nullptr ? nullptr : store->raw();
    return detail::ask<etkv_prefix_cache*>(etkv_prefix_cache_new, &options)
        .transform([](etkv_prefix_cache* raw) { return PrefixCache(raw); });
  }

  /// Attaches an empty cache to the longest beginning of `text.tokens` that is
  /// kept. Returns its length; see etkv_prefix_cache_attach.
  Result<size_t> attach(Cache& cache, const SaveOptions& text) {
    const auto raw = detail::raw_of(text);
    return detail::ask<size_t>(
        etkv_prefix_cache_attach, handle_.get(), cache.raw(), &raw);
  }

  /// Returns how many tokens attach() would find; see etkv_prefix_cache_find.
  Result<size_t> find(const Cache& cache, const SaveOptions& text) const {
    const auto raw = detail::raw_of(text);
    return detail::ask<size_t>(
        etkv_prefix_cache_find, handle_.get(), cache.raw(), &raw);
  }

  /// Keeps the contents of a cache, whose text is `text.tokens`. Returns whether
  /// memory has the text then; see etkv_prefix_cache_keep.
  Result<bool> keep(Cache& cache, const SaveOptions& text) {
    const auto raw = detail::raw_of(text);
    return detail::ask<bool>(
        etkv_prefix_cache_keep, handle_.get(), cache.raw(), &raw);
  }

  /// Reads into memory, on another thread, the longest beginning of
  /// `text.tokens` that the store has. Returns whether the text waits to be read; see
  /// etkv_prefix_cache_prefetch.
  Result<bool> prefetch(const Cache& cache, const SaveOptions& text) {
    const auto raw = detail::raw_of(text);
    return detail::ask<bool>(
        etkv_prefix_cache_prefetch, handle_.get(), cache.raw(), &raw);
  }

  /// Pins a prefix that holds a whole text; see etkv_prefix_cache_pin.
  Result<PrefixPin> pin(const Cache& cache, const SaveOptions& text) {
    const auto raw = detail::raw_of(text);
    return detail::ask<etkv_prefix_pin*>(
               etkv_prefix_cache_pin, handle_.get(), cache.raw(), &raw)
        .transform([](etkv_prefix_pin* raw) { return PrefixPin(raw); });
  }

  /// Frees prefixes that nothing uses, until `bytes` are free. Returns the bytes
  /// that were freed; see etkv_prefix_cache_reclaim.
  Result<uint64_t> reclaim(uint64_t bytes) {
    return detail::ask<uint64_t>(
        etkv_prefix_cache_reclaim, handle_.get(), bytes);
  }

  /// Drops all prefixes that are not pinned.
  Result<void> clear() {
    return detail::run(etkv_prefix_cache_clear, handle_.get());
  }

  /// Returns the contents of the prefix cache, and counts of its use.
  Result<PrefixStatistics> statistics() const {
    etkv_prefix_statistics raw{};
    raw.struct_size = sizeof(raw);
    if (auto read = detail::run(etkv_prefix_cache_read, handle_.get(), &raw);
        !read.ok()) {
      return read.error();
    }
    return PrefixStatistics{
        raw.n_prefixes,
        raw.n_pinned,
        raw.n_bytes,
        raw.tokens_asked,
        raw.tokens_in_memory,
        raw.tokens_in_store,
        raw.n_ahead_waiting,
        raw.n_ahead_read,
        raw.tokens_ahead,
        raw.n_ahead_failed};
  }

 private:
  explicit PrefixCache(etkv_prefix_cache* handle) : handle_(handle) {}

  detail::Handle<etkv_prefix_cache, etkv_prefix_cache_free> handle_;
};

} // namespace etkv
