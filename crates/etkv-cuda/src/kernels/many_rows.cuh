// Products of 17 to 64 rows with a weight, on tensor cores. The warps of a block multiply a tile of the
// weight by all rows, a part of the inner axis at a time. The parts are loaded to a ring in shared memory.
// Weights are read once, and rows once for each tile. If there are fewer tiles than multiprocessors, several
// blocks share the inner axis of a tile, and the last of them adds up their sums.

namespace etkv {

// The warps of a block, and the number of warps among which the outputs of a tile are divided. Each warp has
// half of the rows.
constexpr int MANY_WARPS = 8;
constexpr int MANY_THREADS = 32 * MANY_WARPS;
constexpr int OUTPUT_WARPS = 4;
// The rows of the weight in a tile. The rows form pairs. One row of each pair is in the first half
// of the tile and the other in the second half, so that a thread has the sums of both.
constexpr int MANY_TILE = 128;
constexpr int MANY_PAIRS = MANY_TILE / 2;
// The elements of a row in a slot of the ring. The host defines the number of slots, `MANY_DEPTH`.
constexpr int MANY_WIDE = 64;

// The memory for the partial sums of blocks that share a tile. `counts` has a zero for each tile.
struct Shared {
  float4* sums;
  int* counts;
  // The number of blocks that share a tile.
  int splits;
};

// `PARTS` is the number of rows divided by 16. Of each 16 rows, a warp has 8.
template <typename E, int PARTS>
struct ManyRows : FewRows<E> {
  using Base = FewRows<E>;
  using Base::bias, Base::gate, Base::head_dim, Base::inner, Base::outputs, Base::rows, Base::w, Base::x;
  using Base::end_output, Base::end_pair, Base::is_paired, Base::write_output;
  using Base::plus, Base::plus_column, Base::plus_row;

  static constexpr int X_ROWS = 16 * PARTS;
  static constexpr int PLACE = (MANY_TILE + X_ROWS) * MANY_WIDE;
  static constexpr int PIECES = MANY_WIDE / 8;
  // The number of rows that the block copies at a time.
  static constexpr int COPIED = MANY_THREADS / PIECES;
  // The groups of four partial sums that a thread has of a tile.
  static constexpr int GROUPS = 2 * PARTS;

  Shared shared;

  // The sums of a thread. For each half of a tile and each 8 rows, it has two outputs of two rows.
  using Sums = float[2][PARTS][4];

  __device__ int pairs() const { return gate ? outputs : (outputs + 1) / 2; }
  __device__ int tiles() const { return (pairs() + MANY_PAIRS - 1) / MANY_PAIRS; }

  // Returns the first output of a pair. The second row of the weight is `apart()` rows later. With
  // a gate, the second row computes the output that the gate multiplies.
  __device__ int output_of(int tile, int pair) const {
    if (!is_paired()) return tile * MANY_TILE + pair;
    pair += tile * MANY_PAIRS;
    if (gate) return pair;
    int half = head_dim / 2;
    return pair / half * head_dim + pair % half;
  }
  __device__ int apart() const { return gate ? outputs : head_dim ? head_dim / 2 : MANY_PAIRS; }

  // Returns the offset of a row's piece in a slot. Pieces of eight adjacent rows are in different banks.
  __device__ static int at_piece(int r, int piece) { return r * MANY_WIDE + 8 * (piece ^ (r % 8)); }

  // A position in the work. A unit is a block's part of a tile. The units of a tile have consecutive numbers.
  struct Cursor {
    int unit, step, end;
  };

  __device__ void aim(Cursor& at, int steps) const {
    int split = at.unit % shared.splits;
    at.step = steps * split / shared.splits;
    at.end = steps * (split + 1) / shared.splits;
  }

  // Moves to the next step. Returns whether a unit ended.
  __device__ bool advance(Cursor& at, int steps) const {
    if (++at.step < at.end) return false;
    at.unit += gridDim.x;
    aim(at, steps);
    return true;
  }

