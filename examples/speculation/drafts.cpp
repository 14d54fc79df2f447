#include "examples/speculation/drafts.hpp"

#include <utility>

#include "examples/speculation/hidden_state_draft.hpp"
#include "examples/speculation/model_draft.hpp"

namespace etkv::examples {

Result<std::unique_ptr<Draft>> open_draft(
    const std::string& path,
    const DraftTarget& target) {
  auto program = Program::open(path);
  if (!program.ok()) {
    return of_draft(program.error());
  }
  const auto make =
      program->draft_tap() ? HiddenStateDraft::make : ModelDraft::make;
  auto draft = make(std::move(program.value()), target);
  return draft.ok() ? std::move(draft) : of_draft(draft.error());
}

} // namespace etkv::examples
