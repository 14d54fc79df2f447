// Products of 2 to 16 rows with a weight, on tensor cores. The warps of a team share the inner axis. Each
// warp copies its share of a tile of the weight to a ring in shared memory, in whole cache lines, and begins
// before it waits for the previous kernel. Rows of `x` with at most `MAX_HELD` elements stay in registers for
// all tiles. Longer rows are copied to the ring, too.

namespace etkv {

constexpr int TILED_WARPS = 16;
// The rows of the weight in a tile.
constexpr int TILE = 16;
// The elements of a row that a warp multiplies at a time, and the slots of its ring: for rows that stay in
// registers, and for longer rows.
constexpr int HELD_WIDE = 128, HELD_DEPTH = 2;
constexpr int OTHER_WIDE = 64, OTHER_DEPTH = 3;
// The maximum length of rows that stay in registers.
constexpr int MAX_HELD = TILED_WARPS * HELD_WIDE;

// `HALVES` is 1 for up to 8 rows of `x`, and 2 for up to 16.
template <typename E, int HALVES, bool HELD>
struct TiledRows : FewRows<E> {
  using Base = FewRows<E>;
  using Base::end_output, Base::end_pair, Base::is_paired, Base::normalized, Base::sum_of_squares;
  using Base::gate, Base::head_dim, Base::inner, Base::norm, Base::normalizes, Base::outputs, Base::rows, Base::w,
      Base::x;

  static constexpr int GROUPS = TILE / 8;
  static constexpr int WIDE = HELD ? HELD_WIDE : OTHER_WIDE;
  static constexpr int DEPTH = HELD ? HELD_DEPTH : OTHER_DEPTH;
  static constexpr int PIECES = WIDE / 8;
  // The number of elements of a ring's slot, the number of rows that a warp copies at a time, and
  // the number of floats of a warp's partial sums of a tile.
  static constexpr int PLACE = (TILE + (HELD ? 0 : 8 * HALVES)) * WIDE;
  static constexpr int COPIED = 32 / PIECES;
  static constexpr int SUMS_OF_WARP = 8 * HALVES * TILE;

  __device__ int columns() const { return is_paired() ? TILE / 2 : TILE; }

  __device__ int first_of(int tile) const {
    if (!head_dim) return tile * columns();
    int tiles = head_dim / TILE;
    return tile / tiles * head_dim + tile % tiles * (TILE / 2);
  }

  // Returns the offset of a row's piece in a slot. The order of pieces differs between adjacent rows, so that
  // they are in different banks.
  __device__ static int at_piece(int r, int piece) { return r * WIDE + 8 * (piece ^ (r % 2 * 4)); }

