// The argument of attention over pools. `Element`, `DIM` and `IS_LISTED` must be defined before.

// The layout is the same on the host.
struct AttendWork {
  const Element* q;
  Element* out;
  const etkv::Step* step;
  const unsigned long long* tiles;
  float* partial;
  etkv::Planes keys, values;
  float scale;
  // `queries` and `each` are the numbers of query heads and KV heads. `slices` is the maximum number of
  // slices.
  int tokens, queries, each, slices;
};
static_assert(sizeof(AttendWork) == 128, "the host has the same layout");

constexpr int MASK = IS_LISTED ? etkv::SEES_LISTED : etkv::SEES_UP_TO_ITSELF;

template <typename Slices>
__device__ inline void set_sizes(Slices& slices, const AttendWork& work) {
  slices.sizes = {work.queries / work.each, work.tokens, work.step->keys};
  slices.divide_rows();
}

// Opens the list of tiles for a block of rows. All blocks of rows of a thread block share one list.
template <typename Slices>
__device__ inline void open_list(Slices& slices, const AttendWork& work, int block) {
  if (!IS_LISTED) return;
  int rows = slices.rows_of_block() * Slices::BLOCKS, blocks = (slices.sizes.rows() + rows - 1) / rows;
  slices.listed.open(work.tiles, work.step->before_tiles, work.tokens, block / Slices::BLOCKS, blocks);
}

template <typename Slices>
__device__ inline void set_queries(Slices& slices, const AttendWork& work, void* shared) {
  slices.q = {work.q, DIM, static_cast<long long>(work.queries) * DIM, 1};
  set_sizes(slices, work);
  slices.scale = work.scale * etkv::LOG2_E;
  slices.shared = static_cast<char*>(shared);
}
