// The first and the last kernel of a step: embeddings, and the argmax of logits.

namespace etkv {

constexpr int EMBED_THREADS = 128;
constexpr int CHOOSE_THREADS = 1024;

__device__ inline bool is_aligned(const void* at, int bytes) {
  return reinterpret_cast<unsigned long long>(at) % 16 == 0 && bytes % 16 == 0;
}

// Copies the embeddings of tokens, one in each block, and multiplies them by `scale`, if it is not null. Ids
// out of range are clamped.
template <typename E>
__device__ inline void embed(E* out, const E* table, const E* scale, const Step* step, int vocabulary, int inner) {
  int id = max(min(step->ids[blockIdx.x], vocabulary - 1), 0);
  const E* from = table + static_cast<long long>(id) * inner;
  E* to = out + static_cast<long long>(blockIdx.x) * inner;
  if (scale) {
    float by = static_cast<float>(*scale);
    for (int i = threadIdx.x; i < inner; i += EMBED_THREADS) to[i] = E(static_cast<float>(from[i]) * by);
  } else if (is_aligned(table, 2 * inner) && is_aligned(out, 2 * inner)) {
    for (int i = 8 * threadIdx.x; i < inner; i += 8 * EMBED_THREADS) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
  } else {
    for (int i = threadIdx.x; i < inner; i += EMBED_THREADS) to[i] = from[i];
  }
}

// A logit and its index. The index is -1 for NaN, which precedes all other logits.
struct Choice {
  float logit;
  int place;

  __device__ void meet(float other, int at) {
    bool wins = at < 0 || other > logit || (other == logit && at < place);
    if (place < 0 || !wins) return;
    logit = other;
    place = at;
  }
};

// Writes the index of the largest logit of a row, one row in each block. Of equal logits, the first is
// chosen. The index is -1 if a logit is NaN or the largest is infinite.
template <typename E>
__device__ inline void choose(int* out, const E* logits, int vocabulary, Choice* choices) {
  const E* from = logits + static_cast<long long>(blockIdx.x) * vocabulary;
  Choice choice{-INFINITY, vocabulary};
  auto meet = [&](E logit, int at) {
    float x = static_cast<float>(logit);
    choice.meet(x, x != x ? -1 : at);
  };
  if (is_aligned(logits, 2 * vocabulary)) {
#pragma unroll 4
    for (int i = 8 * threadIdx.x; i < vocabulary; i += 8 * CHOOSE_THREADS) {
      uint4 piece = read_rows(from + i);
      E each[8];
      memcpy(each, &piece, sizeof(piece));
#pragma unroll
      for (int j = 0; j < 8; ++j) meet(each[j], i + j);
    }
  } else {
    for (int i = threadIdx.x; i < vocabulary; i += CHOOSE_THREADS) meet(from[i], i);
  }
  choices[threadIdx.x] = choice;
  for (int step = CHOOSE_THREADS / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.x >= step) continue;
    Choice other = choices[threadIdx.x + step];
    choices[threadIdx.x].meet(other.logit, other.place);
  }
  if (threadIdx.x > 0) return;
  bool is_finite = choices[0].logit - choices[0].logit == 0;
  out[blockIdx.x] = is_finite ? choices[0].place : -1;
}

}  // namespace etkv
