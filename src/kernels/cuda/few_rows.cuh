// Products of a few rows with a weight: each weight is read once, from where it lies, into registers.

namespace etkv {

// Outputs of a block, and its warps, which share the inner axis, 64 elements at a time.
constexpr int OUTPUTS = 16;
constexpr int SHARES = 8;
// Rows that are multiplied together, and the floats that the warps leave for the most rows.
constexpr int ROWS = 8;
constexpr int SUMS = SHARES * 2 * ROWS * OUTPUTS;

template <typename E>
struct FewRows {
  const E* x;
  long long row, column;
  const E* w;
  const E* bias;
  long long bias_step;
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

  __device__ void run(E* out, float* sums) const {
    if (rows <= ROWS) {
      multiply_rows<1>(out, sums);
    } else {
      multiply_rows<2>(out, sums);
    }
  }

  // Multiplies up to 8 * TILES rows.
  template <int TILES>
  __device__ void multiply_rows(E* out, float* sums) const {
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int group = thread / 4, member = thread % 4;
    int first = blockIdx.x * OUTPUTS;
    bool x_aligned = column == 1 && row % 8 == 0 && is_aligned(x), w_aligned = is_aligned(w);
    const E* at_row[2];
    for (int i = 0; i < 2; ++i) {
      int output = min(first + group + 8 * i, outputs - 1);
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
          if (exists && r < rows) {
            b[slot][j][half] = x_aligned ? __ldg(reinterpret_cast<const uint4*>(piece)) : gathered(piece, column);
          }
        }
      }
    };
    constexpr int STEP = 64 * SHARES;
    int at = 64 * warp;
    ask(0, at);
    for (; at < inner; at += 2 * STEP) {
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        ask(1 - slot, at + (slot + 1) * STEP);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Both operands take the elements of the inner axis in the order in which they were read, not
          // in that of the matrices: the sum is the same.
          uint4 upper = a[slot][0][half], lower = a[slot][1][half];
          unsigned head[4] = {upper.x, lower.x, upper.y, lower.y};
          unsigned tail[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
          for (int j = 0; j < TILES; ++j) {
            uint4 y = b[slot][j][half];
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
    for (int i = threadIdx.x; i < TILES * ROWS * OUTPUTS; i += 32 * SHARES) {
      int r = i / OUTPUTS, output = first + i % OUTPUTS;
      if (r >= rows || output >= outputs) continue;
      float sum = bias ? static_cast<float>(bias[output * bias_step]) : 0;
#pragma unroll
      for (int share = 0; share < SHARES; ++share) sum += sums[share * TILES * ROWS * OUTPUTS + i];
      out[static_cast<long long>(r) * outputs + output] = static_cast<E>(sum);
    }
  }
};

}  // namespace etkv
