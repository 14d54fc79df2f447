// Trees of candidates behind sequences. A part of etkv.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "etkv/cache.h"
#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/result.hpp"
#include "etkv/seq.hpp"
#include "etkv/tree.h"

namespace etkv {

/// The face of a cache whose sequences carry trees of candidates; see
/// etkv_tree_cache. The default sequence is 0.
class TreeCache : public SeqCache {
 public:
  static constexpr const char* kKind = "tree";

  static Result<TreeCache> adopt(etkv_cache* raw) {
    // First, so that the error names the trees, not the sequences.
    auto trees = detail::ask<etkv_tree_cache*>(
        [&](etkv_tree_cache** trees, etkv_error** error) {
          return etkv_cache_as_tree(raw, trees, error);
        });
    auto sequences = SeqCache::adopt(raw);
    if (!trees.ok()) {
      return trees.error();
    }
    detail::Handle<etkv_tree_cache, etkv_tree_cache_free> handle(*trees);
    if (!sequences.ok()) {
      return sequences.error();
    }
    return TreeCache(std::move(sequences.value()), std::move(handle));
  }

  /// Appends a frontier of candidates: queries of the next step. A parent is
  /// the number of an earlier node, or -1 for the sequence itself. See
  /// etkv_tree_cache_propose.
  Result<void>
  propose(const int32_t* parents, size_t n_nodes, int32_t sequence = 0) {
    return detail::run([&](etkv_error** error) {
      return etkv_tree_cache_propose(
          raw_trees(), sequence, parents, n_nodes, error);
    });
  }
  Result<void> propose(
      const std::vector<int32_t>& parents,
      int32_t sequence = 0) {
    return propose(parents.data(), parents.size(), sequence);
  }
  // Without this overload, `{0}` could be a pointer.
  Result<void> propose(
      std::initializer_list<int32_t> parents,
      int32_t sequence = 0) {
    return propose(std::vector<int32_t>(parents), sequence);
  }
  /// Adds a chain of candidates to the sequence, and removes the rest of its
  /// tree.
  Result<void>
  commit(const int32_t* accepted, size_t n_nodes, int32_t sequence = 0) {
    return detail::run([&](etkv_error** error) {
      return etkv_tree_cache_commit(
          raw_trees(), sequence, accepted, n_nodes, error);
    });
  }
  Result<void> commit(
      const std::vector<int32_t>& accepted,
      int32_t sequence = 0) {
    return commit(accepted.data(), accepted.size(), sequence);
  }
  Result<void> commit(
      std::initializer_list<int32_t> accepted,
      int32_t sequence = 0) {
    return commit(std::vector<int32_t>(accepted), sequence);
  }
  /// Returns the number of nodes of the tree behind a sequence; 0 without a
  /// tree.
  Result<size_t> tree_len(int32_t sequence = 0) const {
    return detail::ask<size_t>([&](size_t* n_nodes, etkv_error** error) {
      return etkv_tree_cache_len(raw_trees(), sequence, n_nodes, error);
    });
  }

  /// Returns the handle of the C interface. This object keeps its ownership.
  etkv_tree_cache* raw_trees() const {
    return trees_.get();
  }

 private:
  using Trees = detail::Handle<etkv_tree_cache, etkv_tree_cache_free>;

  TreeCache(SeqCache sequences, Trees trees)
      : SeqCache(std::move(sequences)), trees_(std::move(trees)) {}

  Trees trees_;
};

} // namespace etkv
