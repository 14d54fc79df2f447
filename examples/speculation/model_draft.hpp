// Draft tokens from a smaller model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "examples/speculation/program_draft.hpp"

namespace etkv::examples {

class ModelDraft : public ProgramDraft {
 public:
  /// Loads a program, and makes a session for it.
  static Result<std::unique_ptr<Draft>> make(
      Program program,
      const DraftTarget& target);

 private:
  using ProgramDraft::ProgramDraft;

  Result<LogitsView>
  run_text(const std::vector<int64_t>& text, size_t first, size_t n) override;
  Result<LogitsView> run_nodes(
      const TokenTree& tree,
      const std::vector<int64_t>& positions,
      size_t first) override;
};

} // namespace etkv::examples
