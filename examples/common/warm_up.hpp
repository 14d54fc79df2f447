// Warms programs up before their first token.
#pragma once

#include "etkv/etkv.hpp"
#include "examples/common/program.hpp"

namespace etkv::examples {

/// Warms up an MLX program that was loaded with `cache`. Shows the steps on a
/// terminal. Does nothing on a CPU.
Result<void> warm_up_with_progress(const Program& program, const Cache& cache);

/// Loads a program on a session's cache, and warms it up.
template <typename Face>
Result<void>
load_warm(Program& program, CacheSession<Face>& session, Logits rows) {
  if (auto loaded = program.load(session.key(), rows); !loaded.ok()) {
    return loaded;
  }
  return warm_up_with_progress(program, session.cache());
}

} // namespace etkv::examples
