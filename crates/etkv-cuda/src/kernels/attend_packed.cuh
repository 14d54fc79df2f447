// A block of attention over pools of which one is packed or both are, with `STAGES` tiles at a time.

using Packed =
    etkv::PackedSlice<Element, ETKV_KEYS, ETKV_VALUES, DIM, MASK, STAGES, ETKV_ROW_TILES, ETKV_ROW_WARPS>;
using Rows = Packed::Rows;

static_assert(Packed::STAGE == ETKV_STAGE, "as the host has it");

struct Block : Packed {
  __device__ void start(const AttendWork& work, void* shared) {
    for (int i = 0; i < PARTS; ++i) {
      set_queries(part[i], work, shared);
      open_list(part[i], work, blockIdx.z * PARTS + i);
      part[i].v = {};
    }
    Packed::start(work.keys, work.values);
  }
};
