// Recurrent layers of a step: convolutions of any number of tokens, and linear recurrences of a few
// tokens of each sequence. The tokens of a sequence are all in one block of positions.

namespace etkv {

// Rows of heads with any strides.
template <typename E>
struct HeadRows {
  const E* first;
  long long head, row, column;

  __device__ float at(int h, int r, int c) const {
    return static_cast<float>(first[h * head + r * row + c * column]);
  }
};

// A causal convolution, with a thread for each channel of each token.
template <typename X, typename W, typename B, typename O, bool BIAS, bool SILU>
struct Convolution {
  // The head is 0, rows are channels, and columns are tokens.
  HeadRows<X> x;
  // The head is 0, rows are channels, and columns are taps.
  HeadRows<W> weight;
  const B* bias;
  long long bias_step;
  HeadRows<float> stored;
  // For each token: the sources of the `width - 1` columns before it. A source is a slot, -1 for zeros, or -2
  // - token.
  const int* before;
  int channels, tokens, width;

  // Writes the outputs `[tokens, channels]`, and the tokens' columns in the same shape.
  __device__ void run(O* out, float* columns) const {
    long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= static_cast<long long>(channels) * tokens) return;
    int channel = i % channels, token = i / channels;
    const int* sources = before + static_cast<long long>(token) * (width - 1);
    float sum = 0;
    for (int tap = 0; tap < width - 1; tap++) {
      int source = sources[tap];
      if (source == -1) continue;
      float column = source >= 0 ? stored.at(0, source, channel) : x.at(0, channel, -2 - source);
      sum += weight.at(0, channel, tap) * column;
    }
    float own = x.at(0, channel, token);
    sum += weight.at(0, channel, width - 1) * own;
    if (BIAS) sum += static_cast<float>(bias[channel * bias_step]);
    if (SILU) sum /= 1 + __expf(-sum);
    out[i] = static_cast<O>(sum);
    columns[i] = own;
  }
};

// A block computes 32 columns of a state, one for each lane. The rows are divided among its warps.
constexpr int STATE_COLUMNS = 32, STATE_WARPS = 8;
constexpr int BLOCK_ROWS = 64, GROUP_TOKENS = 16, FOLD_ROWS = 16;
constexpr float MIN_LOG_DECAY = -88;

// A part of a state's column, in the registers of a lane.
template <int K_DIM>
struct StatePart {
  static constexpr int N = K_DIM / STATE_WARPS;
  float each[N];

  // `source` is the slot of an anchor, -1 for zeros, or -2 - the index of a state that `Fold` computed in
  // this step.
  __device__ void load(const HeadRows<float>& anchors, const HeadRows<float>& folds, int source, int head, int warp,
                       int column, int v_dim) {
    const HeadRows<float>& from = source >= 0 ? anchors : folds;
    int row = source >= 0 ? source : -2 - source;
    for (int i = 0; i < N; i++) {
      each[i] = source == -1 || column >= v_dim ? 0 : from.at(head, row, (warp * N + i) * v_dim + column);
    }
  }
};

__device__ inline float sum_of_lanes(float x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffff, x, lanes);
  return x;
}

// An RMS norm of a head, times a factor. Without `is_on` it changes nothing.
struct HeadNorm {
  bool is_on;
  float eps, factor;
};

// A linear recurrence. All tokens of a group see the same stored rows, and each token sees its ancestors in
// the group. A block computes some columns of one head, since the columns of a state are independent.
template <int K_DIM, bool DELTA, typename Q, typename K, typename V, typename O>
struct Scan {
  HeadRows<Q> q;
  HeadRows<K> k;
  HeadRows<V> v;
  HeadNorm q_norm, k_norm;
  HeadRows<float> keys, updates, anchors, folds;
  // The offset of each group in this array, followed by the groups. A group has the source of its state (see
  // `StatePart`), the number of its rows, the number of its tokens, the slots of its rows, and three numbers
  // for each token. These are the index of the token, the position of its parent in the group or -1, and a
  // set of bits for the positions of its ancestors.
  const int* plan;
  int share, v_dim, tokens;
  float scale;

