// Products of a few rows with a weight. Each element of the weight is read once, from global memory to
// registers. The kernel includes the operations before and after the product: the norm of its rows, a gate
// (an activation of the first half of the outputs multiplies the second half), the rotation of heads, and the
// sum with a residual. Heads of keys and values may be written to the pools of a cache.

namespace etkv {

// The outputs of a tile, and the warps of a block. The warps share the inner axis, 64 elements at a time.
constexpr int OUTPUTS = 16;
constexpr int SHARES = 8;
constexpr int STEP = 64 * SHARES;
// The rows that are multiplied together, and the maximum number of rows.
constexpr int ROWS = 8;
constexpr int MAX_ROWS = 2 * ROWS;
// The number of pieces of the weight that a thread loads ahead.
constexpr int DEPTH = 4;
// The number of floats of all warps' partial sums for two tiles, and the number of floats of all
// warps' sums of squares for each row.
constexpr int SUMS = 2 * SHARES * MAX_ROWS * OUTPUTS;
constexpr int SQUARES = MAX_ROWS * SHARES;
// The number of padding elements between rows in shared memory, with which two adjacent rows are in
// different banks, and the maximum number of elements of all rows together.
constexpr int PAD = 32;
constexpr int MAX_SHARED = 33280;

// The activation function of a gate. The host identifies the functions by the same numbers.
enum Gates { NO_GATE, SILU, GELU, GELU_TANH };

__device__ inline float activated(int gate, float x) {
  if (gate == SILU) return x / (1.0f + expf(-x));
  if (gate == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

// The destinations of heads. The first `queries` heads are written to the result. The next `each` are keys
// and the last `each` are values, which are written to pools `[each, capacity, head_dim]`. If `keys` is null,
// all heads are written to the result.
template <typename E>
struct Pools {
  E* keys;
  E* values;
  // The strides of heads, in elements.
  long long keys_head, values_head;
  // The slot of each row.
  const int* slots;
  int queries, each;
};

// `W` is the type of the norm's weight.
template <typename E, typename W = E>
struct FewRows {
  const E* x;
  long long row, column;
  const E* w;
  // May be null.
  const E* bias;
  long long bias_step;
  // Whether rows are normalized by their root mean square. The weight of the norm may be null.
  bool normalizes;
  float eps;
  const W* norm;
  long long norm_step;
  // The residual, or null.
  const E* plus;
  long long plus_row, plus_column;
  int gate;
  // `outputs` is the width of the result. With a gate, the weight has twice as many rows.
  int rows, outputs, inner;
  // If outputs are heads: the elements of a head, or 0. The first `rotated` outputs rotate. Elements `j` and
  // `j + head_dim / 2` of a head rotate together.
  int head_dim, rotated;
  const int* positions;
  long long position_step;
  const float* periods;
  long long period_step;
  Pools<E> pools = {};
  // The maximum elements of all rows, with padding, that are copied to shared memory.
  int most_shared = MAX_SHARED;

  // Reads eight elements with any stride and alignment.
  __device__ static uint4 gathered(const E* from, long long step) {
    E each[8];
    for (int i = 0; i < 8; ++i) each[i] = from[i * step];
    uint4 piece;
    memcpy(&piece, each, sizeof(piece));
    return piece;
  }

  __device__ static bool is_aligned(const void* at) { return reinterpret_cast<unsigned long long>(at) % 16 == 0; }

  __device__ static uint4 piece_of(const E* at, long long step, bool aligned) {
    return aligned ? read_rows(at) : gathered(at, step);
  }

  __device__ bool is_x_aligned() const { return column == 1 && row % 8 == 0 && is_aligned(x); }

  __device__ bool is_shared() const { return rows * (inner + PAD) <= most_shared; }

  // Whether a tile consists of pairs of outputs: a gate and the output that it multiplies, or two elements
  // that rotate together.
  __device__ bool is_paired() const { return gate || head_dim; }

  __device__ int columns() const { return is_paired() ? OUTPUTS / 2 : OUTPUTS; }

  // The columns of the result that a tile computes.
  __device__ int width() const { return gate ? OUTPUTS / 2 : OUTPUTS; }

  // The first output of a tile.
  __device__ int first_of(int tile) const {
    if (!head_dim) return tile * width();
    int tiles = head_dim / OUTPUTS;
    return tile / tiles * head_dim + tile % tiles * columns();
  }

  // Returns the row of the weight for column `place` of 8 in the first or second half of a tile.
  __device__ int row_of(int tile, int place, int second) const {
    int first = first_of(tile) + place, apart = head_dim ? head_dim / 2 : ROWS;
    // The second half of the weight's rows computes the outputs that the gate multiplies.
    return gate ? min(first, outputs - 1) + second * outputs : min(first + apart * second, outputs - 1);
  }

  __device__ static float sum_of_squares(uint4 piece) {
    E each[8];
    memcpy(each, &piece, sizeof(piece));
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += static_cast<float>(each[i]) * static_cast<float>(each[i]);
    return sum;
  }

  // Rounds in the same way as a separate norm.
  __device__ uint4 normalized(uint4 piece, uint4 weights, float scale) const {
    E each[8], by[8];
    memcpy(each, &piece, sizeof(piece));
    memcpy(by, &weights, sizeof(weights));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      E rotated = static_cast<E>(static_cast<float>(each[i]) * scale);
      each[i] = norm ? static_cast<E>(static_cast<float>(by[i]) * static_cast<float>(rotated)) : rotated;
    }
    memcpy(&piece, each, sizeof(piece));
    return piece;
  }

  // Returns the normalized piece of a row at `at`. With a float32 weight, elements are rounded only
  // after the multiplication by the weight.
  __device__ uint4 normalized_at(uint4 piece, int at, float scale, bool norm_aligned) const {
    if constexpr (cuda::std::is_same_v<W, E>) {
      uint4 weights = norm ? piece_of(norm + at * norm_step, norm_step, norm_aligned) : make_uint4(0, 0, 0, 0);
      return normalized(piece, weights, scale);
    } else {
      E each[8];
      memcpy(each, &piece, sizeof(piece));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        each[i] = static_cast<E>(static_cast<float>(each[i]) * scale * static_cast<float>(norm[(at + i) * norm_step]));
      }
      memcpy(&piece, each, sizeof(piece));
      return piece;
    }
  }

  // Calls `work` with the row and the column of each piece of `x` of this thread, and `end` with the row
  // after the last piece of a row. If there are few rows, several warps share a row. All threads of a warp
  // have the same rows.
  template <typename Work, typename End>
  __device__ void for_pieces(const Work& work, const End& end) const {
    int warps = rows <= 2 ? 4 : rows <= 4 ? 2 : 1;
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int r = warp / warps; r < rows; r += SHARES / warps) {
#pragma unroll 4
      for (int at = 8 * (32 * (warp % warps) + thread); at < inner; at += 256 * warps) work(r, at);
      end(r);
    }
  }

