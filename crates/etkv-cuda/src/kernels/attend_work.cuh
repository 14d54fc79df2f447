// What attention over pools gets from the host, for an `Element`, a `DIM` and `IS_LISTED` that are defined before.

// As the host has it.
struct AttendWork {
  const Element* q;
  Element* out;
  const etkv::Step* step;
  const unsigned long long* tiles;
  float* partial;
  etkv::Planes keys, values;
  float scale;
  // `slices`: the most of them.
  int tokens, queries, each, slices;
};
static_assert(sizeof(AttendWork) == 128, "as the host has it");

constexpr int MASK = IS_LISTED ? etkv::SEES_LISTED : etkv::SEES_UP_TO_ITSELF;

template <typename Slices>
__device__ inline void set_sizes(Slices& slices, const AttendWork& work) {
  slices.sizes = {work.queries / work.each, work.tokens, work.step->keys};
  slices.divide_rows();
}

// Opens the list of a block of rows, of which a block of threads has `PARTS`.
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
