// The rotation of two elements in rotary embedding.

namespace etkv {

__device__ inline float angle_of(int position, float period) { return static_cast<float>(position) * (1.0f / period); }

template <typename E>
__device__ inline void rotate(E& first, E& second, float angle) {
  float sine, cosine;
  sincosf(angle, &sine, &cosine);
  float x = static_cast<float>(first), y = static_cast<float>(second);
  first = static_cast<E>(x * cosine - y * sine);
  second = static_cast<E>(x * sine + y * cosine);
}

}  // namespace etkv
