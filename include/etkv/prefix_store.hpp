// Beginnings of texts that outlive the process, for C++17. See prefix_store.h,
// and docs/prefixes.md for the folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "etkv/cache.hpp"
#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/prefix_store.h"
#include "etkv/result.hpp"
#include "etkv/saving.hpp"

namespace etkv {

/// A folder or a bucket of texts that caches have read; see etkv_prefix_store.
class PrefixStore {
 public:
  /// What the files of the folder take.
  struct Usage {
    size_t files = 0;
    uint64_t bytes = 0;
  };

  /// Opens a folder, or a bucket by its address, whose files take up to
  /// `max_bytes`; see etkv_prefix_store_open.
  static Result<PrefixStore> open(
      const std::string& folder,
      uint64_t max_bytes) {
    auto opened = detail::ask<etkv_prefix_store*>([&](etkv_prefix_store** store,
                                                      etkv_error** error) {
      return etkv_prefix_store_open(folder.c_str(), max_bytes, store, error);
    });
    if (!opened.ok()) {
      return opened.error();
    }
    return PrefixStore(*opened);
  }

  /// Returns what the files take.
  Result<Usage> usage() const {
    Usage usage;
    const auto asked = detail::run([&](etkv_error** error) {
      return etkv_prefix_store_usage(
          handle_.get(), &usage.files, &usage.bytes, error);
    });
    if (!asked.ok()) {
      return asked.error();
    }
    return usage;
  }

  /// Stores the contents of a cache, whose text is `text.tokens`. Returns
  /// whether a file was written; see etkv_prefix_store_save.
  Result<bool> save(const Cache& cache, const SaveOptions& text) {
    const auto raw = detail::raw_of(text);
    return detail::ask<bool>([&](bool* written, etkv_error** error) {
      return etkv_prefix_store_save(
          handle_.get(), cache.raw(), &raw, written, error);
    });
  }

  /// Loads the longest beginning of `text.tokens` that the folder has into an
  /// empty cache. Returns its length; see etkv_prefix_store_load.
  Result<size_t> load(Cache& cache, const SaveOptions& text) const {
    const auto raw = detail::raw_of(text);
    return detail::ask<size_t>([&](size_t* n, etkv_error** error) {
      return etkv_prefix_store_load(handle_.get(), cache.raw(), &raw, n, error);
    });
  }

  /// Returns how many tokens load() would load; see etkv_prefix_store_find.
  Result<size_t> find(const Cache& cache, const SaveOptions& text) const {
    const auto raw = detail::raw_of(text);
    return detail::ask<size_t>([&](size_t* n, etkv_error** error) {
      return etkv_prefix_store_find(handle_.get(), cache.raw(), &raw, n, error);
    });
  }

  /// Returns the handle of the C interface. This object keeps its ownership.
  const etkv_prefix_store* raw() const {
    return handle_.get();
  }

 private:
  explicit PrefixStore(etkv_prefix_store* handle) : handle_(handle) {}

  detail::Handle<etkv_prefix_store, etkv_prefix_store_free> handle_;
};

} // namespace etkv
