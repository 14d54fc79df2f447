#include "examples/common/clock.hpp"

#if defined(__APPLE__)
#include <sys/resource.h>
#else
#include <fstream>
#include <limits>
#include <string>
#endif

namespace etkv::examples {

uint64_t peak_memory_bytes() {
#if defined(__APPLE__)
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) {
    return 0;
  }
  return static_cast<uint64_t>(usage.ru_maxrss);
#else
  // getrusage would also count what the process was before it became this one.
  std::ifstream status("/proc/self/status");
  std::string name;
  while (status >> name) {
    if (name == "VmHWM:") {
      uint64_t kibibytes = 0;
      status >> kibibytes;
      return kibibytes * 1024;
    }
    status.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
#endif
}

} // namespace etkv::examples
