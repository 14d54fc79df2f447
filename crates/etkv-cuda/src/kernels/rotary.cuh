// Rotary embedding of rows with any strides.

namespace etkv {

// Rotates elements `j` and `j + half` of each row together.
template <typename E>
struct Rotary {
  const E* x;
  long long head, token, column;
  const int* positions;
  long long position_step;
  const float* periods;
  long long period_step;
  int heads, tokens, half;

  // Writes `[tokens, heads, elements]`.
  __device__ void run(E* out) const {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= tokens * heads * half) return;
    int j = i % half, h = i / half % heads, t = i / half / heads;
    const E* from = x + h * head + t * token + j * column;
    E first = from[0], second = from[half * column];
    rotate(first, second, angle_of(positions[t * position_step], periods[j * period_step]));
    E* to = out + (static_cast<long long>(t) * heads + h) * 2 * half + j;
    to[0] = first;
    to[half] = second;
  }
};

}  // namespace etkv
