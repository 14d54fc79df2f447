// Ctrl-C as a request to stop, which runners check between steps.
#pragma once

namespace etkv::examples {

/// Forgets an earlier Ctrl-C, and records the next one. A second Ctrl-C ends
/// the process, even during a long step.
void arm_interrupt();

/// Returns whether Ctrl-C was pressed since arm_interrupt().
bool interrupted();

} // namespace etkv::examples
