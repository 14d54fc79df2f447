// Draft tokens from the model's last layers. These layers read the hidden
// states of the layer below them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "examples/speculation/program_draft.hpp"

namespace etkv::examples {

/// Keeps the target's hidden states of each position of the text. The draft's
/// cache holds rows computed from these states. Rows that were computed from
/// the draft's own states are dropped, and computed again once the target's
/// states are known.
class HiddenStateDraft : public ProgramDraft {
 public:
  /// Loads a program, and makes a session for it. Refuses a target that does
  /// not return the hidden states that the draft needs.
  static Result<std::unique_ptr<Draft>> make(
      Program program,
      const DraftTarget& target);

  void saw(int64_t position, const HiddenStatesView& hidden_states) override;

  Result<void> commit(const std::vector<int32_t>&) override {
    return ProgramDraft::commit({});
  }

 private:
  HiddenStateDraft(
      Program program,
      CacheSession<TreeCache> session,
      HiddenStateType given,
      size_t offset)
      : ProgramDraft(std::move(program), std::move(session)),
        type_(*program_.hidden_state_type()),
        given_type_(given),
        offset_(offset) {}

  /// Refuses a text unless the hidden states of all ids except the last are
  /// known.
  Result<size_t> reusable(const std::vector<int64_t>& text) override;
  Result<LogitsView>
  run_text(const std::vector<int64_t>& text, size_t first, size_t n) override;
  Result<LogitsView> run_nodes(
      const TokenTree& tree,
      const std::vector<int64_t>& positions,
      size_t first) override;

  /// Returns the number of positions whose hidden states are known.
  size_t seen() const {
    return hidden_states_.size() / type_.bytes();
  }

  /// The type of the draft's rows, the type of the target's rows, and the byte
  /// offset of the draft's part in a target row.
  HiddenStateType type_;
  HiddenStateType given_type_;
  size_t offset_;
  /// The target's rows, one for each position of the text, beginning with the
  /// first.
  std::vector<std::byte> hidden_states_;
  /// The number of leading ids in the cache that ran with rows of the target.
  size_t known_ = 0;
  /// The hidden states that the draft returned for the nodes of the tree, the
  /// root first.
  std::vector<std::byte> handed_on_;
  GivenHiddenStates given_;
};

} // namespace etkv::examples
