// What the host tells of a step, in one copy.

namespace etkv {

constexpr int MOST_TOKENS = 16;

struct Step {
  // The keys that the last token sees: those before the step and those of it.
  int keys;
  // The tiles of keys that are listed, if the step has a mask.
  int tiles;
  int unused[2];
  int ids[MOST_TOKENS];
  int positions[MOST_TOKENS];
  int slots[MOST_TOKENS];
};
static_assert(sizeof(Step) == 208, "as the host has it");

}  // namespace etkv
