// Opens the draft of a program.
#pragma once

#include <memory>
#include <string>

#include "examples/speculation/program_draft.hpp"

namespace etkv::examples {

/// Opens the program at `path`: a model by itself, or one that is fed with the
/// target's hidden states. Errors of the draft name it, here and later.
Result<std::unique_ptr<Draft>> open_draft(
    const std::string& path,
    const DraftTarget& target);

} // namespace etkv::examples
