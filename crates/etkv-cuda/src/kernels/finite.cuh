// Whether the elements of rows that lie anywhere are finite.

namespace etkv {

template <typename E>
struct Elements {
  const E* data;
  long long head, token, column;
  int heads, tokens, columns;

  // Returns to all threads of a block whether there is an element that is not finite.
  __device__ bool has_non_finite() const {
    int n = heads * tokens * columns;
    bool found = false;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      int d = i % columns, t = i / columns % tokens, h = i / columns / tokens;
      // False for infinities and NaN.
      found |= !(fabsf(static_cast<float>(data[h * head + t * token + d * column])) <= 3.402823466e38f);
    }
    return __syncthreads_or(found);
  }
};

}  // namespace etkv
