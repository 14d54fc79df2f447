// The end of a process whose static objects throw in their destructors, as
// MLX's do if the CUDA driver ends before them.

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "check.h"

extern "C" void etkv_mlx_end_without_driver();

namespace {

struct Late {
  explicit Late(std::string words) : words(std::move(words)) {}
  ~Late() noexcept(false) {
    throw std::runtime_error(words);
  }
  std::string words;
};

/// Returns the wait status of a process that exits with 7 while a static object
/// throws.
int end_with(const char* words, bool prepared) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    // Hide the message of std::terminate.
    std::freopen("/dev/null", "w", stderr);
    static const Late late(words);
    if (prepared) {
      etkv_mlx_end_without_driver();
    }
    std::exit(7);
  }
  int ended = 0;
  CHECK(child > 0 && waitpid(child, &ended, 0) == child);
  return ended;
}

} // namespace

int main() {
  const char* gone =
      "cudaStreamSynchronize(stream_) failed: driver shutting down";
  const int quiet = end_with(gone, true);
  CHECK(WIFEXITED(quiet) && WEXITSTATUS(quiet) == 7);
  // The process aborts without the preparation, and for other messages.
  const int alone = end_with(gone, false);
  CHECK(WIFSIGNALED(alone) && WTERMSIG(alone) == SIGABRT);
  const int other = end_with("out of memory", true);
  CHECK(WIFSIGNALED(other) && WTERMSIG(other) == SIGABRT);
  return check_report();
}
