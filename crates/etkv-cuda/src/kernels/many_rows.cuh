// Products of 17 to 64 rows with a weight, on tensor cores. Each warp has a share of the inner axis and a
// ring of its own in shared memory, to which it copies its share of a tile of the weight and of the rows,
// whole lines of memory at a time. Weights are read once, rows once for each tile. Where there are fewer
// tiles than multiprocessors, several blocks share the inner axis of a tile, and the last one adds up.

namespace etkv {

// The warps of a block.
constexpr int MANY_WARPS = 4;
// Rows of the weight in a tile.
constexpr int MANY_TILE = 64;
// Elements of a row that a warp multiplies at a time, and the places of its ring.
constexpr int MANY_WIDE = 64, MANY_DEPTH = 3;
// Columns of a tile whose sums are added at a time.
constexpr int MANY_SUMMED = 16;
constexpr int MANY_THREADS = 32 * MANY_WARPS;

// Where the blocks that share a tile leave their sums. `counts` has a zero for each tile.
struct Shared {
  float* sums;
  int* counts;
  // The blocks that share a tile.
  int splits;
};

// `PARTS`: the rows in parts of 16.
template <typename E, int PARTS>
struct ManyRows : FewRows<E> {
  using Base = FewRows<E>;
  using Base::end_output, Base::end_pair, Base::is_paired, Base::write_output;
  using Base::bias, Base::gate, Base::head_dim, Base::inner, Base::outputs, Base::rows, Base::w, Base::x;
  using Base::plus, Base::plus_column, Base::plus_row;

  static constexpr int X_ROWS = 16 * PARTS;
  static constexpr int HALF = MANY_TILE / 2;
  static constexpr int PLACE = (MANY_TILE + X_ROWS) * MANY_WIDE;
  static constexpr int PIECES = MANY_WIDE / 8;
  // Rows of one copy of a warp.
  static constexpr int COPIED = 32 / PIECES;
  // Columns that end together: of pairs, one of each half.
  static constexpr int ROUNDS = MANY_TILE / MANY_SUMMED;
  static constexpr int ELEMENTS = X_ROWS * MANY_TILE;
  // The floats between the sums of two rows, so that four rows are in different banks.
  static constexpr int SUM_PITCH = MANY_SUMMED + 8;

  Shared shared;

  __device__ int columns() const { return is_paired() ? HALF : MANY_TILE; }
  // Heads have whole tiles, and outputs of both of a pair.
  __device__ int tiles() const { return head_dim ? outputs / MANY_TILE : (outputs + columns() - 1) / columns(); }

  // The first output of a tile.
  __device__ int first_of(int tile) const {
    if (!head_dim) return tile * columns();
    int each = head_dim / MANY_TILE;
    return tile / each * head_dim + tile % each * HALF;
  }

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

  // Copies a thread's pieces of every `COPIED`-th row. Of `count` rows only the first exist; where a place
  // has all of them, a warp has few instructions for each piece of memory.
  template <int ROWS>
  __device__ static void copy_rows(E* place, const E* from, long long step, int count) {
    int thread = threadIdx.x % 32, first_row = thread / PIECES;
    static_assert(COPIED == 4, "of eight rows in different banks a thread has two");
    E* to[2] = {place + at_piece(first_row, thread % PIECES), place + at_piece(first_row + COPIED, thread % PIECES)};
    if (count >= ROWS) {
#pragma unroll
      for (int c = 0; c < ROWS / COPIED; ++c, from += step) copy_later(to[c % 2] + c / 2 * 8 * MANY_WIDE, from, true);
      return;
    }
    const E* first = from;
#pragma unroll 1
    for (int c = 0; c < ROWS / COPIED; ++c, from += step) {
      bool exists = first_row + c * COPIED < count;
      copy_later((c % 2 ? to[1] : to[0]) + c / 2 * 8 * MANY_WIDE, exists ? from : first, exists);
    }
  }

