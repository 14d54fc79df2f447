// The search for elements that are not finite, in rows with any strides.

namespace etkv {

template <typename E>
struct Elements {
  const E* data;
  long long head, token, column;
  int heads, tokens, columns;

  // Returns whether an element is not finite. All threads of the block get the same result.
  __device__ bool has_non_finite() const {
    int n = heads * tokens * columns;
    bool found = false;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      int d = i % columns, t = i / columns % tokens, h = i / columns / tokens;
      // The comparison is false for infinities and NaN.
      found |= !(fabsf(static_cast<float>(data[h * head + t * token + d * column])) <= 3.402823466e38f);
    }
    return __syncthreads_or(found);
  }
};

}  // namespace etkv
