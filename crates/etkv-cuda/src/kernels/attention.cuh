// Attention of several queries over many keys, in one launch. Each block computes a slice of the keys, and
// the last block to finish merges the results of all slices.

namespace etkv {

// The maximum number of slices that are merged in one step. If there are more, groups of slices are merged
// first.
constexpr int MAX_MERGED = 16;
constexpr int GROUP = 8;
constexpr int MAX_GROUPS = 8;

template <typename E, int DK, int DV, int MASK, int STAGES, int MAX_ROW_WARPS>
struct Attention : Slice<E, DK, DV, MASK, STAGES, MAX_ROW_WARPS> {
  using Base = Slice<E, DK, DV, MASK, STAGES, MAX_ROW_WARPS>;
  using Base::first_row, Base::leave, Base::rows_of_block, Base::shared, Base::sizes, Base::slices,
      Base::write;

  // Merges the `n` slices `first`, `first + step`, and so on. If these are all slices, writes the result.
  // Otherwise replaces the partial result of slice `first` by the merged one.
  __device__ void merge(E* out, float* parts, float* stats, int first, int n, int step, bool is_all) {
    int rows = rows_of_block();
    float* weights = reinterpret_cast<float*>(shared);
    float* wholes = weights + MAX_MERGED * rows;
    float* mosts = wholes + MAX_MERGED * rows;
    for (int i = threadIdx.x; i < n * rows; i += THREADS) {
      const float* from = stats + 2 * ((first + i / rows * step) * rows + i % rows);
      weights[i] = __ldcg(from);
      wholes[i] = __ldcg(from + 1);
    }
    __syncthreads();
    for (int r = threadIdx.x; r < rows; r += THREADS) {
      float highest = -INFINITY, whole = 0;
      for (int i = r; i < n * rows; i += rows) highest = fmaxf(highest, weights[i]);
      for (int i = r; i < n * rows; i += rows) {
        weights[i] = weight_of(weights[i], highest);
        whole += weights[i] * wholes[i];
      }
      wholes[r] = whole;
      mosts[r] = highest;
    }
    __syncthreads();
    // To hide the latency of global memory, a thread loads two pieces of eight slices at a time.
    constexpr int PIECES = DV / 4;
    for (int i = threadIdx.x; i < rows * PIECES; i += 2 * THREADS) {
      float sums[2][4] = {};
      for (int from = 0; from < n; from += 8) {
        float4 loaded[2][8];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          int piece = i + j / 8 * THREADS, slice = from + j % 8;
          // A row sees no key in slices that contain only keys of other sequences.
          bool counts = slice < n && piece < rows * PIECES && weights[slice * rows + piece / PIECES] != 0;
          const float* at = parts + static_cast<long long>(first + slice * step) * rows * DV + 4 * piece;
          loaded[j / 8][j % 8] = make_float4(0, 0, 0, 0);
          if (counts) loaded[j / 8][j % 8] = __ldcg(reinterpret_cast<const float4*>(at));
        }
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          int piece = i + j / 8 * THREADS, slice = from + j % 8;
          bool exists = slice < n && piece < rows * PIECES;
          float weight = exists ? weights[slice * rows + piece / PIECES] : 0;
          float4 x = loaded[j / 8][j % 8];
          float* sum = sums[j / 8];
          sum[0] += weight * x.x;
          sum[1] += weight * x.y;
          sum[2] += weight * x.z;
          sum[3] += weight * x.w;
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int piece = i + j * THREADS, r = piece / PIECES, column = piece % PIECES * 4;
        if (first_row() + r >= sizes.rows() || r >= rows) break;
        if (is_all) {
          write(out, first_row() + r, column, sums[j], wholes[r]);
        } else {
          leave(parts, stats, first * rows + r, column, sums[j], mosts[r], wholes[r]);
        }
      }
    }
  }

  // Returns whether this block is the last of `n` blocks to call this. The writes of the other blocks are
  // then visible to it.
  __device__ bool is_last(unsigned* count, int n) {
    int* answer = reinterpret_cast<int*>(shared);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      *answer = atomicAdd(count, 1u) == n - 1;
      if (*answer) *count = 0;
    }
    __syncthreads();
    bool last = *answer;
    __syncthreads();
    __threadfence();
    return last;
  }

  // `counts` counts finished blocks, and is 0 before and after the launch. Many slices are merged in two
  // steps, so that the last block reads less.
  __device__ void run(E* out, float* partial, unsigned* counts) {
    this->start();
    int slice = blockIdx.x, rows_of_blocks = blockIdx.z * gridDim.y + blockIdx.y;
    // The grid may be larger than this number of keys needs.
    if (slice >= slices) return;
    this->attend_to_slice();
    long long rows = static_cast<long long>(gridDim.x) * rows_of_block();
    float* parts = partial + rows_of_blocks * rows * DV;
    float* stats = partial + gridDim.z * gridDim.y * rows * DV + 2 * rows_of_blocks * rows;
    this->end_slice(out, parts, stats);
    if (slices == 1) return;
    if (slices <= MAX_MERGED) {
      if (is_last(counts + rows_of_blocks, slices)) merge(out, parts, stats, 0, slices, 1, true);
      return;
    }
    int groups = (slices + GROUP - 1) / GROUP, first = slice / GROUP * GROUP;
    int members = first + GROUP <= slices ? GROUP : slices - first;
    counts += rows_of_blocks * (MAX_GROUPS + 1);
    if (!is_last(counts + 1 + slice / GROUP, members)) return;
    merge(out, parts, stats, first, members, 1, false);
    if (is_last(counts, groups)) merge(out, parts, stats, 0, groups, GROUP, true);
  }
};

}  // namespace etkv
