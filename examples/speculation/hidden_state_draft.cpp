#include "examples/speculation/hidden_state_draft.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

std::string listed(const std::vector<int64_t>& layers) {
  std::string list;
  for (const int64_t layer : layers) {
    list += (list.empty() ? "" : ", ") + std::to_string(layer);
  }
  return (layers.size() == 1 ? "layer " : "layers ") + list;
}

/// Returns the byte offset of the hidden states of the draft's layer in a row
/// of the target's hidden states.
Result<size_t> find_tap(const Program& program, const DraftTarget& target) {
  const int64_t wanted = *program.draft_tap();
  const auto& taps = target.tap_layers;
  const auto tap = std::find(taps.begin(), taps.end(), wanted);
  if (tap == taps.end()) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "it needs the hidden states of layer " + std::to_string(wanted) +
            ", and the model returns " +
            (taps.empty() ? "none" : "those of " + listed(taps)) +
            ": export the model with --tap-layers " + std::to_string(wanted));
  }
  const HiddenStateType taken = *program.hidden_state_type();
  const HiddenStateType given = *target.hidden_state_type;
  const auto n_taps = static_cast<int64_t>(taps.size());
  const HiddenStateType each{given.element, given.width / n_taps};
  if (!(each == taken) || given.width % n_taps != 0) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "it needs hidden states of " + taken.describe() +
            ", and the model returns hidden states of " + each.describe() +
            ": export both from one model with the same --dtype");
  }
  return static_cast<size_t>(tap - taps.begin()) * taken.bytes();
}

} // namespace

Result<std::unique_ptr<Draft>> HiddenStateDraft::make(
    Program program,
    const DraftTarget& target) {
  ASSIGN_OR_RETURN(const size_t offset, find_tap(program, target));
  ASSIGN_OR_RETURN(auto session, make_session(program, target));
  std::unique_ptr<HiddenStateDraft> draft(new HiddenStateDraft(
      std::move(program),
      std::move(session),
      *target.hidden_state_type,
      offset));
  RETURN_IF_ERROR(draft->measure());
  return std::unique_ptr<Draft>(std::move(draft));
}

void HiddenStateDraft::saw(
    int64_t position,
    const HiddenStatesView& hidden_states) {
  const auto first = static_cast<size_t>(position);
  if (first > seen() || !(hidden_states.type == given_type_)) {
    // Ignore rows after a gap. reusable() will refuse the text.
    return;
  }
  hidden_states_.resize(first * type_.bytes());
  for (int64_t i = 0; i < hidden_states.rows; ++i) {
    const auto* row = hidden_states.row(i) + offset_;
    hidden_states_.insert(hidden_states_.end(), row, row + type_.bytes());
  }
  known_ = std::min(known_, first);
}

Result<size_t> HiddenStateDraft::reusable(const std::vector<int64_t>& text) {
  const size_t needed = text.size() - 1;
  if (seen() < needed) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT,
        "the model's hidden states of position " + std::to_string(seen()) +
            " are missing, and the text has " + std::to_string(needed) +
            " positions before its last");
  }
  // Later rows belong to another text.
  hidden_states_.resize(needed * type_.bytes());
  known_ = std::min(known_, needed);
  return known_;
}

Result<LogitsView> HiddenStateDraft::run_text(
    const std::vector<int64_t>& text,
    size_t first,
    size_t n) {
  given_.clear();
  const size_t last = text.size() - 1;
  const std::vector<std::byte> nothing(type_.bytes());
  std::vector<int64_t> positions;
  for (size_t i = first; i < first + n; ++i) {
    // The target has not run the last id, so use the row of the previous id.
    const size_t row = i < last ? i : std::max<size_t>(i, 1) - 1;
    const std::byte* at = row < last
                              ? hidden_states_.data() + row * type_.bytes()
                              : nothing.data();
    given_.add(at, type_.bytes(), i < last);
    positions.push_back(static_cast<int64_t>(i));
  }
  ASSIGN_OR_RETURN(
      const auto logits,
      program_.step(text.data() + first, positions.data(), n, given_));
  known_ = std::min(first + n, last);
  const auto& root = program_.hidden_states()->row(static_cast<int64_t>(n) - 1);
  handed_on_.assign(root, root + type_.bytes());
  return logits;
}

Result<LogitsView> HiddenStateDraft::run_nodes(
    const TokenTree& tree,
    const std::vector<int64_t>& positions,
    size_t first) {
  given_.clear();
  for (size_t node = first; node < tree.size(); ++node) {
    const auto parent = static_cast<size_t>(tree.parents[node]);
    given_.add(
        handed_on_.data() + parent * type_.bytes(), type_.bytes(), false);
  }
  const size_t n = tree.size() - first;
  ASSIGN_OR_RETURN(
      const auto logits,
      program_.step(
          tree.tokens.data() + first, positions.data() + first, n, given_));
  const auto* rows = program_.hidden_states()->data;
  handed_on_.insert(handed_on_.end(), rows, rows + n * type_.bytes());
  return logits;
}

} // namespace etkv::examples
