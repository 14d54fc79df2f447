// Rotary embedding of rows that lie anywhere.

namespace etkv {

// Turns element `j` of each row together with `j + half`.
template <typename E>
struct Rotary {
  const E* x;
  long long head, token, column;
  const int* positions;
  long long position_step;
  const float* periods;
  long long period_step;
  int heads, tokens, half;

  // Writes the tokens one after another, each with all its heads.
  __device__ void run(E* out) const {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tokens * heads * half) return;
    int j = i % half, h = i / half % heads, t = i / half / heads;
    float period = periods[j * period_step];
    float angle = static_cast<float>(positions[t * position_step]) * (1.0f / period);
    float sine, cosine;
    sincosf(angle, &sine, &cosine);
    const E* from = x + h * head + t * token + j * column;
    float first = static_cast<float>(from[0]), second = static_cast<float>(from[half * column]);
    E* to = out + (static_cast<long long>(t) * heads + h) * 2 * half + j;
    to[0] = static_cast<E>(first * cosine - second * sine);
    to[half] = static_cast<E>(first * sine + second * cosine);
  }
};

}  // namespace etkv
