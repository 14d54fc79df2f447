// Opens the draft of a program.
#pragma once

#include <memory>
#include <string>

#include "examples/speculation/program_draft.hpp"

namespace etkv::examples {

/// Opens the program at `path`: an independent model, or a draft that reads the
/// target's hidden states. Error messages of this call and of the draft begin
/// with "the draft".
Result<std::unique_ptr<Draft>> open_draft(
    const std::string& path,
    const DraftTarget& target);

} // namespace etkv::examples