  // `memory` has a ring for each warp, and then the sums of some columns.
  __device__ void run_many(E* out, E* memory) const {
    constexpr int W = MANY_WARPS, WIDE = MANY_WIDE;
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int piece = thread % PIECES, first_row = thread / PIECES;
    int steps = (inner + W * WIDE - 1) / (W * WIDE), units = tiles() * shared.splits;
    E* ring = memory + warp * MANY_DEPTH * PLACE;
    float* sums = reinterpret_cast<float*>(memory + W * MANY_DEPTH * PLACE);
    // The second half of a tile's rows: those that belong to the first, or the next.
    int apart = gate ? outputs : head_dim ? head_dim / 2 : HALF;
    int behind = is_paired() ? 0 : HALF;
    long long row_step = static_cast<long long>(COPIED) * inner;

    Cursor next{static_cast<int>(blockIdx.x), 0, 0};
    aim(next, steps);
    // This thread's first piece of each half of the weight's rows of a unit, and how many rows each half has.
    const E* halves[2];
    int counts[2];
    auto open = [&](int unit) {
      int first = unit < units ? first_of(unit / shared.splits) : 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        halves[half] = w + static_cast<long long>(first + half * apart + first_row) * inner + warp * WIDE + 8 * piece;
        counts[half] = unit < units ? outputs - first - half * behind : 0;
      }
    };
    open(next.unit);
    auto ask_weights = [&](int place) {
      int from = next.step * W * WIDE;
      bool is_inside = from + warp * WIDE + 8 * piece < inner;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        copy_rows<HALF>(ring + place * PLACE + half * HALF * WIDE, is_inside ? halves[half] + from : w, row_step,
                        is_inside ? counts[half] : 0);
      }
    };
    // The rows of `x` lie behind those of the weight.
    auto ask_rows = [&](int place, const Cursor& of) {
      int from = (of.step * W + warp) * WIDE + 8 * piece;
      bool is_inside = of.unit < units && from < inner;
      const E* at = x + static_cast<long long>(first_row) * inner + from;
      copy_rows<X_ROWS>(ring + place * PLACE + MANY_TILE * WIDE, is_inside ? at : x, row_step, is_inside ? rows : 0);
    };
    auto advance_next = [&](Cursor& cursor) {
      if (advance(cursor, steps)) open(cursor.unit);
    };
    Cursor first = next;
#pragma unroll 1
    for (int place = 0; place < MANY_DEPTH; ++place) {
      ask_weights(place);
      end_of_copies();
      advance_next(next);
    }
    wait_for_previous();
    Cursor known = first;
#pragma unroll 1
    for (int place = 0; place < MANY_DEPTH; ++place) {
      ask_rows(place, known);
      end_of_copies();
      advance(known, steps);
    }