  // Copies the rows to shared memory, and normalizes them if `normalizes` is set.
  __device__ void share(E* shared, float* squares) const {
    bool aligned = is_x_aligned(), norm_aligned = norm_step == 1 && is_aligned(norm);
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto piece = [&](int r, int at) { return piece_of(x + r * row + at * column, column, aligned); };
    if (normalizes) {
      for (int r = thread; r < rows; r += 32) squares[r * SHARES + warp] = 0;
      __syncwarp();
      float sum = 0;
      auto end_row = [&](int r) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (thread == 0) squares[r * SHARES + warp] = sum;
        sum = 0;
      };
      for_pieces([&](int r, int at) { sum += sum_of_squares(piece(r, at)); }, end_row);
      __syncthreads();
    }
    auto leave = [&](int r, int at) {
      uint4 y = piece(r, at);
      if (normalizes) {
        float whole = 0;
#pragma unroll
        for (int share = 0; share < SHARES; ++share) whole += squares[r * SHARES + share];
        y = normalized_at(y, at, rsqrtf(whole / inner + eps), norm_aligned);
      }
      *reinterpret_cast<uint4*>(shared + r * (inner + PAD) + at) = y;
    };
    for_pieces(leave, [](int) {});
    __syncthreads();
  }

  __device__ void run(E* out, E* shared, float* sums, float* squares) const {
    if (rows <= ROWS) {
      multiply_rows<1>(out, shared, sums, squares);
    } else {
      multiply_rows<2>(out, shared, sums, squares);
    }
  }

  // Multiplies up to 8 * TILES rows by the weights of this block's tiles. Loads continue with the next tile
  // before the current tile ends, so that memory is never idle.
  template <int TILES>
  __device__ void multiply_rows(E* out, E* shared, float* sums, float* squares) const {
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int group = thread / 4, member = thread % 4;
    int tiles = (outputs + width() - 1) / width(), slots = (inner + STEP - 1) / STEP;
    bool x_aligned = is_x_aligned(), w_aligned = is_aligned(w), is_in_shared = is_shared();
    int mine = 64 * warp + 8 * member;

    uint4 a[DEPTH][2][2];
    const E* at_row[2];
    int next_tile = blockIdx.x, next_slot = 0;
    // Computes the addresses of the next tile.
    auto aim = [&]() {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        at_row[i] = w + static_cast<long long>(row_of(next_tile, group, i)) * inner;
      }
    };
    auto ask = [&](int place) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int from = next_slot * STEP + mine + 32 * half;
        bool exists = next_tile < tiles && from < inner;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          a[place][i][half] = make_uint4(0, 0, 0, 0);
          if (exists) a[place][i][half] = w_aligned ? read_once(at_row[i] + from) : gathered(at_row[i] + from, 1);
        }
      }
      if (++next_slot == slots) {
        next_slot = 0;
        next_tile += gridDim.x;
        aim();
      }
    };
    aim();