  // Writes outputs `[tokens, heads, v_dim]`, keys `[k_heads, tokens, K_DIM]`, and updates `[heads, tokens,
  // v_dim + 1]`, whose last column is the sum of log decays. `g` and `beta` are functions of a head and a token.
  template <typename G, typename B>
  __device__ void run(const G& g, const B& beta, O* out, float* new_keys, float* new_updates) const {
    __shared__ float query[K_DIM], key[K_DIM];
    __shared__ float factors[2], key_factors[GROUP_TOKENS];
    __shared__ float for_query[BLOCK_ROWS + GROUP_TOKENS], for_key[BLOCK_ROWS + GROUP_TOKENS];
    __shared__ float row_sums[BLOCK_ROWS], token_sums[GROUP_TOKENS];
    __shared__ float token_updates[GROUP_TOKENS][STATE_COLUMNS];
    __shared__ float parts[2][STATE_WARPS][STATE_COLUMNS];
    int head = blockIdx.y, heads = gridDim.y, k_head = head / share;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int column = blockIdx.x * STATE_COLUMNS + lane;
    const int* group = plan + plan[blockIdx.z];
    int n_rows = group[1], n_tokens = group[2];
    const int* slots = group + 3;
    const int* own = slots + n_rows;

    StatePart<K_DIM> state;
    state.load(anchors, folds, group[0], head, warp, column, v_dim);
    for (int r = threadIdx.x; r < n_rows; r += blockDim.x) row_sums[r] = updates.at(head, slots[r], v_dim);
    __syncthreads();

    for (int i = 0; i < n_tokens; i++) {
      int token = own[3 * i], parent = own[3 * i + 1], ancestors = own[3 * i + 2];
      for (int c = threadIdx.x; c < K_DIM; c += blockDim.x) {
        query[c] = q.at(k_head, token, c);
        key[c] = k.at(k_head, token, c);
      }
      if (threadIdx.x == 0) {
        float before = parent >= 0 ? token_sums[parent] : n_rows > 0 ? row_sums[n_rows - 1] : 0;
        float decay = g(head, token);
        // The comparison keeps NaN.
        token_sums[i] = (decay < MIN_LOG_DECAY ? MIN_LOG_DECAY : decay) + before;
      }
      __syncthreads();
      if (q_norm.is_on || k_norm.is_on) {
        if (warp < 2) {
          const HeadNorm& norm = warp == 0 ? q_norm : k_norm;
          const float* row = warp == 0 ? query : key;
          float squares = 0;
          for (int c = lane; c < K_DIM; c += 32) squares += row[c] * row[c];
          squares = sum_of_lanes(squares);
          if (lane == 0) factors[warp] = norm.is_on ? norm.factor * rsqrtf(squares / K_DIM + norm.eps) : 1;
        }
        __syncthreads();
        for (int c = threadIdx.x; c < K_DIM; c += blockDim.x) {
          query[c] *= factors[0];
          key[c] *= factors[1];
        }
        if (threadIdx.x == 0) key_factors[i] = factors[1];
        __syncthreads();
      } else if (threadIdx.x == 0) {
        key_factors[i] = 1;
      }
      if (blockIdx.x == 0 && head % share == 0) {
        float* row = new_keys + (static_cast<long long>(k_head) * tokens + token) * K_DIM;
        for (int c = threadIdx.x; c < K_DIM; c += blockDim.x) row[c] = key[c];
      }

      // The products with the keys of each row, of each ancestor, and of the token itself.
      float sum = token_sums[i];
      for (int r = warp; r <= n_rows + i; r += STATE_WARPS) {
        bool is_row = r < n_rows, is_own = r == n_rows + i;
        if (!is_row && !is_own && !(ancestors >> (r - n_rows) & 1)) continue;
        float of_query = 0, of_key = 0;
        for (int c = lane; c < K_DIM; c += 32) {
          float other;
          if (is_own) {
            other = key[c];
          } else if (is_row) {
            other = keys.at(k_head, slots[r], c);
          } else {
            other = k.at(k_head, own[3 * (r - n_rows)], c) * key_factors[r - n_rows];
          }
          of_query += query[c] * other;
          if (DELTA) of_key += key[c] * other;
        }
        of_query = sum_of_lanes(of_query);
        if (DELTA) of_key = sum_of_lanes(of_key);
        if (lane == 0) {
          float decay = is_own ? 1 : expf(sum - (is_row ? row_sums[r] : token_sums[r - n_rows]));
          for_query[r] = of_query * decay;
          for_key[r] = of_key * decay;
        }
      }
      float of_query = 0, of_key = 0;
      for (int c = 0; c < StatePart<K_DIM>::N; c++) {
        of_query += query[warp * StatePart<K_DIM>::N + c] * state.each[c];
        if (DELTA) of_key += key[warp * StatePart<K_DIM>::N + c] * state.each[c];
      }
      float decay = expf(sum);
      of_query *= decay;
      of_key *= decay;
      __syncthreads();

      if (column < v_dim) {
        for (int r = warp; r < n_rows + i; r += STATE_WARPS) {
          bool is_row = r < n_rows;
          if (!is_row && !(ancestors >> (r - n_rows) & 1)) continue;
          float update = is_row ? updates.at(head, slots[r], column) : token_updates[r - n_rows][lane];
          of_query += for_query[r] * update;
          if (DELTA) of_key += for_key[r] * update;
        }
      }
      parts[0][warp][lane] = of_query;
      parts[1][warp][lane] = of_key;
      __syncthreads();

      if (warp == 0 && column < v_dim) {
        float read = 0, known = 0;
        for (int part = 0; part < STATE_WARPS; part++) {
          read += parts[0][part][lane];
          known += parts[1][part][lane];
        }
        float update = v.at(head, token, column);
        if (DELTA) update = (update - known) * beta(head, token);
        token_updates[i][lane] = update;
        float result = scale * (read + for_query[n_rows + i] * update);
        out[(static_cast<long long>(token) * heads + head) * v_dim + column] = static_cast<O>(result);
        float* row = new_updates + (static_cast<long long>(head) * tokens + token) * (v_dim + 1);
        row[column] = update;
        if (column == 0) row[v_dim] = sum;
      }
      __syncthreads();
    }
  }
};