    float acc[PARTS][MANY_TILE / 8][4] = {};
    Cursor at = first;
    int place = 0;
    while (at.unit < units) {
      wait_for_copies<MANY_DEPTH - 1>();
      __syncwarp();
      multiply_place(acc, ring + place * PLACE);
      __syncwarp();
      ask_weights(place);
      ask_rows(place, next);
      end_of_copies();
      advance_next(next);
      place = place + 1 == MANY_DEPTH ? 0 : place + 1;
      int unit = at.unit;
      if (advance(at, steps)) end_unit(out, sums, unit, acc);
    }
  }

  // Multiplies the rows of a place with those of its weight.
  __device__ static void multiply_place(float (&acc)[PARTS][MANY_TILE / 8][4], const E* place) {
    int thread = threadIdx.x % 32;
    // Of four matrices of 8x8: first the rows and then the columns of x, and the other way round for the weight.
    const E* rows_of_x = place + (MANY_TILE + thread % 16) * MANY_WIDE;
    const E* rows_of_w = place + (thread / 16 * 8 + thread % 8) * MANY_WIDE;
#pragma unroll
    for (int k = 0; k < MANY_WIDE / 16; ++k) {
      int x_piece = 8 * ((2 * k + thread / 16) ^ (thread % 8)), w_piece = 8 * ((2 * k + thread / 8 % 2) ^ (thread % 8));
      unsigned a[PARTS][4];
#pragma unroll
      for (int i = 0; i < PARTS; ++i) read_matrices(a[i], rows_of_x + 16 * i * MANY_WIDE + x_piece);
#pragma unroll
      for (int n = 0; n < MANY_TILE / 8; n += 2) {
        unsigned b[4];
        read_matrices(b, rows_of_w + 8 * n * MANY_WIDE + w_piece);
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          multiply<E>(acc[i][n], a[i], b[0], b[1]);
          multiply<E>(acc[i][n + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // Adds what the warps have of a unit. Writes its outputs, or leaves it to the last block of the tile.
  __device__ void end_unit(E* out, float* sums, int unit, float (&acc)[PARTS][MANY_TILE / 8][4]) const {
    constexpr int AT_ONCE = X_ROWS * 8 / MANY_THREADS;
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int group = thread / 4, member = thread % 4;
    int tile = unit / shared.splits, column = threadIdx.x % 8;
    float* left = shared.sums + static_cast<long long>(unit) * ELEMENTS;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
      for (int i = 0; i < 2 * PARTS; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float(&of)[4] = acc[i / 2][round + half * ROUNDS];
          float* to = sums + (warp * X_ROWS + 8 * i + group) * SUM_PITCH + 8 * half + 2 * member;
          *reinterpret_cast<float2*>(to) = make_float2(of[i % 2 * 2], of[i % 2 * 2 + 1]);
          of[i % 2 * 2] = of[i % 2 * 2 + 1] = 0;
        }
      }
      int pair = 8 * round + column;
      auto sum_of = [&](int r, float& first, float& second) {
        const float* its = sums + r * SUM_PITCH + column;
#pragma unroll
        for (int from = 0; from < MANY_WARPS; ++from, its += X_ROWS * SUM_PITCH) {
          first += its[0];
          second += its[8];
        }
      };
      if (shared.splits > 1) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          int r = row_of_item(i);
          float first = 0, second = 0;
          sum_of(r, first, second);
          left[r * MANY_TILE + pair] = first;
          left[r * MANY_TILE + HALF + pair] = second;
        }
      } else if (is_added()) {
        Added added[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) added[i] = read_added(tile, row_of_item(i), pair);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          float first = 0, second = 0;
          sum_of(row_of_item(i), first, second);
          end_added(out, tile, row_of_item(i), pair, first, second, added[i]);
        }
      } else {
        __syncthreads();
        // Two at a time hide much of what each waits for; all together take too much code.
#pragma unroll 1
        for (int i = 0; i < AT_ONCE; i += 2) {
          float first[2] = {}, second[2] = {};
#pragma unroll
          for (int j = 0; j < 2; ++j) sum_of(row_of_item(i + j), first[j], second[j]);
#pragma unroll
          for (int j = 0; j < 2; ++j) end(out, tile, row_of_item(i + j), pair, first[j], second[j]);
        }
      }
      __syncthreads();
    }
    if (shared.splits > 1) add_splits(out, sums, tile);
  }

  // The row of a thread's item of a round.
  __device__ static int row_of_item(int i) { return i * (MANY_THREADS / 8) + threadIdx.x / 8; }

  // Adds what the blocks of a tile have left, if this is the last of them. Their order does not count.
  __device__ void add_splits(E* out, float* sums, int tile) const {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(shared.counts + tile, 1) == shared.splits - 1;
      if (is_last) shared.counts[tile] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const float* all = shared.sums + static_cast<long long>(tile) * shared.splits * ELEMENTS;
    // What is read comes from far: ask for that of several rows at once.
    constexpr int AT_ONCE = 8, ROWS_APART = MANY_THREADS / HALF;
    int pair = threadIdx.x % HALF;
    for (int from = threadIdx.x / HALF; from < rows; from += AT_ONCE * ROWS_APART) {
      Added added[AT_ONCE];
      float first[AT_ONCE] = {}, second[AT_ONCE] = {};
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        added[i] = is_added() ? read_added(tile, from + i * ROWS_APART, pair) : Added{};
      }
      for (int split = 0; split < shared.splits; ++split) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const float* its = all + split * ELEMENTS + (from + i * ROWS_APART) % X_ROWS * MANY_TILE + pair;
          first[i] += __ldcg(its);
          second[i] += __ldcg(its + HALF);
        }
      }
      if (is_added()) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          end_added(out, tile, from + i * ROWS_APART, pair, first[i], second[i], added[i]);
        }
        continue;
      }
      float2* own = reinterpret_cast<float2*>(sums) + threadIdx.x;
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) own[i * MANY_THREADS] = make_float2(first[i], second[i]);
#pragma unroll 1
      for (int i = 0; i < AT_ONCE; ++i) {
        float2 both = own[i * MANY_THREADS];
        end(out, tile, from + i * ROWS_APART, pair, both.x, both.y);
      }
    }
  }

  // What is added to two outputs, which the result may be written over.
  struct Added {
    E first, second;
  };

  // Whether that is read before the sums are there. Where outputs are paired, too much code would stand there
  // for each of them.
  __device__ bool is_added() const { return plus && !is_paired() && !bias; }

  __device__ Added read_added(int tile, int r, int pair) const {
    Added added = {E(0), E(0)};
    int output = first_of(tile) + pair;
    if (r >= rows) return added;
    const E* from = plus + r * plus_row + output * plus_column;
    if (output < outputs) added.first = *from;
    if (output + HALF < outputs) added.second = from[HALF * plus_column];
    return added;
  }

  __device__ void end_added(E* out, int tile, int r, int pair, float first, float second, Added added) const {
    int output = first_of(tile) + pair;
    if (r >= rows) return;
    if (output < outputs) write_output(out, r, output, E(first), added.first);
    if (output + HALF < outputs) write_output(out, r, output + HALF, E(second), added.second);
  }

  // Writes what two sums of a row of a tile make.
  __device__ void end(E* out, int tile, int r, int pair, float first, float second) const {
    int output = first_of(tile) + pair;
    if (r >= rows || output >= outputs) return;
    if (head_dim) return end_pair(out, r, output, first, second);
    end_output(out, r, output, first, second);
    if (!gate && output + HALF < outputs) end_output(out, r, output + HALF, second, 0);
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
