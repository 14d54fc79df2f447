// Element-wise functions in float32.

namespace etkv {

// Rounds `x` to type `E`.
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

// If a number is NaN, the result is NaN, because comparisons with NaN are false.
__device__ inline float maximum(float a, float b) { return a != a || a > b ? a : b; }
__device__ inline float minimum(float a, float b) { return a != a || a < b ? a : b; }

__device__ inline float log_add_exp(float a, float b) {
  float larger = maximum(a, b), smaller = minimum(a, b);
  // This includes two equal infinities, whose difference would be NaN.
  if (larger == smaller && larger == larger) return larger + 0.69314718055994531f;
  return larger + log1pf(expf(smaller - larger));
}

}  // namespace etkv
