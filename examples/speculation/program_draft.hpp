// Draft tokens from a program, level by level, on its own tree cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "examples/common/program.hpp"
#include "examples/speculation/draft.hpp"
#include "examples/speculation/latency_model.hpp"

namespace etkv::examples {

/// The target of a draft.
struct DraftTarget {
  /// The size of the target's vocabulary, which the draft must share.
  int64_t vocabulary;
  int32_t capacity;
  /// The storage of keys and values; empty for the draft's own dtype.
  std::optional<std::string> kv_format;
  /// The layers whose hidden states the target returns, and the type of a row.
  std::vector<int64_t> tap_layers = {};
  std::optional<HiddenStateType> hidden_state_type = {};
};

/// Adds "the draft" to an error, because two programs are in use.
Error of_draft(const Error& error);

/// The base of drafts with a program. Tracks the ids in the draft's cache, and
/// grows trees from the program's probabilities.
class ProgramDraft : public Draft {
 public:
  /// The number of nodes of a level is at most the number of tokens that the
  /// draft accepts in a step. After Ctrl-C the tree grows no further.
  Result<TokenTree> propose(
      const std::vector<int64_t>& text,
      const TreeShape& shape,
      Sampler& sampler) override;

  Result<void> commit(const std::vector<int32_t>& accepted) override;

  double seconds(int64_t depth, int64_t width) const override;

 protected:
  ProgramDraft(Program program, CacheSession<TreeCache> session)
      : program_(std::move(program)), session_(std::move(session)) {}

  /// Returns a session for `program`. Loads the program with the session's
  /// cache.
  static Result<CacheSession<TreeCache>> make_session(
      Program& program,
      const DraftTarget& target);

  /// Times steps of one token and the choice of candidates, so that their costs
  /// are known before the first tree.
  Result<void> measure();

  /// Returns how many ids in the cache may stay for a text that begins with
  /// them. All of them may stay, unless some ran as nodes of a tree.
  virtual Result<size_t> reusable(const std::vector<int64_t>&) {
    return held_.size();
  }

  /// Runs `n` ids of a text, starting at index `first`, where the cache ends.
  virtual Result<LogitsView>
  run_text(const std::vector<int64_t>& text, size_t first, size_t n) = 0;

  /// Runs the nodes of a tree, starting at node `first`. The nodes are already
  /// proposed to the cache. `positions` has the positions of all nodes.
  virtual Result<LogitsView> run_nodes(
      const TokenTree& tree,
      const std::vector<int64_t>& positions,
      size_t first) = 0;

  Program program_;

 private:
  TreeCache& cache() {
    return session_.cache();
  }
  Result<TokenTree> grow(
      const std::vector<int64_t>& text,
      const TreeShape& shape,
      Sampler& sampler);
  /// Grows a chain of the likeliest ids. A chain needs no probabilities.
  Result<TokenTree>
  grow_chain(TokenTree tree, LogitsView logits, const TreeShape& shape);
  Result<std::optional<LogitsView>> read(const std::vector<int64_t>& text);
  Result<LogitsView> run_level(const TokenTree& tree, size_t n);
  Result<void> keep(const std::vector<int32_t>& accepted);

  /// The session is destroyed before the program. The program keeps the cache
  /// alive.
  CacheSession<TreeCache> session_;
  /// The ids in the cache.
  std::vector<int64_t> held_;
  /// The ids of the last tree's nodes in the cache. The root is not among them,
  /// because it is part of the text, nor is the last level, because it never
  /// runs.
  std::vector<int64_t> run_;
  /// The seconds of a forward, by its number of tokens.
  LatencyModel latency_;
  /// The seconds in which the host chooses candidates, by the number of parent
  /// nodes; and the seconds of a greedy choice for a chain.
  LatencyModel choosing_;
  LatencyModel choosing_one_;
  bool greedy_ = true;
};

} // namespace etkv::examples
