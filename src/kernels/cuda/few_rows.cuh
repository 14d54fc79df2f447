// Products of a few rows with a weight: each weight is read once, from where it lies, into registers.
// What a layer does before and after a product is done on the way: its rows are normalized, the
// activated half of the outputs gates the other half, and the result is added to other rows.

namespace etkv {

// Outputs of a block, and its warps, which share the inner axis, 64 elements at a time.
constexpr int OUTPUTS = 16;
constexpr int SHARES = 8;
// Rows that are multiplied together, and the floats that the warps leave for the most rows.
constexpr int ROWS = 8;
constexpr int SUMS = SHARES * 2 * ROWS * OUTPUTS;

// The function of the first half of the outputs, as the host numbers them.
enum Gates { NO_GATE, SILU, GELU, GELU_TANH };

__device__ inline float activated(int gate, float x) {
  if (gate == SILU) return x / (1.0f + expf(-x));
  if (gate == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

template <typename E>
struct FewRows {
  const E* x;
  long long row, column;
  const E* w;
  // Null where there is none.
  const E* bias;
  long long bias_step;
  // Rows are normalized by their root mean square; the weights of it are null where there are none.
  bool normalizes;
  float eps;
  const E* norm;
  // Rows that are added to the result, or null.
  const E* plus;
  long long plus_row, plus_column;
  int gate;
  // Outputs are those of the result: a gate has twice as many rows of weights.
  int rows, outputs, inner;

  // Eight elements that lie anywhere.
  __device__ static uint4 gathered(const E* from, long long step) {
    E each[8];
    for (int i = 0; i < 8; ++i) each[i] = from[i * step];
    uint4 piece;
    memcpy(&piece, each, sizeof(piece));
    return piece;
  }

  __device__ static bool is_aligned(const E* at) { return reinterpret_cast<unsigned long long>(at) % 16 == 0; }

  __device__ static uint4 piece_of(const E* at, long long step, bool aligned) {
    return aligned ? __ldg(reinterpret_cast<const uint4*>(at)) : gathered(at, step);
  }

  __device__ bool is_x_aligned() const { return column == 1 && row % 8 == 0 && is_aligned(x); }

  // Leaves what each row is multiplied with. Rounds as a function of its own would.
  __device__ void find_scales(float* scales) const {
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool aligned = is_x_aligned();
    for (int r = warp; r < rows; r += SHARES) {
      float sum = 0;
      for (int at = 8 * thread; at < inner; at += 256) {
        uint4 piece = piece_of(x + r * row + at * column, column, aligned);
        E each[8];
        memcpy(each, &piece, sizeof(piece));
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += static_cast<float>(each[i]) * static_cast<float>(each[i]);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (thread == 0) scales[r] = rsqrtf(sum / inner + eps);
    }
    __syncthreads();
  }

  __device__ uint4 normalized(uint4 piece, uint4 weights, float scale) const {
    E each[8], by[8];
    memcpy(each, &piece, sizeof(piece));
    memcpy(by, &weights, sizeof(weights));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      E turned = static_cast<E>(static_cast<float>(each[i]) * scale);
      each[i] = norm ? static_cast<E>(static_cast<float>(by[i]) * static_cast<float>(turned)) : turned;
    }
    memcpy(&piece, each, sizeof(piece));
    return piece;
  }

  __device__ void run(E* out, float* sums, float* scales) const {
    rows <= ROWS ? multiply_rows<1>(out, sums, scales) : multiply_rows<2>(out, sums, scales);
  }

  // Multiplies up to 8 * TILES rows.
  template <int TILES>
  __device__ void multiply_rows(E* out, float* sums, float* scales) const {
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int group = thread / 4, member = thread % 4;
    int first = blockIdx.x * (gate ? OUTPUTS / 2 : OUTPUTS);
    bool x_aligned = is_x_aligned(), w_aligned = is_aligned(w), norm_aligned = is_aligned(norm);
    const E* at_row[2];
    for (int i = 0; i < 2; ++i) {
      // The second half of a block's weights are those of the gated half.
      int output = gate ? min(first + group, outputs - 1) + i * outputs : min(first + group + 8 * i, outputs - 1);
      at_row[i] = w + static_cast<long long>(output) * inner + 8 * member;
    }
    float acc[TILES][4] = {};
    // What is multiplied now, and what comes next.
    uint4 a[2][2][2], b[2][TILES][2];
    auto ask = [&](int slot, int at) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int from = at + 32 * half;
        bool exists = from + 8 * member < inner;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          a[slot][i][half] = make_uint4(0, 0, 0, 0);
          if (exists) a[slot][i][half] = w_aligned ? read_once(at_row[i] + from) : gathered(at_row[i] + from, 1);
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
          int r = group + ROWS * j;
          const E* piece = x + r * row + (from + 8 * member) * column;
          b[slot][j][half] = make_uint4(0, 0, 0, 0);
          if (exists && r < rows) b[slot][j][half] = piece_of(piece, column, x_aligned);
        }
      }
    };
    constexpr int STEP = 64 * SHARES;
    int at = 64 * warp;
    ask(0, at);
    float scale[TILES] = {};
    if (normalizes) {
      find_scales(scales);
#pragma unroll
      for (int j = 0; j < TILES; ++j) {
        int r = group + ROWS * j;
        if (r < rows) scale[j] = scales[r];
      }
    }
    for (; at < inner; at += 2 * STEP) {
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        ask(1 - slot, at + (slot + 1) * STEP);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Both operands take the elements of the inner axis in the order in which they were read, not
          // in that of the matrices: the sum is the same.
          uint4 upper = a[slot][0][half], lower = a[slot][1][half];
          uint4 weights = make_uint4(0, 0, 0, 0);
          if (normalizes) {
            int from = at + slot * STEP + 32 * half + 8 * member;
            if (from < inner && norm) weights = piece_of(norm + from, 1, norm_aligned);
          }
          unsigned head[4] = {upper.x, lower.x, upper.y, lower.y};
          unsigned tail[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
          for (int j = 0; j < TILES; ++j) {
            uint4 y = b[slot][j][half];
            if (normalizes) y = normalized(y, weights, scale[j]);
            multiply<E>(acc[j], head, y.x, y.y);
            multiply<E>(acc[j], tail, y.z, y.w);
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int r = (warp * TILES + j) * ROWS + 2 * member + e % 2;
        sums[r * OUTPUTS + group + 8 * (e / 2)] = acc[j][e];
      }
    }
    __syncthreads();
    int width = gate ? OUTPUTS / 2 : OUTPUTS;
    for (int i = threadIdx.x; i < TILES * ROWS * width; i += 32 * SHARES) {
      int r = i / width, output = first + i % width;
      if (r >= rows || output >= outputs) continue;
      const float* from = sums + r * OUTPUTS + i % width;
      constexpr int APART = TILES * ROWS * OUTPUTS;
      E value = total<APART>(from, output);
      if (gate) {
        E gated = total<APART>(from + OUTPUTS / 2, outputs + output);
        E active = static_cast<E>(activated(gate, static_cast<float>(value)));
        value = static_cast<E>(static_cast<float>(active) * static_cast<float>(gated));
      }
      if (plus) {
        E other = plus[r * plus_row + output * plus_column];
        value = static_cast<E>(static_cast<float>(value) + static_cast<float>(other));
      }
      out[static_cast<long long>(r) * outputs + output] = value;
    }
  }

  // Returns what all warps have of an output, and its bias.
  template <int APART>
  __device__ E total(const float* sums, int output) const {
    float sum = bias ? static_cast<float>(bias[output * bias_step]) : 0;
#pragma unroll
    for (int share = 0; share < SHARES; ++share) sum += sums[share * APART];
    return static_cast<E>(sum);
  }
};

}  // namespace etkv

// MLX writes the kernel's first line. This adds that a multiprocessor holds two blocks, each of which
// may then have 128 registers a thread.
#define custom_kernel_etkv_few_rows __launch_bounds__(256, 2) custom_kernel_etkv_few_rows