// Computes the states at the ends of complete blocks of rows.
template <int K_DIM>
struct Fold {
  HeadRows<float> keys, updates, anchors;
  // For each fold: the slot of the anchor before the block, or -1 for zeros, and the slots of the rows.
  const int* plan;
  int share, v_dim;

  // Writes `[heads, folds, K_DIM, v_dim]`.
  __device__ void run(float* out) const {
    constexpr int N = StatePart<K_DIM>::N;
    __shared__ float decayed[FOLD_ROWS][K_DIM];
    __shared__ float row_updates[FOLD_ROWS][STATE_COLUMNS];
    int head = blockIdx.y, fold = blockIdx.z, folds = gridDim.z, k_head = head / share;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int column = blockIdx.x * STATE_COLUMNS + lane;
    const int* slots = plan + fold * (BLOCK_ROWS + 1) + 1;
    float end = updates.at(head, slots[BLOCK_ROWS - 1], v_dim);
    float decay = expf(end);
    StatePart<K_DIM> state;
    state.load(anchors, anchors, slots[-1], head, warp, column, v_dim);
    for (int i = 0; i < N; i++) state.each[i] *= decay;

    for (int start = 0; start < BLOCK_ROWS; start += FOLD_ROWS) {
      for (int at = threadIdx.x; at < FOLD_ROWS * K_DIM; at += blockDim.x) {
        int slot = slots[start + at / K_DIM], c = at % K_DIM;
        decayed[at / K_DIM][c] = keys.at(k_head, slot, c) * expf(end - updates.at(head, slot, v_dim));
      }
      for (int r = warp; r < FOLD_ROWS; r += STATE_WARPS) {
        row_updates[r][lane] = column < v_dim ? updates.at(head, slots[start + r], column) : 0;
      }
      __syncthreads();
      for (int r = 0; r < FOLD_ROWS; r++) {
        for (int i = 0; i < N; i++) state.each[i] += decayed[r][warp * N + i] * row_updates[r][lane];
      }
      __syncthreads();
    }
    if (column >= v_dim) return;
    float* to = out + ((static_cast<long long>(head) * folds + fold) * K_DIM + warp * N) * v_dim + column;
    for (int i = 0; i < N; i++) to[static_cast<long long>(i) * v_dim] = state.each[i];
  }
};

}  // namespace etkv
