// The product of a single row with a weight. A warp multiplies a pair of the weight's rows at a time: those
// of a gate and of the output that it multiplies, those of two elements that rotate together, or two adjacent
// rows. It loads their first pieces before it waits for the previous kernel. If there are fewer pairs than
// warps, several warps share the inner axis of a pair.

namespace etkv {

// The pieces of 8 elements that a thread loads from each of the two rows at a time, and the number of such
// batches that it loads ahead.
constexpr int ROW_PIECES = 4;
constexpr int ROW_DEPTH = 2;
constexpr int ROW_BATCH = 8 * 32 * ROW_PIECES;
// The pieces of `x` that a thread keeps in registers, so that it does not have to read them twice.
constexpr int ROW_HELD = 4;

template <typename E, typename W = E>
struct OneRow : FewRows<E, W> {
  using Base = FewRows<E, W>;
  using Base::column, Base::gate, Base::head_dim, Base::inner, Base::norm, Base::norm_step, Base::normalizes,
      Base::outputs;
  using Base::end_output, Base::end_pair, Base::gathered, Base::is_aligned, Base::normalized_at, Base::piece_of,
      Base::sum_of_squares;

  __device__ int pairs() const { return gate ? outputs : (outputs + 1) / 2; }

  // Returns the first output of a pair. With a gate, it is the only output.
  __device__ int output_of(int pair) const {
    if (gate) return pair;
    if (!head_dim) return 2 * pair;
    int half = head_dim / 2;
    return pair / half * head_dim + pair % half;
  }

  // Returns the distance between the two rows of the weight.
  __device__ int apart() const { return gate ? outputs : head_dim ? head_dim / 2 : 1; }

  // Copies the row to shared memory, and normalizes it if `normalizes` is set.
  __device__ void share_row(E* shared, float* squares) const {
    constexpr int THREADS = 32 * SHARES;
    bool aligned = column == 1 && is_aligned(this->x), norm_aligned = norm_step == 1 && is_aligned(norm);
    auto piece = [&](int at) { return piece_of(this->x + at * column, column, aligned); };
    uint4 held[ROW_HELD];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < ROW_HELD; ++i) {
      int at = 8 * (threadIdx.x + THREADS * i);
      held[i] = at < inner ? piece(at) : make_uint4(0, 0, 0, 0);
      sum += sum_of_squares(held[i]);
    }
    for (int at = 8 * (threadIdx.x + THREADS * ROW_HELD); at < inner; at += 8 * THREADS) {
      sum += sum_of_squares(piece(at));
    }
    float scale = 1;
    if (normalizes) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
      __syncthreads();
      float whole = 0;
#pragma unroll
      for (int share = 0; share < SHARES; ++share) whole += squares[share];
      scale = rsqrtf(whole / inner + this->eps);
    }
    auto leave = [&](int at, uint4 y) {
      if (normalizes) y = normalized_at(y, at, scale, norm_aligned);
      *reinterpret_cast<uint4*>(shared + at) = y;
    };
#pragma unroll
    for (int i = 0; i < ROW_HELD; ++i) {
      int at = 8 * (threadIdx.x + THREADS * i);
      if (at < inner) leave(at, held[i]);
    }
    for (int at = 8 * (threadIdx.x + THREADS * ROW_HELD); at < inner; at += 8 * THREADS) leave(at, piece(at));
    __syncthreads();
  }

  __device__ static void add_product(float& sum, uint4 piece, uint4 other) {
    E a[8], b[8];
    memcpy(a, &piece, sizeof(piece));
    memcpy(b, &other, sizeof(other));
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += static_cast<float>(a[i]) * static_cast<float>(b[i]);
  }

  // `team` is the number of warps that share a pair. `left` has two floats for each warp, for two pairs.
  __device__ void run_row(E* out, E* shared, float* squares, int team, float2* left) const {
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32, teams = SHARES / team;
    int first = blockIdx.x * teams + warp / team, stride = gridDim.x * teams, n = pairs();
    // This warp's share of the inner axis.
    int span = (inner + 256 * team - 1) / (256 * team) * 256, begin = warp % team * span;
    int end = min(begin + span, inner), batches = (span + ROW_BATCH - 1) / ROW_BATCH;
    bool aligned = is_aligned(this->w);

    uint4 a[ROW_DEPTH][2][ROW_PIECES];
    const E* at_row[2];
    int next = first, next_batch = 0;
    auto aim = [&]() {
      int output = output_of(next);
      // If the number of outputs is odd, the last one is paired with itself.
      int other = gate ? output + outputs : min(output + apart(), outputs - 1);
      at_row[0] = this->w + static_cast<long long>(output) * inner;
      at_row[1] = this->w + static_cast<long long>(other) * inner;
    };
    auto ask = [&](int place) {
#pragma unroll
      for (int j = 0; j < ROW_PIECES; ++j) {
        int from = begin + next_batch * ROW_BATCH + 8 * (thread + 32 * j);
        bool exists = next < n && from < end;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          a[place][i][j] = make_uint4(0, 0, 0, 0);
          if (exists) a[place][i][j] = aligned ? read_once(at_row[i] + from) : gathered(at_row[i] + from, 1);
        }
      }
      if (++next_batch == batches) {
        next_batch = 0;
        next += stride;
        aim();
      }
    };
    aim();