  // `ring` has `MANY_DEPTH` slots.
  __device__ void run_many(E* out, E* ring) const {
    constexpr int COPIES = MANY_TILE / COPIED;
    static_assert(COPIED % 8 == 0 && MANY_PAIRS % COPIED == 0, "a thread's rows are in the same banks");
    int piece = threadIdx.x % PIECES, first_row = threadIdx.x / PIECES;
    int steps = (inner + MANY_WIDE - 1) / MANY_WIDE, units = tiles() * shared.splits;
    E* mine = ring + at_piece(first_row, piece);

    Cursor next{static_cast<int>(blockIdx.x), 0, 0};
    aim(next, steps);
    // The rows of the weight that this thread copies, or null for rows that do not exist.
    const E* from[COPIES];
    auto open = [&](int unit) {
      int tile = unit / shared.splits, rows_of_w = gate ? 2 * outputs : outputs;
#pragma unroll
      for (int c = 0; c < COPIES; ++c) {
        int r = first_row + c * COPIED, first = output_of(tile, r % MANY_PAIRS);
        int row = first + r / MANY_PAIRS * apart();
        bool exists = unit < units && first < outputs && row < rows_of_w;
        from[c] = exists ? w + static_cast<long long>(row) * inner + 8 * piece : nullptr;
      }
    };
    open(next.unit);
    auto ask_weights = [&](int place) {
      int at = next.step * MANY_WIDE;
      bool is_inside = at + 8 * piece < inner;
#pragma unroll
      for (int c = 0; c < COPIES; ++c) {
        bool exists = is_inside && from[c];
        copy_later(mine + place * PLACE + c * COPIED * MANY_WIDE, exists ? from[c] + at : w, exists);
      }
    };
    // In a slot, the rows of `x` follow those of the weight.
    const E* own_x = x + static_cast<long long>(first_row) * inner + 8 * piece;
    auto ask_rows = [&](int place, const Cursor& of) {
      int at = of.step * MANY_WIDE;
      bool is_inside = of.unit < units && at + 8 * piece < inner;
#pragma unroll
      for (int c = 0; c < (X_ROWS + COPIED - 1) / COPIED; ++c) {
        if (X_ROWS % COPIED && first_row >= X_ROWS) break;
        bool exists = is_inside && first_row + c * COPIED < rows;
        const E* row = own_x + static_cast<long long>(c * COPIED) * inner + at;
        copy_later(mine + place * PLACE + (MANY_TILE + c * COPIED) * MANY_WIDE, exists ? row : x, exists);
      }
    };
    auto advance_next = [&]() {
      if (advance(next, steps)) open(next.unit);
    };
    Cursor at = next, known = next;
#pragma unroll 1
    for (int place = 0; place < MANY_DEPTH - 1; ++place) {
      ask_weights(place);
      end_of_copies();
      advance_next();
    }
    wait_for_previous();
#pragma unroll 1
    for (int place = 0; place < MANY_DEPTH - 1; ++place) {
      ask_rows(place, known);
      end_of_copies();
      advance(known, steps);
    }

    Sums sums = {};
    int place = 0, free = MANY_DEPTH - 1;
    while (at.unit < units) {
      wait_for_copies<MANY_DEPTH - 2>();
      // The slot is now loaded for all warps, and no warp reads the previous slot any more.
      __syncthreads();
      ask_weights(free);
      ask_rows(free, next);
      end_of_copies();
      advance_next();
      multiply_place(sums, ring + place * PLACE);
      free = place;
      place = place + 1 == MANY_DEPTH ? 0 : place + 1;
      int unit = at.unit;
      if (advance(at, steps)) end_unit(out, unit, sums);
    }
  }

