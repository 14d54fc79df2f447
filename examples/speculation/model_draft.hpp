// Guesses of a smaller model, on a tree cache of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "examples/common/program.hpp"
#include "examples/speculation/costs.hpp"
#include "examples/speculation/draft.hpp"

namespace etkv::examples {

class ModelDraft : public Draft {
 public:
  /// What a draft is made for.
  struct Target {
    /// Ids that the target knows; the draft has to know the same.
    int64_t vocabulary;
    int32_t capacity;
    /// How keys and values are stored; none for the draft's own dtype.
    std::optional<std::string> kv_format;
  };

  /// Opens the program at `path`, and makes a session for it. Errors of the draft,
  /// here and later, say that they are its own.
  static Result<std::unique_ptr<Draft>> open(
      const std::string& path,
      const Target& target);

  /// No level has more nodes than the draft takes in a step. After Ctrl-C the tree
  /// is as far as it was.
  Result<TokenTree> propose(
      const std::vector<int64_t>& text,
      const TreeShape& shape,
      Sampler& sampler) override;

  Result<void> commit(const std::vector<int32_t>& accepted) override;

  double seconds(int64_t depth, int64_t width) const override;

 private:
  ModelDraft(Program program, CacheSession<TreeCache> session)
      : program_(std::move(program)), session_(std::move(session)) {}

  TreeCache& cache() {
    return session_.cache();
  }
  static Result<std::unique_ptr<Draft>> open_program(
      const std::string& path,
      const Target& target);
  Result<TokenTree> grow(
      const std::vector<int64_t>& text,
      const TreeShape& shape,
      Sampler& sampler);
  Result<std::optional<LogitsView>> read(const std::vector<int64_t>& text);
  Result<LogitsView> run_level(const TokenTree& tree, size_t n);
  Result<void> keep(const std::vector<int32_t>& accepted);

  Program program_;
  /// Destroyed before the program, so that nothing is bound to the cache any more
  /// when the program, which keeps it alive, lets go of it.
  CacheSession<TreeCache> session_;
  /// The ids in the cache.
  std::vector<int64_t> held_;
  /// The ids of the nodes of the last tree that are there besides: its root is an
  /// id of the text, and its last level is never run.
  std::vector<int64_t> run_;
  /// Of a forward, by its tokens.
  Costs costs_;
};

} // namespace etkv::examples
