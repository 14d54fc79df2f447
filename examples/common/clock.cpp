#include "examples/common/clock.hpp"

#if defined(__APPLE__)
#include <mach/mach.h>
#include <sys/resource.h>
#else
#include <fstream>
#include <limits>
#include <string>
#endif

namespace etkv::examples {

#if defined(__APPLE__)

uint64_t memory_bytes() {
  mach_task_basic_info info{};
  mach_msg_type_number_t count = MACH_TASK_BASIC_INFO_COUNT;
  const auto code = task_info(
      mach_task_self(),
      MACH_TASK_BASIC_INFO,
      reinterpret_cast<task_info_t>(&info),
      &count);
  return code == KERN_SUCCESS ? info.resident_size : 0;
}

uint64_t peak_memory_bytes() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) {
    return 0;
  }
  return static_cast<uint64_t>(usage.ru_maxrss);
}

#else

namespace {

/// Returns the bytes in a line of /proc/self/status. getrusage would also count
/// the memory of the program that this process ran before exec.
uint64_t status_bytes(const char* line) {
  std::ifstream status("/proc/self/status");
  std::string name;
  while (status >> name) {
    if (name == line) {
      uint64_t kibibytes = 0;
      status >> kibibytes;
      return kibibytes * 1024;
    }
    status.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

} // namespace

uint64_t memory_bytes() {
  return status_bytes("VmRSS:");
}

uint64_t peak_memory_bytes() {
  return status_bytes("VmHWM:");
}

#endif

etkv_mlx_memory mlx_memory() {
  etkv_mlx_memory memory{};
  memory.struct_size = sizeof(memory);
  etkv_mlx_memory_read(&memory, nullptr);
  return memory;
}

} // namespace etkv::examples
