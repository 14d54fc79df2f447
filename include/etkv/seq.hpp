// Several sequences in one cache, and trees of candidates after them. A part
// of etkv.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "etkv/cache.h"
#include "etkv/cache.hpp"
#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/result.hpp"
#include "etkv/seq.h"

namespace etkv {

// ---- Sequences -------------------------------------------------------------

/// A range of positions: includes `begin`, excludes `end`.
using Range = etkv_range;

/// The end of a range that includes all positions that follow.
inline constexpr int32_t kAll = INT32_MAX;

/// The face of a cache that many sequences share; see etkv_seq_cache. Sequences
/// have numbers from 0 to 255. `kAll` as the end of a range means all positions
/// that follow.
class SeqCache : public Cache {
 public:
  static constexpr const char* kKind = "seq";

  static Result<SeqCache> adopt(etkv_cache* raw) {
    Cache cache(raw);
    auto sequences = detail::ask<etkv_seq_cache*>(etkv_cache_as_seq, raw);
    if (!sequences.ok()) {
      return sequences.error();
    }
    return SeqCache(std::move(cache), *sequences);
  }

  /// Declares the sequence of each token of the next step; see
  /// etkv_seq_cache_begin_step.
  Result<void> begin_step(const int32_t* sequences, size_t n_tokens) {
    return detail::run(
        etkv_seq_cache_begin_step, raw_sequences(), sequences, n_tokens);
  }
  Result<void> begin_step(const std::vector<int32_t>& sequences) {
    return begin_step(sequences.data(), sequences.size());
  }
  /// Declares the sequences of each token of the next step; see
  /// etkv_seq_cache_begin_step_shared.
  Result<void> begin_step_shared(
      const std::vector<std::vector<int32_t>>& sequences) {
    std::vector<int32_t> all;
    std::vector<int32_t> counts;
    for (const auto& members : sequences) {
      all.insert(all.end(), members.begin(), members.end());
      counts.push_back(static_cast<int32_t>(members.size()));
    }
    return detail::run(
        etkv_seq_cache_begin_step_shared,
        raw_sequences(),
        all.data(),
        all.size(),
        counts.data(),
        counts.size());
  }
  /// Withdraws the declaration of begin_step() or begin_step_shared(), for a
  /// step that will not run.
  Result<void> cancel_step() {
    return detail::run(etkv_seq_cache_cancel_step, raw_sequences());
  }
  /// Makes `target` share positions of `source`, in the same cells.
  Result<void> seq_cp(
      int32_t source,
      int32_t target,
      int32_t begin = 0,
      int32_t end = kAll) {
    return detail::run(
        etkv_seq_cache_cp, raw_sequences(), source, target, begin, end);
  }
  /// Removes positions from a sequence.
  Result<void> seq_rm(int32_t sequence, int32_t begin = 0, int32_t end = kAll) {
    return detail::run(
        etkv_seq_cache_rm, raw_sequences(), sequence, begin, end);
  }
  /// Removes every sequence but one.
  Result<void> seq_keep(int32_t sequence) {
    return detail::run(etkv_seq_cache_keep, raw_sequences(), sequence);
  }
  /// Returns the number of positions that a sequence holds.
  Result<int32_t> seq_len(int32_t sequence) const {
    return detail::ask<int32_t>(etkv_seq_cache_len, raw_sequences(), sequence);
  }
  /// Returns the position of a sequence's next token.
  Result<int32_t> seq_next(int32_t sequence) const {
    return detail::ask<int32_t>(etkv_seq_cache_next, raw_sequences(), sequence);
  }
  /// Returns the positions that a sequence holds, as ranges in order.
  Result<std::vector<Range>> seq_positions(int32_t sequence) const {
    return detail::ask_list<Range>(
        etkv_seq_cache_positions, raw_sequences(), sequence);
  }
  /// Returns the same as `rewindable_to`, for one of several sequences.
  Result<int32_t> seq_rewindable_to(int32_t sequence) const {
    return detail::ask<int32_t>(
        etkv_seq_cache_rewindable_to, raw_sequences(), sequence);
  }
  /// Returns the same as `reachable`, for one of several sequences.
  Result<int32_t> seq_reachable(int32_t sequence, int32_t position) const {
    return detail::ask<int32_t>(
        etkv_seq_cache_reachable, raw_sequences(), sequence, position);
  }
  /// Does what `mark_turn` does, for one of several sequences.
  Result<void> seq_mark_turn(int32_t sequence, int32_t end) {
    return detail::run(
        etkv_seq_cache_mark_turn, raw_sequences(), sequence, end);
  }
  /// Makes a checkpoint of one of several sequences, as `mark` does.
  Result<int32_t> seq_mark(int32_t sequence, int32_t position) {
    return detail::ask<int32_t>(
        etkv_seq_cache_mark, raw_sequences(), sequence, position);
  }
  /// Returns the sequences that hold positions or carry trees, in order.
  Result<std::vector<int32_t>> sequences() const {
    return detail::ask_list<int32_t>(etkv_seq_cache_sequences, raw_sequences());
  }
  /// Moves each sequence into one run of cells, as far as shared cells allow.
  Result<void> compact() {
    return detail::run(etkv_seq_cache_compact, raw_sequences());
  }

  /// Returns the handle of the C interface. This object still owns the handle.
  etkv_seq_cache* raw_sequences() const {
    return sequences_.get();
  }

 private:
  SeqCache(Cache cache, etkv_seq_cache* sequences)
      : Cache(std::move(cache)), sequences_(sequences) {}

  detail::Handle<etkv_seq_cache, etkv_seq_cache_free> sequences_;
};

// ---- Trees of candidates ---------------------------------------------------

/// The face of a cache whose sequences carry trees of candidates; see
/// etkv_tree_cache. The default sequence is 0.
class TreeCache : public SeqCache {
 public:
  static constexpr const char* kKind = "tree";

  static Result<TreeCache> adopt(etkv_cache* raw) {
    // Checked first, so that the error names the trees, not the sequences.
    auto trees = detail::ask<etkv_tree_cache*>(etkv_cache_as_tree, raw);
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
    return detail::run(
        etkv_tree_cache_propose, raw_trees(), sequence, parents, n_nodes);
  }
  Result<void> propose(
      const std::vector<int32_t>& parents,
      int32_t sequence = 0) {
    return propose(parents.data(), parents.size(), sequence);
  }
  // Without this overload, `{0}` could convert to a pointer.
  Result<void> propose(
      std::initializer_list<int32_t> parents,
      int32_t sequence = 0) {
    return propose(std::vector<int32_t>(parents), sequence);
  }
  /// Adds a chain of candidates to the sequence, and removes the rest of its
  /// tree.
  Result<void>
  commit(const int32_t* accepted, size_t n_nodes, int32_t sequence = 0) {
    return detail::run(
        etkv_tree_cache_commit, raw_trees(), sequence, accepted, n_nodes);
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
  /// Returns the number of nodes of the tree after a sequence; 0 without a
  /// tree.
  Result<size_t> tree_len(int32_t sequence = 0) const {
    return detail::ask<size_t>(etkv_tree_cache_len, raw_trees(), sequence);
  }

  /// Returns the handle of the C interface. This object still owns the handle.
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