  // Multiplies the rows of `x` in a slot by the rows of the weight.
  __device__ static void multiply_place(Sums& sums, const E* place) {
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int rotation = thread % 8;
    // A read loads four 8x8 matrices. For the weight, these are two by two. For `x`, they are adjacent
    // columns.
    const E* rows_of_w = place + (warp % OUTPUT_WARPS * 16 + thread % 16) * MANY_WIDE;
    const E* rows_of_x = place + (MANY_TILE + warp / OUTPUT_WARPS * 8 * PARTS + rotation) * MANY_WIDE;
#pragma unroll
    for (int k = 0; k < MANY_WIDE / 32; ++k) {
      unsigned a[2][2][4], b[PARTS][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          int piece = (4 * k + 2 * i + thread / 16) ^ rotation;
          read_matrices(a[half][i], rows_of_w + half * MANY_PAIRS * MANY_WIDE + 8 * piece);
        }
      }
#pragma unroll
      for (int n = 0; n < PARTS; ++n) read_matrices(b[n], rows_of_x + 8 * n * MANY_WIDE + 8 * ((4 * k + thread / 8) ^ rotation));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int n = 0; n < PARTS; ++n) {
          multiply<E>(sums[0][n], a[0][i], b[n][2 * i], b[n][2 * i + 1]);
          multiply<E>(sums[1][n], a[1][i], b[n][2 * i], b[n][2 * i + 1]);
        }
      }
    }
  }

  // Writes the outputs of a tile, if this is the last block of the tile. Other blocks write partial sums for
  // it.
  __device__ void end_unit(E* out, int unit, Sums& sums) const {
    if (shared.splits > 1 && !adds_splits(unit, sums)) return;
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int tile = unit / shared.splits, pair = warp % OUTPUT_WARPS * 16 + thread / 4;
    int row = warp / OUTPUT_WARPS * 8 * PARTS + thread % 4 * 2;
    // This loop is not unrolled, because the code would become too large. Instead, each iteration moves the
    // sums of the next part to index 0.
#pragma unroll 1
    for (int n = 0; n < PARTS; ++n, row += 8) {
      Added added[4];
      if (is_added()) {
#pragma unroll
        for (int e = 0; e < 4; ++e) added[e] = read_added(output_of(tile, pair + e / 2 * 8), row + e % 2);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int output = output_of(tile, pair + e / 2 * 8);
        if (is_added()) {
          end_added(out, output, row + e % 2, sums[0][0][e], sums[1][0][e], added[e]);
        } else {
          end(out, output, row + e % 2, sums[0][0][e], sums[1][0][e]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int from = 0; from < PARTS; ++from) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[half][from][e] = from + 1 < PARTS ? sums[half][from + 1][e] : 0;
        }
      }
    }
  }

  // Writes the partial sums of a unit, and resets them. Returns whether this is the last block of
  // the tile. If so, reads and adds the sums of all blocks of the tile, in the order of units.
  __device__ bool adds_splits(int unit, Sums& sums) const {
    __shared__ bool is_last;
    int tile = unit / shared.splits;
    float4* left = shared.sums + static_cast<long long>(unit) * GROUPS * MANY_THREADS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      float(&of)[4] = sums[i / PARTS][i % PARTS];
      left[i * MANY_THREADS] = make_float4(of[0], of[1], of[2], of[3]);
      of[0] = of[1] = of[2] = of[3] = 0;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(shared.counts + tile, 1) == shared.splits - 1;
      if (is_last) shared.counts[tile] = 0;
    }
    __syncthreads();
    if (!is_last) return false;
    __threadfence();
    // To hide the latency of global memory, all partial sums of a block are loaded at once.
    const float4* its = left - static_cast<long long>(unit % shared.splits) * GROUPS * MANY_THREADS;
#pragma unroll 2
    for (int split = 0; split < shared.splits; ++split) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i, its += MANY_THREADS) {
        float(&of)[4] = sums[i / PARTS][i % PARTS];
        float4 part = __ldcg(its);
        of[0] += part.x, of[1] += part.y, of[2] += part.z, of[3] += part.w;
      }
    }
    return true;
  }

  // The residual of two outputs. It may be in the buffer of the result.
  struct Added {
    E first, second;
  };

  // Whether the residual is read before any output is written. With paired outputs, the code for this would
  // be too large.
  __device__ bool is_added() const { return plus && !is_paired() && !bias; }

  __device__ Added read_added(int output, int r) const {
    Added added = {E(0), E(0)};
    if (r >= rows) return added;
    const E* from = plus + r * plus_row + output * plus_column;
    if (output < outputs) added.first = *from;
    if (output + MANY_PAIRS < outputs) added.second = from[MANY_PAIRS * plus_column];
    return added;
  }

  __device__ void end_added(E* out, int output, int r, float first, float second, Added added) const {
    if (r >= rows) return;
    if (output < outputs) write_output(out, r, output, E(first), added.first);
    if (output + MANY_PAIRS < outputs) write_output(out, r, output + MANY_PAIRS, E(second), added.second);
  }

  // Writes the outputs of two sums of a row.
  __device__ void end(E* out, int output, int r, float first, float second) const {
    if (r >= rows || output >= outputs) return;
    if (head_dim) return end_pair(out, r, output, first, second);
    end_output(out, r, output, first, second);
    if (!gate && output + MANY_PAIRS < outputs) end_output(out, r, output + MANY_PAIRS, second, 0);
  }
};

// Normalizes the rows of a product of many rows, one in each block.
template <typename E>
__device__ inline void normalize(const FewRows<E>& work, E* out, float* squares) {
  int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const E* from = work.x + static_cast<long long>(blockIdx.x) * work.inner;
  E* to = out + static_cast<long long>(blockIdx.x) * work.inner;
  float sum = 0;
  for (int at = 8 * threadIdx.x; at < work.inner; at += 8 * blockDim.x) {
    sum += FewRows<E>::sum_of_squares(read_rows(from + at));
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) squares[warp] = sum;
  __syncthreads();
  float whole = 0;
  for (int i = 0; i < warps; ++i) whole += squares[i];
  float scale = rsqrtf(whole / work.inner + work.eps);
  bool aligned = FewRows<E>::is_aligned(work.norm);
  for (int at = 8 * threadIdx.x; at < work.inner; at += 8 * blockDim.x) {
    uint4 weights =
        work.norm ? FewRows<E>::piece_of(work.norm + at, 1, aligned) : make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(to + at) = work.normalized(read_rows(from + at), weights, scale);
  }
}

}  // namespace etkv
