// Draft tokens of a program, level by level, on a tree cache of its own.
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

/// What a draft is made for.
struct DraftTarget {
  /// Ids that the target knows; the draft has to know the same.
  int64_t vocabulary;
  int32_t capacity;
  /// How keys and values are stored; none for the draft's own dtype.
  std::optional<std::string> kv_format;
  /// The layers whose hidden states the target gives, and a row of them all.
  std::vector<int64_t> tap_layers = {};
  std::optional<HiddenStateType> hidden_state_type = {};
};

/// Which of two programs an error is about cannot be told otherwise.
Error of_draft(const Error& error);

/// What drafts with a program of their own have in common: the ids that their
/// cache holds, and how a tree grows from what the program makes likely.
class ProgramDraft : public Draft {
 public:
  /// No level has more nodes than the draft takes in a step. After Ctrl-C the tree
  /// is as far as it was.
  Result<TokenTree> propose(
      const std::vector<int64_t>& text,
      const TreeShape& shape,
      Sampler& sampler) override;

  Result<void> commit(const std::vector<int32_t>& accepted) override;

  double seconds(int64_t depth, int64_t width) const override;

 protected:
  ProgramDraft(Program program, CacheSession<TreeCache> session)
      : program_(std::move(program)), session_(std::move(session)) {}

  /// A session for `program`, which is loaded with its cache.
  static Result<CacheSession<TreeCache>> make_session(
      Program& program,
      const DraftTarget& target);

  /// How many of the ids in the cache may stay there, where a text begins with
  /// them: all, or fewer where not all were run as text would be.
  virtual Result<size_t> reusable(const std::vector<int64_t>&) {
    return held_.size();
  }

  /// Runs `n` ids of a text from the one at `first` on, where the cache ends.
  virtual Result<LogitsView>
  run_text(const std::vector<int64_t>& text, size_t first, size_t n) = 0;

  /// Runs the nodes of a tree from `first` on, which the cache knows of. There are
  /// positions for all nodes.
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
  Result<std::optional<LogitsView>> read(const std::vector<int64_t>& text);
  Result<LogitsView> run_level(const TokenTree& tree, size_t n);
  Result<void> keep(const std::vector<int32_t>& accepted);

  /// Destroyed before the program, so that nothing is bound to the cache any more
  /// when the program, which keeps it alive, lets go of it.
  CacheSession<TreeCache> session_;
  /// The ids in the cache.
  std::vector<int64_t> held_;
  /// The ids of the nodes of the last tree that are there besides: its root is an
  /// id of the text, and its last level is never run.
  std::vector<int64_t> run_;
  /// Of a forward, by its tokens.
  LatencyModel latency_;
};

} // namespace etkv::examples
