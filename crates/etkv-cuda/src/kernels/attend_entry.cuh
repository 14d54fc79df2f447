// Kernels of attention over pools. `Block` and its `Rows` must be defined before.

// Returns the first row of a block's slices in `partial`. The partial sums of all blocks come first. The
// statistics (maximum score and sum of weights of each row) follow.
__device__ inline long long first_part(const AttendWork& work, const Rows& slices, int head, int block) {
  return (static_cast<long long>(block) * work.each + head) * work.slices * slices.rows_of_block();
}

__device__ inline float* stats_of(const AttendWork& work, const Rows& slices) {
  int blocks = (slices.sizes.rows() + slices.rows_of_block() - 1) / slices.rows_of_block();
  return work.partial + first_part(work, slices, 0, blocks) * DIM;
}

// The host expects `ETKV_BLOCKS` blocks on a multiprocessor.
extern "C" __global__ void __launch_bounds__(etkv::THREADS, ETKV_BLOCKS) etkv_attend(const AttendWork work) {
  extern __shared__ uint4 shared_memory[];
  etkv::let_next_begin();
  Block block;
  block.start(work, shared_memory);
  // The step's inputs and the keys of earlier steps were written before the first kernel of this step. Only
  // the step's own slots may still be written. Padding tokens have no slot.
  int known = work.step->keys;
  for (int t = 0; t < work.tokens; ++t) {
    int slot = work.step->slots[t];
    if (slot >= 0) known = min(known, slot);
  }
  if (blockIdx.x >= block.part[0].slices) {
    etkv::wait_for_previous();
    return;
  }
  block.attend_to_slice(known, [] { etkv::wait_for_previous(); });
#pragma unroll
  for (int i = 0; i < Block::PARTS; ++i) {
    long long first = first_part(work, block.part[i], blockIdx.y, block.part[i].block);
    block.end_slice(i, work.out, work.partial + first * DIM, stats_of(work, block.part[i]) + 2 * first);
  }
}

// Merges the slices of one row of one KV head.
template <typename Merge>
__device__ inline void merge(const AttendWork& work) {
  etkv::let_next_begin();
  Rows slices;
  set_sizes(slices, work);
  int r = blockIdx.x, head = blockIdx.y, group = slices.sizes.group, block = r / slices.rows_of_block();
  open_list(slices, work, block);
  int n = slices.slices_of(block, work.slices);
  etkv::wait_for_previous();
  if (n == 1) return;
  long long first = first_part(work, slices, head, block) + r % slices.rows_of_block();
  Element* out = work.out + (static_cast<long long>(r / group) * work.queries + head * group + r % group) * DIM;
  Merge::run(out, work.partial + first * DIM, stats_of(work, slices) + 2 * first, slices.rows_of_block(), n);
}

// There is one block for each row. With fewer blocks, each can use more threads and registers.
extern "C" __global__ void __launch_bounds__(256) etkv_merge_few(const AttendWork work) {
  merge<etkv::Merge<Element, DIM, 256, 8>>(work);
}

extern "C" __global__ void __launch_bounds__(128) etkv_merge_some(const AttendWork work) {
  merge<etkv::Merge<Element, DIM, 128, 8>>(work);
}

extern "C" __global__ void __launch_bounds__(128) etkv_merge_many(const AttendWork work) {
  merge<etkv::Merge<Element, DIM, 128, 4>>(work);
}
