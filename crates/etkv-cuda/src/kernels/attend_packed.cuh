// A block of attention if keys, values or both are packed. Shared memory has room for `STAGES` tiles.

using Packed =
    etkv::PackedSlice<Element, ETKV_KEYS, ETKV_VALUES, DIM, MASK, STAGES, ETKV_ROW_TILES, ETKV_ROW_WARPS>;
using Rows = Packed::Rows;

static_assert(Packed::STAGE == ETKV_STAGE, "the host has the same layout");

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
