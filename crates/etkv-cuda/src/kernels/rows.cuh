// Rows as the kernel gets them, and small functions on scores.

namespace etkv {

constexpr float LOG2_E = 1.4426950408889634f;
// All threads of a warp.
constexpr unsigned ALL = 0xffffffffu;

enum Masks { SEES_ALL, SEES_UP_TO_ITSELF, SEES_MARKED, SEES_LISTED };

// Rows of one head after another, each axis with its own stride.
template <typename E>
struct View {
  const E* data;
  long long head, row, column;

  __device__ const E* at(int h, int r) const { return data + h * head + r * row; }

  // Returns whether each row consists of whole, aligned groups of 16 bytes.
  __device__ bool is_aligned() const {
    long long misfits = (head * sizeof(E)) | (row * sizeof(E)) | reinterpret_cast<long long>(data);
    return column == 1 && misfits % 16 == 0;
  }
};

// The mask: which keys a query sees, with a stride of 0 along an axis that repeats.
struct Marks {
  const bool* data;
  long long query, key;
};

// The mask as lists of the tiles of keys in which a query sees some. Each block of rows has a list of its own;
// of each tile there is the number, and a bit for each of its keys and each query. Other tiles are not read.
struct TileList {
  // The ends of the blocks' lists, and these lists: of each tile its number, and above that its place.
  const unsigned long long* lists;
  const unsigned long long* tiles;
  int queries, count;

  // `before`: how many numbers come before the tiles.
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

// The sum of `x`, or the greatest, of the threads of a warp whose numbers differ by a multiple of `FROM` below `TO`.
template <int FROM, int TO>
__device__ inline float over_threads(float x, bool adds) {
  for (int step = FROM; step < TO; step *= 2) {
    float other = __shfl_xor_sync(ALL, x, step);
    x = adds ? x + other : fmaxf(x, other);
  }
  return x;
}

// That of the four threads of a row of a product, and of the eight of a column.
__device__ inline float over_row(float x, bool adds) { return over_threads<1, 4>(x, adds); }
__device__ inline float over_column(float x, bool adds) { return over_threads<4, 32>(x, adds); }

// The weight of a part of a row whose largest score is `most` where that of the row is `highest`.
// Scores are multiples of log 2, so that the weight is a power of 2. Where nothing is seen, it is 0.
__device__ inline float weight_of(float most, float highest) {
  return most == -INFINITY ? 0.0f : power_of_two(most - highest);
}

}  // namespace etkv
