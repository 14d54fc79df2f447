// Products of 17 to 64 rows with a weight, on tensor cores. The warps of a block multiply a tile of the weight
// with all rows, some of the inner axis at a time, which a ring in shared memory holds for them: weights are
// read once, rows once for each tile. Where there are fewer tiles than multiprocessors, several blocks share
// the inner axis of a tile, and the last one adds up.

namespace etkv {

// The warps of a block, and how many share the outputs of a tile; each has half of the rows.
constexpr int MANY_WARPS = 8;
constexpr int MANY_THREADS = 32 * MANY_WARPS;
constexpr int OUTPUT_WARPS = 4;
// Rows of the weight in a tile: pairs, of each one in the first half, so that a thread has the sums of both.
constexpr int MANY_TILE = 128;
constexpr int MANY_PAIRS = MANY_TILE / 2;
// Elements of a row in a place of the ring. The host says how many places there are (`MANY_DEPTH`).
constexpr int MANY_WIDE = 64;

// Where the blocks that share a tile leave their sums. `counts` has a zero for each tile.
struct Shared {
  float4* sums;
  int* counts;
  // The blocks that share a tile.
  int splits;
};

// `PARTS`: the rows in parts of 16, of which each warp has 8.
template <typename E, int PARTS>
struct ManyRows : FewRows<E> {
  using Base = FewRows<E>;
  using Base::bias, Base::gate, Base::head_dim, Base::inner, Base::outputs, Base::rows, Base::w, Base::x;
  using Base::end_output, Base::end_pair, Base::is_paired, Base::write_output;
  using Base::plus, Base::plus_column, Base::plus_row;

  static constexpr int X_ROWS = 16 * PARTS;
  static constexpr int PLACE = (MANY_TILE + X_ROWS) * MANY_WIDE;
  static constexpr int PIECES = MANY_WIDE / 8;
  // Rows that the block copies at once.
  static constexpr int COPIED = MANY_THREADS / PIECES;
  // Groups of four sums that a thread leaves of a tile.
  static constexpr int GROUPS = 2 * PARTS;

  Shared shared;

  // What a thread has of a tile: of each half and of each 8 rows, two columns of two rows.
  using Sums = float[2][PARTS][4];

  __device__ int pairs() const { return gate ? outputs : (outputs + 1) / 2; }
  __device__ int tiles() const { return (pairs() + MANY_PAIRS - 1) / MANY_PAIRS; }

  // The first output of a pair of a tile. The second is `apart()` behind it; of a gate it is what is gated.
  __device__ int output_of(int tile, int pair) const {
    if (!is_paired()) return tile * MANY_TILE + pair;
    pair += tile * MANY_PAIRS;
    if (gate) return pair;
    int half = head_dim / 2;
    return pair / half * head_dim + pair % half;
  }
  __device__ int apart() const { return gate ? outputs : head_dim ? head_dim / 2 : MANY_PAIRS; }

  // Where a piece of a row is in a place: those of eight neighbouring rows are in different banks.
  __device__ static int at_piece(int r, int piece) { return r * MANY_WIDE + 8 * (piece ^ (r % 8)); }

  // A unit is what a block does of a tile. Units of one tile are neighbours.
  struct Cursor {
    int unit, step, end;
  };

  __device__ void aim(Cursor& at, int steps) const {
    int split = at.unit % shared.splits;
    at.step = steps * split / shared.splits;
    at.end = steps * (split + 1) / shared.splits;
  }

  // Returns whether a unit ends.
  __device__ bool advance(Cursor& at, int steps) const {
    if (++at.step < at.end) return false;
    at.unit += gridDim.x;
    aim(at, steps);
    return true;
  }

  // `ring` has `MANY_DEPTH` places.
  __device__ void run_many(E* out, E* ring) const {
    constexpr int COPIES = MANY_TILE / COPIED;
    static_assert(COPIED % 8 == 0 && MANY_PAIRS % COPIED == 0, "a thread's rows are in the same banks");
    int piece = threadIdx.x % PIECES, first_row = threadIdx.x / PIECES;
    int steps = (inner + MANY_WIDE - 1) / MANY_WIDE, units = tiles() * shared.splits;
    E* mine = ring + at_piece(first_row, piece);

    Cursor next{static_cast<int>(blockIdx.x), 0, 0};
    aim(next, steps);
    // This thread's rows of the weight of a unit; null where there is none.
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
    // The rows of `x` lie behind those of the weight.
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
      // The place is there for all warps, and none reads the one before any more.
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

  // Multiplies the rows of a place with those of its weight.
  __device__ static void multiply_place(Sums& sums, const E* place) {
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int rotation = thread % 8;
    // Four matrices of 8x8: of the weight, first its rows and then its columns; of x, its columns.
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

  // Writes what a unit makes, or leaves its sums to the last block of the tile.
  __device__ void end_unit(E* out, int unit, Sums& sums) const {
    if (shared.splits > 1 && !adds_splits(unit, sums)) return;
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int tile = unit / shared.splits, pair = warp % OUTPUT_WARPS * 16 + thread / 4;
    int row = warp / OUTPUT_WARPS * 8 * PARTS + thread % 4 * 2;
    // A copy of the code for each part is too much of it: the sums of the next part come forward instead.
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

  // Leaves the sums of a unit. Returns whether this is the last block of the tile, which gets the sums of all;
  // the others begin again with zeros. The order of the blocks does not count.
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
    // What is read comes from far: all that a block has left is asked for at once.
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

  // What is added to two outputs, which the result may be written over.
  struct Added {
    E first, second;
  };

  // Whether that is read before anything is written. Where outputs are paired, too much code would stand there
  // for each of them.
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

  // Writes what two sums of a row make.
  __device__ void end(E* out, int output, int r, float first, float second) const {
    if (r >= rows || output >= outputs) return;
    if (head_dim) return end_pair(out, r, output, first, second);
    end_output(out, r, output, first, second);
    if (!gate && output + MANY_PAIRS < outputs) end_output(out, r, output + MANY_PAIRS, second, 0);
  }
};

// Normalizes a row, one a block, before many rows are multiplied. `work` has its argument.
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
