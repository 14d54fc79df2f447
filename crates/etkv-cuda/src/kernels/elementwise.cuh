// Functions of elements, in float32.

namespace etkv {

// Returns the float nearest to `x` that `E` holds.
template <typename E>
__device__ inline float rounded(float x) {
  return static_cast<float>(static_cast<E>(x));
}

__device__ inline int broadcast_size(int a, int b) { return a == 1 ? b : a; }

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float silu(float x) { return x * sigmoid(x); }
__device__ inline float square(float x) { return x * x; }
__device__ inline float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
__device__ inline float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

// A comparison with NaN is false, so that NaN is returned.
__device__ inline float maximum(float a, float b) { return a != a || a > b ? a : b; }
__device__ inline float minimum(float a, float b) { return a != a || a < b ? a : b; }

__device__ inline float log_add_exp(float a, float b) {
  float larger = maximum(a, b), smaller = minimum(a, b);
  // Also where both are the same infinity, whose difference is NaN.
  if (larger == smaller && larger == larger) return larger + 0.69314718055994531f;
  return larger + log1pf(expf(smaller - larger));
}

}  // namespace etkv
