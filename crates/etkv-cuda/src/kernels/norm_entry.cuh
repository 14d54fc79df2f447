// The kernels that normalize and blend rows, for an `Element` that is defined before.

namespace etkv {

constexpr int NORM_THREADS = 256;

// Returns what a row is multiplied by, of whose elements each thread of the block has summed up the squares.
// `squares` has a number for each warp.
__device__ inline float scale_of(float sum, int inner, float eps, float* squares) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  // The norm before may still read them.
  __syncthreads();
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
  __syncthreads();
  float whole = 0;
  for (int i = 0; i < NORM_THREADS / 32; ++i) whole += squares[i];
  return rsqrtf(whole / inner + eps);
}

}  // namespace etkv

// As the host has it. `plus` and `next_out` are null where there is nothing.
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
static_assert(sizeof(NormWork) == 72, "as the host has it");

// Normalizes a row, one a block, adds another one, and normalizes the sum. A thread reads and writes the same
// elements all along. Rows of `out` are wider than others where `out_width` is; they are not normalized again then.
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
    // It may be where the sum goes.
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

// As the host has it.
struct BlendWork {
  const Element *x, *y, *share;
  Element* out;
  int inner, unused;
};
static_assert(sizeof(BlendWork) == 40, "as the host has it");

// Moves a row of `x` towards that of `y`, one a block, by its share. Each result is
// rounded, as MLX rounds those of separate operations.
extern "C" __global__ void __launch_bounds__(etkv::NORM_THREADS) etkv_blend(const BlendWork work) {
  etkv::let_next_begin();
  etkv::wait_for_previous();
  long long row = static_cast<long long>(blockIdx.x) * work.inner;
  float share = static_cast<float>(work.share[blockIdx.x]);
  for (int at = 8 * threadIdx.x; at < work.inner; at += 8 * etkv::NORM_THREADS) {
    // Either may be where the row goes.
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
