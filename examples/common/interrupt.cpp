#include "examples/common/interrupt.hpp"

#include <csignal>

namespace etkv::examples {
namespace {

volatile std::sig_atomic_t noted = 0;

extern "C" void note_interrupt(int) {
  noted = 1;
}

} // namespace

void arm_interrupt() {
  noted = 0;
  struct sigaction action{};
  action.sa_handler = note_interrupt;
  // Without SA_RESTART, Ctrl-C also interrupts a read of the next line.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
}

bool interrupted() {
  return noted != 0;
}

} // namespace etkv::examples
