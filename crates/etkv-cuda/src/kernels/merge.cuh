// Merges what the slices of an attention left of a row, in a launch of its own: many blocks read at once,
// where a block that was last to finish its slice would read alone.

namespace etkv {

template <typename E, int DV>
struct Merge {
  static constexpr int PIECES = DV / 4;
  // Slices that are read at a time.
  static constexpr int AT_ONCE = THREADS / PIECES;
  // Floats that a thread leaves: its greatest score, its sum of weights, and four elements.
  static constexpr int LEFT = 6;

  // `parts` and `stats` are those of a row in its first slice; those of the next are `pitch` rows behind.
  __device__ static void run(E* out, const float* parts, const float* stats, int pitch, int slices) {
    __shared__ float left[THREADS * LEFT];
    int piece = threadIdx.x % PIECES, share = threadIdx.x / PIECES;
    float most = -INFINITY, whole = 0, sum[4] = {};
    if (share < AT_ONCE) {
#pragma unroll 4
      for (int slice = share; slice < slices; slice += AT_ONCE) {
        const float* of = stats + 2LL * slice * pitch;
        float highest = __ldcg(of), its = __ldcg(of + 1);
        float4 x = __ldcg(reinterpret_cast<const float4*>(parts + 1LL * slice * pitch * DV + 4 * piece));
        // A row that has seen nothing in a slice has left nothing there.
        if (its != 0) add(most, whole, sum, highest, its, x.x, x.y, x.z, x.w);
      }
    }
    float* own = left + threadIdx.x * LEFT;
    own[0] = most;
    own[1] = whole;
    for (int i = 0; i < 4; ++i) own[2 + i] = sum[i];
    __syncthreads();
    if (share > 0) return;
#pragma unroll
    for (int other = 1; other < AT_ONCE; ++other) {
      const float* its = left + (other * PIECES + piece) * LEFT;
      if (its[1] != 0) add(most, whole, sum, its[0], its[1], its[2], its[3], its[4], its[5]);
    }
    for (int i = 0; i < 4; ++i) out[4 * piece + i] = static_cast<E>(whole != 0 ? sum[i] / whole : 0.0f);
  }

  __device__ static void add(float& most, float& whole, float (&sum)[4], float highest, float its, float x,
                             float y, float z, float w) {
    float both = fmaxf(most, highest), before = weight_of(most, both), weight = weight_of(highest, both);
    most = both;
    whole = whole * before + its * weight;
    sum[0] = sum[0] * before + x * weight;
    sum[1] = sum[1] * before + y * weight;
    sum[2] = sum[2] * before + z * weight;
    sum[3] = sum[3] * before + w * weight;
  }
};

}  // namespace etkv
