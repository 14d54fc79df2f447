// Attention over pools, for an `Element`, a `DIM`, `STAGES` and `IS_LISTED` that are defined before.

// As the host has it.
struct AttendWork {
  const Element* q;
  const Element* keys;
  const Element* values;
  Element* out;
  const etkv::Step* step;
  const unsigned long long* tiles;
  float* partial;
  long long keys_head, values_head;
  float scale;
  // `slices`: the most of them.
  int tokens, queries, each, slices;
};
static_assert(sizeof(AttendWork) == 96, "as the host has it");

constexpr int MASK = IS_LISTED ? etkv::SEES_LISTED : etkv::SEES_UP_TO_ITSELF;
using Slices = etkv::Slice<Element, DIM, DIM, MASK, STAGES, 4>;

// Where the slices of a block of rows leave theirs: parts of all blocks, and then what they end with.
__device__ inline long long first_part(const AttendWork& work, const Slices& slices, int head, int block) {
  return (static_cast<long long>(block) * work.each + head) * work.slices * slices.rows_of_block();
}

__device__ inline float* stats_of(const AttendWork& work, const Slices& slices) {
  int blocks = (slices.sizes.rows() + slices.rows_of_block() - 1) / slices.rows_of_block();
  return work.partial + first_part(work, slices, 0, blocks) * DIM;
}

__device__ inline void set_sizes(Slices& slices, const AttendWork& work) {
  slices.sizes = {work.queries / work.each, work.tokens, work.step->keys};
  slices.listed = {work.tiles, work.tokens, work.step->tiles};
}

extern "C" __global__ void __launch_bounds__(etkv::THREADS) etkv_attend(const AttendWork work) {
  extern __shared__ uint4 shared_memory[];
  etkv::let_next_begin();
  Slices slices;
  slices.q = {work.q, DIM, static_cast<long long>(work.queries) * DIM, 1};
  slices.k = {work.keys, work.keys_head, DIM, 1};
  slices.v = {work.values, work.values_head, DIM, 1};
  set_sizes(slices, work);
  slices.scale = work.scale * etkv::LOG2_E;
  slices.shared = reinterpret_cast<char*>(shared_memory);
  slices.start();
  // The step came before all kernels, and so did all rows but its own.
  int known = work.step->slots[0];
  for (int t = 1; t < work.tokens; ++t) known = min(known, work.step->slots[t]);
  if (blockIdx.x >= slices.slices) {
    etkv::wait_for_previous();
    return;
  }
  slices.attend_to_slice(known, [] { etkv::wait_for_previous(); });
  long long first = first_part(work, slices, blockIdx.y, blockIdx.z);
  slices.end_slice(work.out, work.partial + first * DIM, stats_of(work, slices) + 2 * first);
}

// A block for each row of each head of keys.
extern "C" __global__ void __launch_bounds__(etkv::THREADS) etkv_merge(const AttendWork work) {
  etkv::let_next_begin();
  Slices slices;
  set_sizes(slices, work);
  slices.divide_rows();
  int r = blockIdx.x, head = blockIdx.y, group = slices.sizes.group;
  int block = r / slices.rows_of_block(), n = slices.slices_of(block, work.slices);
  etkv::wait_for_previous();
  if (n == 1) return;
  long long first = first_part(work, slices, head, block) + r % slices.rows_of_block();
  Element* out = work.out + (static_cast<long long>(r / group) * work.queries + head * group + r % group) * DIM;
  etkv::Merge<Element, DIM>::run(out, work.partial + first * DIM, stats_of(work, slices) + 2 * first,
                                 slices.rows_of_block(), n);
}
