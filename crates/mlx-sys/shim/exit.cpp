// The end of a process that has used a GPU. Some static objects of MLX may outlive the CUDA driver. Their destructors
// call the driver, fail and throw, so that a process that did all its work is aborted
// (https://github.com/ml-explore/mlx/pull/4480, /4531). The order of destruction depends on the order of creation,
// which the host determines if it has used MLX earlier. Calling MLX's clear_streams() in a handler of exit() is too
// late: the objects that it clears belong to the thread and are already destroyed.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>

// A header must be included before this check, to define the macro of the C library.
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

/// Ends the process with its own exit status if it would be aborted only because the driver has already shut down.
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

/// Must be called after MLX has created its first stream, because the handler that is registered last runs first.
extern "C" __attribute__((visibility("hidden"))) void
etkv_mlx_end_without_driver() {
  // exit() calls into this library, so the library must stay loaded.
  Dl_info here;
  if (dladdr(reinterpret_cast<void*>(at_exit), &here) != 0) {
    dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
  }
  // If the table of handlers is full, nothing changes.
  on_exit(at_exit, nullptr);
}

#else

extern "C" __attribute__((visibility("hidden"))) void
etkv_mlx_end_without_driver() {}

#endif
