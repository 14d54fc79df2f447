// Normalizes, rotates and stores the heads that a product has computed. A block processes the heads of one
// token that belong to one KV head. A warp processes a head at a time.

namespace etkv {

constexpr int MAX_PLACE_WARPS = 8;

template <typename E>
struct Row {
  // The elements of this thread. Elements after the end of the head are zeros.
  E x[8];
  int thread, dim;

  __device__ void read(const E* from) {
    for (int i = 0; i < 8; ++i) x[i] = E(0.0f);
    if (8 * thread >= dim) return;
    uint4 piece = read_rows(from + 8 * thread);
    memcpy(x, &piece, sizeof(piece));
  }

  __device__ void write(E* to) const {
    uint4 piece;
    memcpy(&piece, x, sizeof(piece));
    if (8 * thread < dim) *reinterpret_cast<uint4*>(to + 8 * thread) = piece;
  }

  // Rounds in the same way as `FewRows`, unless the weight is float32.
  __device__ void normalize(const AnyNorm& norm) {
    float sum = 0;
    for (int i = 0; i < 8; ++i) sum += static_cast<float>(x[i]) * static_cast<float>(x[i]);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    float scale = rsqrtf(sum / dim + norm.eps);
    if (8 * thread >= dim) return;
    for (int i = 0; i < 8; ++i) x[i] = norm.normed(x[i], scale, 8 * thread + i);
  }

  // Rotates the first `rotated` elements. Element `j` rotates together with `j + rotated / 2`, which another
  // thread has.
  __device__ void rotate_row(int position, const float* periods, int rotated) {
    int half = rotated / 16, other = thread < half ? thread + half : thread - half;
    bool is_second = thread >= half;
    for (int i = 0; i < 8; ++i) {
      float its = __shfl_sync(ALL, static_cast<float>(x[i]), other);
      if (8 * thread >= rotated) continue;
      E first = is_second ? E(its) : x[i], second = is_second ? x[i] : E(its);
      rotate(first, second, angle_of(position, periods[8 * (thread % half) + i]));
      x[i] = is_second ? second : first;
    }
  }

  __device__ bool is_finite() const {
    bool all = true;
    for (int i = 0; i < 8; ++i) all = all && static_cast<float>(x[i]) - static_cast<float>(x[i]) == 0;
    return __all_sync(ALL, all);
  }

  template <typename F>
  __device__ void store(const Planes& planes, long long at) const {
    if constexpr (is_plain<F>) {
      write(static_cast<E*>(planes.codes) + at * dim);
    } else {
      float each[8];
      for (int i = 0; i < 8; ++i) each[i] = static_cast<float>(x[i]);
      encode<F>(each, thread, dim, planes, at);
    }
  }
};

}  // namespace etkv
