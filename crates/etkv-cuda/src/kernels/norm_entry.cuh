// The kernels that normalize and blend rows. `Element` must be defined before.

namespace etkv {

constexpr int NORM_THREADS = 256;

// Returns the inverse root mean square of a row. `sum` is this thread's sum of squares of the row's elements.
// `squares` has room for a number for each warp.
__device__ inline float scale_of(float sum, int inner, float eps, float* squares) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  // Other warps may still read `squares` for the previous norm.
  __syncthreads();
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
  __syncthreads();
  float whole = 0;
  for (int i = 0; i < NORM_THREADS / 32; ++i) whole += squares[i];
  return rsqrtf(whole / inner + eps);
}

}  // namespace etkv

// The layout is the same on the host. `plus`, the residual, and `next_out` may be null.
struct NormWork {
  const Element* x;
  const void* weight;
  const Element* plus;
  Element* out;
  const void* next_weight;
  Element* next_out;
  float eps, next_eps;
  int is_wide, next_is_wide, inner, out_width;
};
static_assert(sizeof(NormWork) == 72, "the host has the same layout");

// Normalizes rows, one in each block, adds the residual, and normalizes the sum. A thread reads and writes
// the same elements in all phases. If `out_width` exceeds `inner`, the result is a part of the columns of
// `out`, and there is no second norm.
extern "C" __global__ void __launch_bounds__(etkv::NORM_THREADS) etkv_norm(const NormWork work) {
  __shared__ float squares[etkv::NORM_THREADS / 32];
  etkv::let_next_begin();
  etkv::wait_for_previous();
  etkv::AnyNorm norm{work.weight, work.eps, work.is_wide};
  etkv::AnyNorm next{work.next_weight, work.next_eps, work.next_is_wide};
  long long row = static_cast<long long>(blockIdx.x) * work.inner;
  Element* out = work.out + static_cast<long long>(blockIdx.x) * work.out_width;
  int first = 8 * threadIdx.x, apart = 8 * etkv::NORM_THREADS;
  float sum = 0;
  for (int at = first; at < work.inner; at += apart) {
    uint4 piece = etkv::read_rows(work.x + row + at);
    Element x[8];
    memcpy(x, &piece, sizeof(piece));
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += static_cast<float>(x[j]) * static_cast<float>(x[j]);
  }
  float scale = etkv::scale_of(sum, work.inner, work.eps, squares);
  sum = 0;
  for (int at = first; at < work.inner; at += apart) {
    uint4 piece = etkv::read_rows(work.x + row + at), more = make_uint4(0, 0, 0, 0);
    // The residual may be in the buffer of the sum.
    if (work.plus) more = *reinterpret_cast<const uint4*>(work.plus + row + at);
    Element x[8], added[8];
    memcpy(x, &piece, sizeof(piece));
    memcpy(added, &more, sizeof(more));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j] = norm.normed(x[j], scale, at + j);
      if (work.plus) x[j] = Element(static_cast<float>(x[j]) + static_cast<float>(added[j]));
      sum += static_cast<float>(x[j]) * static_cast<float>(x[j]);
    }
    memcpy(&piece, x, sizeof(piece));
    *reinterpret_cast<uint4*>(out + at) = piece;
  }
  if (!work.next_out) return;
  scale = etkv::scale_of(sum, work.inner, work.next_eps, squares);
  for (int at = first; at < work.inner; at += apart) {
    uint4 piece = *reinterpret_cast<const uint4*>(out + at);
    Element x[8];
    memcpy(x, &piece, sizeof(piece));
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = next.normed(x[j], scale, at + j);
    memcpy(&piece, x, sizeof(piece));
    *reinterpret_cast<uint4*>(work.next_out + row + at) = piece;
  }
}

// The layout is the same on the host.
struct BlendWork {
  const Element *x, *y, *share;
  Element* out;
  int inner, unused;
};
static_assert(sizeof(BlendWork) == 40, "the host has the same layout");

// Computes `x + share * (y - x)` for rows, one in each block. Each operation is rounded, as in separate MLX
// operations.
extern "C" __global__ void __launch_bounds__(etkv::NORM_THREADS) etkv_blend(const BlendWork work) {
  etkv::let_next_begin();
  etkv::wait_for_previous();
  long long row = static_cast<long long>(blockIdx.x) * work.inner;
  float share = static_cast<float>(work.share[blockIdx.x]);
  for (int at = 8 * threadIdx.x; at < work.inner; at += 8 * etkv::NORM_THREADS) {
    // `x` or `y` may be the buffer of the result.
    uint4 piece = *reinterpret_cast<const uint4*>(work.x + row + at);
    uint4 other = *reinterpret_cast<const uint4*>(work.y + row + at);
    Element x[8], y[8];
    memcpy(x, &piece, sizeof(piece));
    memcpy(y, &other, sizeof(other));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      Element apart = Element(static_cast<float>(y[j]) - static_cast<float>(x[j]));
      Element moved = Element(share * static_cast<float>(apart));
      x[j] = Element(static_cast<float>(x[j]) + static_cast<float>(moved));
    }
    memcpy(&piece, x, sizeof(piece));
    *reinterpret_cast<uint4*>(work.out + row + at) = piece;
  }
}
