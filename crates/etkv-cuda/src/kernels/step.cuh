// What the host tells of a step, in one copy.

namespace etkv {

constexpr int MAX_TOKENS = 64;

struct Step {
  // One past the last row of the pools that is read, the step's own rows among them.
  int keys;
  // How many numbers come before the tiles of keys, if the step has a mask.
  int before_tiles;
  int unused[2];
  int ids[MAX_TOKENS];
  int positions[MAX_TOKENS];
  // Less than 0 for a token that only fills up.
  int slots[MAX_TOKENS];
};
static_assert(sizeof(Step) == 784, "as the host has it");

}  // namespace etkv
