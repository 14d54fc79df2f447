// The end of a process that has used a GPU. Some of MLX's static objects may outlive
// the CUDA driver: they ask it for something once more in their destructors, and throw,
// so that a process that did all its work ends in an abort
// (https://github.com/ml-explore/mlx/pull/4480, /4531). Their order is that in which
// they were made, which is the host's where it has used MLX before. MLX's
// clear_streams() comes too late in a handler of exit(): what it clears for the thread
// is destroyed by then.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>

// Says which C library it is, once one of its headers was read.
#if defined(__GLIBC__)

#include <dlfcn.h>
#include <unistd.h>

namespace {

int status = 0;
std::terminate_handler otherwise = nullptr;

bool driver_is_gone() {
  try {
    if (const auto thrown = std::current_exception()) {
      std::rethrow_exception(thrown);
    }
  } catch (const std::exception& error) {
    return std::strstr(error.what(), "driver shutting down") != nullptr;
  } catch (...) {
  }
  return false;
}

/// Ends the process as it was about to end, where it would abort for a driver that
/// has nothing left to do.
[[noreturn]] void on_terminate() {
  if (driver_is_gone()) {
    std::cout.flush();
    std::fflush(nullptr);
    _exit(status);
  }
  if (otherwise != nullptr) {
    otherwise();
  }
  std::abort();
}

void at_exit(int code, void*) {
  status = code;
  otherwise = std::set_terminate(on_terminate);
}

} // namespace

/// Call it after MLX has made its first stream: what is registered last runs first.
extern "C" __attribute__((visibility("hidden"))) void
etkv_mlx_end_without_driver() {
  // exit() calls into this library: it stays.
  Dl_info here;
  if (dladdr(reinterpret_cast<void*>(at_exit), &here) != 0) {
    dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
  }
  // A full table of handlers leaves things as they are.
  on_exit(at_exit, nullptr);
}

#else

extern "C" __attribute__((visibility("hidden"))) void
etkv_mlx_end_without_driver() {}

#endif