#pragma unroll
    for (int place = 0; place < ROW_DEPTH; ++place) ask(place);
    wait_for_previous();
    share_row(shared, squares);

    float sums[2] = {};
    int pair = first, batch = 0, parity = 0;
    while (pair < n) {
#pragma unroll
      for (int place = 0; place < ROW_DEPTH; ++place) {
        if (pair >= n) break;
#pragma unroll
        for (int j = 0; j < ROW_PIECES; ++j) {
          int from = begin + batch * ROW_BATCH + 8 * (thread + 32 * j);
          if (from >= end) continue;
          uint4 y = *reinterpret_cast<const uint4*>(shared + from);
          add_product(sums[0], a[place][0][j], y);
          add_product(sums[1], a[place][1][j], y);
        }
        ask(place);
        if (++batch < batches) continue;
        add_threads(sums);
        // A slower warp may still read the other half of `left`.
        if (team == 1 || add_warps(sums, left + parity * SHARES, team)) end_row(out, pair, sums);
        sums[0] = sums[1] = 0;
        batch = 0;
        parity = 1 - parity;
        pair += stride;
      }
    }
  }

  __device__ static void add_threads(float (&sums)[2]) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], step);
      sums[1] += __shfl_xor_sync(0xffffffffu, sums[1], step);
    }
  }

  // Adds the sums of a team's warps. Returns whether this is the first warp of the team, which gets the
  // total.
  __device__ static bool add_warps(float (&sums)[2], float2* left, int team) {
    int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) left[warp] = make_float2(sums[0], sums[1]);
    wait_for_team(warp / team, 32 * team);
    if (warp % team) return false;
    for (int i = 1; i < team; ++i) {
      float2 its = left[warp + i];
      sums[0] += its.x;
      sums[1] += its.y;
    }
    return true;
  }

  __device__ void end_row(E* out, int pair, const float (&sums)[2]) const {
    if (threadIdx.x % 32 != 0) return;
    int output = output_of(pair);
    if (head_dim) {
      end_pair(out, 0, output, sums[0], sums[1]);
      return;
    }
    end_output(out, 0, output, sums[0], sums[1]);
    if (!gate && output + 1 < outputs) end_output(out, 0, output + 1, sums[1], 0);
  }
};

}  // namespace etkv

// Launch bounds as for `few_rows.cuh`.
#define custom_kernel_etkv_one_row __launch_bounds__(256, 2) custom_kernel_etkv_one_row
