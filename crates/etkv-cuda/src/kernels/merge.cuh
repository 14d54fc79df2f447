// Merges what the slices of an attention left of a row, in a launch of its own: many blocks read at once,
// where a block that was last to finish its slice would read alone.

namespace etkv {

// `AT_ONCE`: slices that a thread asks for at once, as what they left comes from far. More take more registers, so
// that fewer blocks run at a time.
template <typename E, int DV, int MERGE_THREADS, int AT_ONCE>
struct Merge {
  static constexpr int PIECES = DV / 4;
  // Slices that are read at a time, by a share of the threads each.
  static constexpr int SHARES = MERGE_THREADS / PIECES;
  // Floats that a thread leaves: its greatest score, its sum of weights, and four elements.
  static constexpr int LEFT = 6;

  // `parts` and `stats` are those of a row in its first slice; those of the next are `pitch` rows behind.
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
      // The compiler would put off each read until it is needed, so that one waited for another. Here all are needed, for
      // bits that are always 0.
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

  // Adds what some slices left. A row that has seen nothing in a slice has a sum of weights of 0, and no elements.
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
