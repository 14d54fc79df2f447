#include "examples/common/warm_up.hpp"

#include <unistd.h>

#include <cstdio>

namespace etkv::examples {

Result<void> warm_up_with_progress(const Program& program, const Cache& cache) {
  if (program.params().backend_id != kMLXBackend) {
    return {};
  }
  const bool watched = isatty(fileno(stderr)) != 0;
  return warm_up(cache, [&](size_t done, size_t steps) {
    if (!watched) {
      return;
    }
    std::fputs("\r\033[K", stderr);
    if (done < steps) {
      std::fprintf(stderr, "warming up the GPU: %zu of %zu steps", done, steps);
    }
    std::fflush(stderr);
  });
}

} // namespace etkv::examples
