// Ctrl-C as a request to stop, asked for between steps.
#pragma once

namespace etkv::examples {

/// From now on the first Ctrl-C is noted, and a second ends the process: a step
/// that takes long must not keep a person waiting. Forgets an earlier one.
void arm_interrupt();

/// Whether Ctrl-C came since arm_interrupt().
bool interrupted();

} // namespace etkv::examples
