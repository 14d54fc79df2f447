#include "examples/speculation/model_draft.hpp"

#include <utility>

#include "examples/common/try.hpp"

namespace etkv::examples {

Result<std::unique_ptr<Draft>> ModelDraft::make(
    Program program,
    const DraftTarget& target) {
  ASSIGN_OR_RETURN(auto session, make_session(program, target));
  std::unique_ptr<ModelDraft> draft(
      new ModelDraft(std::move(program), std::move(session)));
  RETURN_IF_ERROR(draft->measure());
  return std::unique_ptr<Draft>(std::move(draft));
}

Result<LogitsView>
ModelDraft::run_text(const std::vector<int64_t>& text, size_t first, size_t n) {
  return program_.step_at(text.data() + first, static_cast<int64_t>(first), n);
}

Result<LogitsView> ModelDraft::run_nodes(
    const TokenTree& tree,
    const std::vector<int64_t>& positions,
    size_t first) {
  return program_.step(
      tree.tokens.data() + first,
      positions.data() + first,
      tree.size() - first);
}

} // namespace etkv::examples
