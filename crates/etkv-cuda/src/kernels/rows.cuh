// Views of rows, masks, and small functions on scores.

namespace etkv {

constexpr float LOG2_E = 1.4426950408889634f;
// All threads of a warp.
constexpr unsigned ALL = 0xffffffffu;

enum Masks { SEES_ALL, SEES_UP_TO_ITSELF, SEES_MARKED, SEES_LISTED };

// Rows of several heads, with a stride for each axis.
template <typename E>
struct View {
  const E* data;
  long long head, row, column;

  __device__ const E* at(int h, int r) const { return data + h * head + r * row; }

  // Returns whether each row is contiguous and aligned to 16 bytes.
  __device__ bool is_aligned() const {
    long long misfits = (head * sizeof(E)) | (row * sizeof(E)) | reinterpret_cast<long long>(data);
    return column == 1 && misfits % 16 == 0;
  }
};

// A mask with an element for each query and key. Along a broadcast axis the stride is 0.
struct Marks {
  const bool* data;
  long long query, key;
};

// A mask as lists of tiles. For each block of rows, there is a list of the tiles in which a query of the
// block sees a key. A tile has its number, and a bit for each of its keys and each query. Other tiles are not
// read.
struct TileList {
  // The list of this block. An item has the number of a tile in its lower half, and the index of the tile in
  // its upper half.
  const unsigned long long* lists;
  const unsigned long long* tiles;
  int queries, count;

  // `data` has the ends of all blocks' lists, the lists, and the tiles. `before` is the number of
  // 64-bit words before the tiles.
  __device__ void open(const unsigned long long* data, int before, int all_queries, int block, int blocks) {
    tiles = data + before;
    queries = all_queries;
    int begin = block ? static_cast<int>(data[block - 1]) : 0;
    count = static_cast<int>(data[block]) - begin;
    lists = data + blocks + begin;
  }

  __device__ int number(int i) const { return static_cast<int>(lists[i]); }
  __device__ unsigned long long bits(int i, int query) const {
    return tiles[static_cast<long long>(lists[i] >> 32) * (1 + queries) + 1 + query];
  }
};

struct Sizes {
  int group, queries, keys;

  __device__ int rows() const { return group * queries; }
};

template <typename E>
__device__ inline unsigned pair_of(E low, E high) {
  unsigned short bits[2];
  memcpy(&bits[0], &low, 2);
  memcpy(&bits[1], &high, 2);
  return bits[0] | static_cast<unsigned>(bits[1]) << 16;
}

// Returns the sum or the maximum of `x` over the threads of a warp whose numbers differ by a
// multiple of `FROM` that is below `TO`.
template <int FROM, int TO>
__device__ inline float over_threads(float x, bool adds) {
  for (int step = FROM; step < TO; step *= 2) {
    float other = __shfl_xor_sync(ALL, x, step);
    x = adds ? x + other : fmaxf(x, other);
  }
  return x;
}

// The same over the four threads that share a row of a product, and over the eight that share a column.
__device__ inline float over_row(float x, bool adds) { return over_threads<1, 4>(x, adds); }
__device__ inline float over_column(float x, bool adds) { return over_threads<4, 32>(x, adds); }

// Returns the weight of a part of a row. `most` is the maximum score of the part, and `highest` that of the
// whole row. Scores are in units of log 2, so the weight is a power of 2. It is 0 if the part sees no key.
__device__ inline float weight_of(float most, float highest) {
  return most == -INFINITY ? 0.0f : power_of_two(most - highest);
}

}  // namespace etkv
