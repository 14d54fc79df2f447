#include "examples/common/log.hpp"

#include <cstdlib>
#include <string_view>

#include <executorch/runtime/platform/platform.h>

namespace etkv::examples {
namespace {

void discard(
    et_timestamp_t,
    et_pal_log_level_t,
    const char*,
    const char*,
    size_t,
    const char*,
    size_t) {}

} // namespace

void quiet_executorch() {
  const char* verbose = std::getenv("ETKV_VERBOSE");
  if (verbose != nullptr && std::string_view(verbose) != "0" &&
      std::string_view(verbose) != "") {
    return;
  }
  executorch::runtime::register_pal(
      executorch::runtime::PalImpl::create(discard, __FILE__));
}

} // namespace etkv::examples
