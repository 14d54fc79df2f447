// A block of attention over plain pools. Shared memory has room for `STAGES` tiles.

using Rows = etkv::Slice<Element, DIM, DIM, MASK, STAGES, ETKV_ROW_WARPS, true, 1, DIM <= 128 ? 4 : 2>;

struct Block {
  static constexpr int PARTS = 1;
  Rows part[PARTS];

  __device__ void start(const AttendWork& work, void* shared) {
    set_queries(part[0], work, shared);
    part[0].k = {static_cast<const Element*>(work.keys.codes), work.keys.capacity * DIM, DIM, 1};
    part[0].v = {static_cast<const Element*>(work.values.codes), work.values.capacity * DIM, DIM, 1};
    open_list(part[0], work, blockIdx.z);
    part[0].start();
  }

  template <typename Wait>
  __device__ void attend_to_slice(int known, const Wait& wait) {
    part[0].attend_to_slice(known, wait);
  }

  __device__ void end_slice(int, Element* out, float* parts, float* stats) { part[0].end_slice(out, parts, stats); }
};
