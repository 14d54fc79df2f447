// Merges the partial results of attention's slices, in a separate launch. In this way many blocks read them
// in parallel, instead of only the block that finished last.

namespace etkv {

// `AT_ONCE` is the number of slices that a thread loads at a time, to hide the latency of global memory. With
// more slices it needs more registers, and fewer blocks run at a time.
template <typename E, int DV, int MERGE_THREADS, int AT_ONCE>
struct Merge {
  static constexpr int PIECES = DV / 4;
  // The number of slices that the block reads at a time. The threads are divided among them.
  static constexpr int SHARES = MERGE_THREADS / PIECES;
  // The floats of a thread's result: the maximum score, the sum of weights, and four elements.
  static constexpr int LEFT = 6;

  // `parts` and `stats` point to the row in the first slice. In the next slice, it is `pitch` rows later.
  __device__ static void run(E* out, const float* parts, const float* stats, int pitch, int slices) {
    __shared__ float left[MERGE_THREADS * LEFT];
    int piece = threadIdx.x % PIECES, share = threadIdx.x / PIECES;
    float most = -INFINITY, whole = 0, sum[4] = {};
    for (int first = share; share < SHARES && first < slices; first += SHARES * AT_ONCE) {
      float2 ends[AT_ONCE];
      float4 its[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        int slice = first + SHARES * i;
        bool exists = slice < slices;
        ends[i] = exists ? read_two(stats + 2LL * slice * pitch) : make_float2(0, 0);
        its[i] = exists ? read_four(parts + 1LL * slice * pitch * DV + 4 * piece) : make_float4(0, 0, 0, 0);
      }
      // Without this code, the compiler would delay each load until its first use, so that loads
      // would wait for each other. This code uses the results of all loads at once, to compute bits
      // that are always 0.
      unsigned bits = 0;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) bits |= __float_as_uint(its[i].x);
      most = __uint_as_float(__float_as_uint(most) ^ (bits & slices >> 31));
      float x[AT_ONCE][LEFT];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        x[i][0] = ends[i].x;
        x[i][1] = ends[i].y;
        x[i][2] = its[i].x;
        x[i][3] = its[i].y;
        x[i][4] = its[i].z;
        x[i][5] = its[i].w;
      }
      add(most, whole, sum, x);
    }
    float* own = left + threadIdx.x * LEFT;
    own[0] = most;
    own[1] = whole;
    for (int i = 0; i < 4; ++i) own[2 + i] = sum[i];
    __syncthreads();
    if (share > 0) return;
#pragma unroll
    for (int first = 1; first < SHARES; first += AT_ONCE) {
      float x[AT_ONCE][LEFT];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        for (int j = 0; j < LEFT; ++j) {
          x[i][j] = first + i < SHARES ? left[((first + i) * PIECES + piece) * LEFT + j] : 0;
        }
      }
      add(most, whole, sum, x);
    }
    for (int i = 0; i < 4; ++i) out[4 * piece + i] = static_cast<E>(whole != 0 ? sum[i] / whole : 0.0f);
  }

  // Adds partial results. If a row sees no key of a slice, the sum of weights is 0, and the elements are
  // undefined.
  __device__ static void add(float& most, float& whole, float (&sum)[4], const float (&x)[AT_ONCE][LEFT]) {
    float highest = most;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) highest = x[i][1] != 0 ? fmaxf(highest, x[i][0]) : highest;
    float before = weight_of(most, highest);
    most = highest;
    whole *= before;
    for (int j = 0; j < 4; ++j) sum[j] *= before;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      bool counts = x[i][1] != 0;
      float weight = counts ? weight_of(x[i][0], highest) : 0;
      whole += weight * x[i][1];
      for (int j = 0; j < 4; ++j) sum[j] += counts ? weight * x[i][2 + j] : 0;
    }
  }
};

}  // namespace etkv
