// Norms by the root mean square whose weights are elements or float32.

namespace etkv {

// The weights are null where there are none. Behind weights of float32 a row is rounded once, and no elements
// are rounded before.
struct AnyNorm {
  const void* weight;
  float eps;
  int is_wide;

  // Returns an element of a row, which `scale` multiplies.
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