#pragma unroll
    for (int place = 0; place < DEPTH; ++place) ask(place);
    wait_for_previous();
    if (is_in_shared) share(shared, squares);

    float acc[TILES][4] = {};
    int tile = blockIdx.x, slot = 0, parity = 0;
    while (tile < tiles) {
#pragma unroll
      for (int place = 0; place < DEPTH; ++place) {
        if (tile >= tiles) break;
        uint4 b[TILES][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int from = slot * STEP + mine + 32 * half;
#pragma unroll
          for (int j = 0; j < TILES; ++j) {
            int r = group + ROWS * j;
            b[j][half] = make_uint4(0, 0, 0, 0);
            if (from >= inner || r >= rows) continue;
            b[j][half] = is_in_shared ? *reinterpret_cast<const uint4*>(shared + r * (inner + PAD) + from)
                                      : piece_of(x + r * row + from * column, column, x_aligned);
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // The elements of the inner axis are in the order in which they were read, not in the
          // order of the matrices. The order is the same for both operands, so the sum is right.
          uint4 upper = a[place][0][half], lower = a[place][1][half];
          unsigned head[4] = {upper.x, lower.x, upper.y, lower.y};
          unsigned tail[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
          for (int j = 0; j < TILES; ++j) {
            uint4 y = b[j][half];
            multiply<E>(acc[j], head, y.x, y.y);
            multiply<E>(acc[j], tail, y.z, y.w);
          }
        }
        ask(place);
        if (++slot < slots) continue;
        // Slower warps may still read the other half of `sums`.
        end_tile<TILES>(out, sums + parity * (SUMS / 2), tile, acc);
        slot = 0;
        parity = 1 - parity;
        tile += gridDim.x;
      }
    }
  }

  template <int TILES>
  __device__ void end_tile(E* out, float* sums, int tile, float (&acc)[TILES][4]) const {
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int group = thread / 4, member = thread % 4;
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int r = (warp * TILES + j) * ROWS + 2 * member + e % 2;
        sums[r * OUTPUTS + group + 8 * (e / 2)] = acc[j][e];
        acc[j][e] = 0;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * ROWS * columns(); i += 32 * SHARES) {
      int r = i / columns(), column = i % columns();
      if (r >= rows) continue;
      constexpr int APART = TILES * ROWS * OUTPUTS;
      const float* from = sums + r * OUTPUTS + column;
      float sum = 0, other = 0;
#pragma unroll
      for (int share = 0; share < SHARES; ++share) {
        sum += from[share * APART];
        if (is_paired()) other += from[share * APART + OUTPUTS / 2];
      }
      int output = first_of(tile) + column;
      if (output >= outputs) continue;
      if (head_dim) {
        end_pair(out, r, output, sum, other);
      } else {
        end_output(out, r, output, sum, other);
      }
    }
  }

  // Returns the address of an output of a head. The elements of the head are contiguous there.
  __device__ E* place_of(E* out, int r, int output) const {
    if (!pools.keys) return out + static_cast<long long>(r) * outputs + output;
    int head = output / head_dim, element = output % head_dim;
    if (head < pools.queries) return out + (static_cast<long long>(r) * pools.queries + head) * head_dim + element;
    head -= pools.queries;
    long long at = static_cast<long long>(pools.slots[r]) * head_dim + element;
    if (head < pools.each) return pools.keys + head * pools.keys_head + at;
    return pools.values + (head - pools.each) * pools.values_head + at;
  }

  // Writes two outputs of a head, and rotates them if they are below `rotated`. Rounds in the same
  // way as a separate rotation. Keys and values of a row without a slot are not written.
  __device__ void end_pair(E* out, int r, int output, float sum, float other) const {
    int half = head_dim / 2;
    if (pools.keys && pools.slots[r] < 0 && output / head_dim >= pools.queries) return;
    if (bias) {
      sum += static_cast<float>(bias[output * bias_step]);
      other += static_cast<float>(bias[(output + half) * bias_step]);
    }
    E first = static_cast<E>(sum), second = static_cast<E>(other);
    if (output < rotated) {
      float angle = angle_of(positions[r * position_step], periods[output % head_dim * period_step]);
      rotate(first, second, angle);
    }
    E* to = place_of(out, r, output);
    to[0] = first;
    to[half] = second;
  }

  // Writes an output of a row. With a gate, `sum` is the gate and `gated` the output that it multiplies.
  __device__ void end_output(E* out, int r, int output, float sum, float gated) const {
    E other = plus ? plus[r * plus_row + output * plus_column] : E(0);
    write_output(out, r, output, value_of(output, sum, gated), other);
  }

  // Returns an output before the residual is added. Rounds in the same way as separate operations.
  __device__ E value_of(int output, float sum, float gated) const {
    if (bias) {
      sum += static_cast<float>(bias[output * bias_step]);
      if (gate) gated += static_cast<float>(bias[(outputs + output) * bias_step]);
    }
    E value = static_cast<E>(sum);
    if (!gate) return value;
    E active = static_cast<E>(activated(gate, static_cast<float>(value)));
    return static_cast<E>(static_cast<float>(active) * static_cast<float>(static_cast<E>(gated)));
  }

  // `other` is the element of the residual, if there is one.
  __device__ void write_output(E* out, int r, int output, E value, E other) const {
    if (plus) value = static_cast<E>(static_cast<float>(value) + static_cast<float>(other));
    out[static_cast<long long>(r) * outputs + output] = value;
  }
};

}  // namespace etkv

// MLX generates the kernel's signature. This adds launch bounds to it: two blocks on a multiprocessor, with
// 128 registers for each thread.
#define custom_kernel_etkv_few_rows __launch_bounds__(256, 2) custom_kernel_etkv_few_rows
