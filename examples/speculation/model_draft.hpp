// Guesses of a smaller model, on a tree cache of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
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

  /// Opens the program at `path`, and makes a session for it.
  static Result<std::unique_ptr<Draft>> open(
      const std::string& path,
      const Target& target);

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
  Result<LogitsView> read(const std::vector<int64_t>& text);
  Result<LogitsView> run_level(size_t n);

  // Before the program, which is bound to its cache.
  Program program_;
  CacheSession<TreeCache> session_;
  /// The ids in the cache, and how many nodes of the last tree are there besides:
  /// its root is an id of the text, and its last level is never run.
  std::vector<int64_t> held_;
  TokenTree tree_{0};
  size_t run_ = 0;
  /// Of a forward, by its tokens.
  Costs costs_;
};

} // namespace etkv::examples
