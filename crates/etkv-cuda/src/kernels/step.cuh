// The inputs of a step, which the host copies to the device.

namespace etkv {

constexpr int MAX_TOKENS = 64;

struct Step {
  // Attention reads the slots below this number, which include those of the step.
  int keys;
  // The number of 64-bit words before the tiles in the step's mask, if it has one.
  int before_tiles;
  int unused[2];
  int ids[MAX_TOKENS];
  int positions[MAX_TOKENS];
  // Negative for padding tokens.
  int slots[MAX_TOKENS];
};
static_assert(sizeof(Step) == 784, "the host has the same layout");

}  // namespace etkv
