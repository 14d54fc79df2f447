// RMS norms of rows with any strides, computed in float32.

namespace etkv {

constexpr int MAX_NORM_WARPS = 8;

// Normalizes rows, one in each block. The weight and the scale may be null.
template <typename X, typename W, typename O>
struct NormRows {
  const X* x;
  long long step;
  const W* weight;
  long long weight_step;
  const float* scale;
  float eps;
  int inner;

  __device__ void run(O* out, float* squares) const {
    float sum = 0;
    for (int at = threadIdx.x; at < inner; at += blockDim.x) {
      float element = static_cast<float>(x[at * step]);
      sum += element * element;
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) total += squares[warp];
    float factor = rsqrtf(total / inner + eps);
    for (int at = threadIdx.x; at < inner; at += blockDim.x) {
      float element = static_cast<float>(x[at * step]) * factor;
      if (weight) element *= static_cast<float>(weight[at * weight_step]);
      if (scale) element *= *scale;
      out[at] = static_cast<O>(element);
    }
  }
};

}  // namespace etkv