  // `memory` has a ring for each warp, the partial sums of two tiles, and the sums of squares of rows.
  __device__ void run_tiled(E* out, E* memory) const {
    constexpr int W = TILED_WARPS;
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int group = thread / 4, member = thread % 4;
    int shares = HELD ? (inner + WIDE - 1) / WIDE : W, teams = W / shares;
    int team = warp / shares, share = warp % shares;
    if (team >= teams) return;
    int stride = teams * gridDim.x;
    int tiles = head_dim ? outputs / TILE : (outputs + columns() - 1) / columns();
    int steps = HELD ? 1 : (inner + W * WIDE - 1) / (W * WIDE);
    E* ring = memory + warp * DEPTH * PLACE;
    float* sums = reinterpret_cast<float*>(memory + W * DEPTH * PLACE);
    float* squares = sums + 2 * W * SUMS_OF_WARP;

    // This thread copies a piece of every COPIED-th row of a tile. The two rows of a pair are in different
    // halves of the tile.
    int piece = thread % PIECES, first_row = thread / PIECES;
    long long apart = gate ? outputs : head_dim / 2;
    long long offsets[TILE / COPIED];
#pragma unroll
    for (int c = 0; c < TILE / COPIED; ++c) {
      int r = first_row + c * COPIED;
      offsets[c] = inner * (is_paired() ? r % (TILE / 2) + r / (TILE / 2) * apart : r);
    }
    int next = team * gridDim.x + blockIdx.x, next_step = 0;
    auto ask_weights = [&](int place) {
      int from = (next_step * W + share) * WIDE + 8 * piece, first = first_of(next);
      const E* at = w + static_cast<long long>(first) * inner + from;
      E* to = ring + place * PLACE;
#pragma unroll
      for (int c = 0; c < TILE / COPIED; ++c) {
        int r = first_row + c * COPIED;
        int output = first + (is_paired() ? r % (TILE / 2) : r);
        bool exists = next < tiles && from < inner && output < outputs;
        copy_later(to + at_piece(r, piece), exists ? at + offsets[c] : w, exists);
      }
    };
    // In a slot, the rows of `x` follow those of the weight.
    auto ask_rows = [&](int place, int step) {
      int from = (step * W + share) * WIDE + 8 * piece;
      E* to = ring + place * PLACE + TILE * WIDE;
#pragma unroll
      for (int c = 0; c < 8 * HALVES / COPIED; ++c) {
        int r = first_row + c * COPIED;
        bool exists = from < inner && r < rows;
        copy_later(to + at_piece(r, piece), exists ? x + static_cast<long long>(r) * inner + from : x, exists);
      }
    };
    auto advance = [&]() {
      if (++next_step == steps) {
        next_step = 0;
        next += stride;
      }
    };
#pragma unroll
    for (int place = 0; place < DEPTH; ++place) {
      ask_weights(place);
      end_of_copies();
      advance();
    }

    uint4 held[HELD ? WIDE / 32 : 1][HALVES];
    wait_for_previous();
    if constexpr (HELD) {
      hold(held, squares + team * shares * 8 * HALVES, team, shares, share);
    } else {
#pragma unroll
      for (int place = 0; place < DEPTH; ++place) {
        ask_rows(place, place % steps);
        end_of_copies();
      }
    }

    float acc[GROUPS][4] = {};
    int tile = team * gridDim.x + blockIdx.x, step = 0, parity = 0, place = 0;
    while (tile < tiles) {
      wait_for_copies<DEPTH - 1>();
      __syncwarp();
      const E* at = ring + place * PLACE;
#pragma unroll
      for (int j = 0; j < WIDE / 32; ++j) {
        uint4 a[HALVES];
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
          if constexpr (HELD) {
            a[i] = held[j][i];
          } else {
            a[i] = *reinterpret_cast<const uint4*>(at + TILE * WIDE + at_piece(group + 8 * i, 4 * j + member));
          }
        }
        // Both operands have the elements in the order of memory, so the sum is right.
        unsigned head[4] = {a[0].x, 0, a[0].y, 0}, tail[4] = {a[0].z, 0, a[0].w, 0};
        if constexpr (HALVES == 2) {
          head[1] = a[1].x, head[3] = a[1].y;
          tail[1] = a[1].z, tail[3] = a[1].w;
        }
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
          uint4 b = *reinterpret_cast<const uint4*>(at + at_piece(group + 8 * n, 4 * j + member));
          multiply<E>(acc[n], head, b.x, b.y);
          multiply<E>(acc[n], tail, b.z, b.w);
        }
      }
      __syncwarp();
      ask_weights(place);
      if constexpr (!HELD) ask_rows(place, next_step);
      end_of_copies();
      advance();
      place = place + 1 == DEPTH ? 0 : place + 1;
      if (++step < steps) continue;
      // Slower warps may still read the other half of the sums.
      end_tile(out, sums + parity * W * SUMS_OF_WARP, tile, acc, team, shares);
      step = 0;
      parity = 1 - parity;
      tile += stride;
    }
  }

  // Reads this thread's pieces of the rows, and normalizes them if `normalizes` is set. `squares` has a float
  // for each row and warp of the team.
  __device__ void hold(uint4 (&held)[HELD ? WIDE / 32 : 1][HALVES], float* squares, int team, int shares,
                       int share) const {
    int thread = threadIdx.x % 32, group = thread / 4, member = thread % 4;
    float sum[HALVES] = {};
#pragma unroll
    for (int j = 0; j < WIDE / 32; ++j) {
#pragma unroll
      for (int i = 0; i < HALVES; ++i) {
        int r = group + 8 * i, at = share * WIDE + 32 * j + 8 * member;
        held[j][i] = make_uint4(0, 0, 0, 0);
        if (r < rows && at < inner) held[j][i] = read_rows(x + static_cast<long long>(r) * inner + at);
      }
    }
    if (!normalizes) return;
#pragma unroll
    for (int i = 0; i < HALVES; ++i) {
#pragma unroll
      for (int j = 0; j < WIDE / 32; ++j) sum[i] += sum_of_squares(held[j][i]);
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
      if (member == 0) squares[(8 * i + group) * shares + share] = sum[i];
    }
    wait_for_team(team, 32 * shares);
#pragma unroll
    for (int i = 0; i < HALVES; ++i) {
      float whole = 0;
      for (int s = 0; s < shares; ++s) whole += squares[(8 * i + group) * shares + s];
      sum[i] = rsqrtf(whole / inner + this->eps);
    }
#pragma unroll
    for (int j = 0; j < WIDE / 32; ++j) {
      int at = share * WIDE + 32 * j + 8 * member;
      uint4 weights = make_uint4(0, 0, 0, 0);
      if (norm && at < inner) weights = __ldg(reinterpret_cast<const uint4*>(norm + at));
#pragma unroll
      for (int i = 0; i < HALVES; ++i) held[j][i] = normalized(held[j][i], weights, sum[i]);
    }
  }

  // Adds the partial sums of a team's warps, and writes the outputs of the tile.
  __device__ void end_tile(E* out, float* sums, int tile, float (&acc)[GROUPS][4], int team, int shares) const {
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int group = thread / 4, member = thread % 4;
    float* own = sums + warp * SUMS_OF_WARP;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int r = group + 8 * (e / 2);
        if (r < 8 * HALVES) own[r * TILE + 8 * n + 2 * member + e % 2] = acc[n][e];
        acc[n][e] = 0;
      }
    }
    wait_for_team(team, 32 * shares);
    for (int i = threadIdx.x - 32 * team * shares; i < rows * columns(); i += 32 * shares) {
      int r = i / columns(), column = i % columns();
      const float* from = sums + team * shares * SUMS_OF_WARP + r * TILE + column;
      float sum = 0, other = 0;
#pragma unroll 4
      for (int s = 0; s < shares; ++s) {
        sum += from[s * SUMS_OF_WARP];
        if (is_paired()) other += from[s * SUMS_OF_WARP + TILE / 2];
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
};

}  // namespace etkv
