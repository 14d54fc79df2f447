// RMS norms with weights in the element type or in float32.

namespace etkv {

// The weight may be null. With a float32 weight, elements are rounded only once, after the multiplication by
// it.
struct AnyNorm {
  const void* weight;
  float eps;
  int is_wide;

  // Returns the normalized element `x` at column `at`. `scale` is the inverse root mean square of the row.
  template <typename E>
  __device__ E normed(E x, float scale, int at) const {
    float scaled = static_cast<float>(x) * scale;
    if (weight && is_wide) return E(scaled * static_cast<const float*>(weight)[at]);
    E rounded = E(scaled);
    if (!weight) return rounded;
    return E(static_cast<float>(static_cast<const E*>(weight)[at]) * static_cast<float>(rounded));
  }
};

}  // namespace etkv
