// Attention of several queries over a slice of many keys: the work of a block.
//
// A block reads the keys of one KV head once, for up to 64 rows. There is a row for each query and each query
// head of that KV head: row `r` is query `r / group` of query head `r % group`. Rows of one query, which see
// the same keys, are therefore adjacent. A warp computes 16 rows over a share of each tile of keys, and keeps
// the running softmax in registers.
//
// Lengths and strides are arguments. Only dtypes, head dims and the kind of mask are compiled in.

namespace etkv {

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
// The keys that a block reads at a time, and those that a warp multiplies at a time.
constexpr int TILE = 64;
constexpr int STEP = 16;
constexpr int ROWS = 16;

// The rows of a block are divided among `MAX_ROW_WARPS` warps if `IS_FIXED`, or else among at most
// that many. The other warps of the block have the same rows and other keys. A thread block
// computes `PARTS` consecutive blocks of rows, with one of these objects for each. `AT_ONCE` is the
// maximum number of steps of keys that a warp computes at a time. The number of registers limits
// it.
template <typename E, int DK, int DV, int MASK, int STAGES, int MAX_ROW_WARPS, bool IS_FIXED = false, int PARTS = 1,
          int AT_ONCE = 2>
struct Slice {
  static constexpr int PIECE = 16 / sizeof(E);
  // The pitch of rows in shared memory is an odd multiple of 16 bytes, so that eight rows are in different
  // banks.
  static constexpr int K_PITCH = DK + PIECE;
  static constexpr int V_PITCH = DV + PIECE;
  static constexpr int STAGE = TILE * (K_PITCH + V_PITCH);
  static constexpr int SUM_PITCH = DV + 8;
  static constexpr int BLOCKS = PARTS;

  View<E> q, k, v;
  Marks marks;
  TileList listed;
  Sizes sizes;
  float scale;
  char* shared;

  // The queries: operands of products in half precision, or rows in shared memory in float32.
  unsigned q_parts[is_half<E> ? DK / 16 : 1][4];
  E* q_rows;
  // The running softmax of the rows `thread / 4` and `thread / 4 + 8`.
  float most[2];
  float total[2];
  float sums[DV / 8][4];

  // The number of slices that have keys. It is the width of the grid, or smaller if there are fewer tiles.
  int slices;
  int block;
  // For this thread's two rows: the query, and the end (exclusive) of the keys that it may see.
  int query_of[2], ends_at[2];
  // The number of this thread in its warp, and the warp's first row and first key in the block.
  int thread, warp, row_warps, row_of_warp, key_of_warp, head;

  __device__ int rows_of_block() const { return ROWS * row_warps; }
  __device__ int first_row() const { return block * rows_of_block(); }
  // Returns this thread's first row (`lower` is 0) or second row (1) in the KV head.
  __device__ int row(int lower) const { return first_row() + row_of_warp + thread / 4 + 8 * lower; }

  __device__ const E* query(int r) const {
    return q.at(head * sizes.group + r % sizes.group, r / sizes.group);
  }

  // The number of a warp's steps in a tile.
  __device__ int steps() const { return TILE / STEP * row_warps / WARPS; }

  // Divides the warps between rows and keys.
  __device__ void divide_rows() {
    row_warps = MAX_ROW_WARPS;
    if (IS_FIXED) return;
    row_warps = 1;
    while (row_warps < MAX_ROW_WARPS && row_warps * ROWS * PARTS < sizes.rows()) row_warps *= 2;
  }

  __device__ void start(int part = 0) {
    block = blockIdx.z * PARTS + part;
    thread = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    divide_rows();
    row_of_warp = ROWS * (warp % row_warps);
    key_of_warp = STEP * steps() * (warp / row_warps);
    head = blockIdx.y;
    slices = slices_of(block, gridDim.x);
    for (int i = 0; i < 2; ++i) {
      query_of[i] = row(i) / sizes.group;
      ends_at[i] = sizes.keys;
      if (MASK == SEES_UP_TO_ITSELF) ends_at[i] += query_of[i] + 1 - sizes.queries;
      if (row(i) >= sizes.rows()) ends_at[i] = 0;
      most[i] = -INFINITY;
      total[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) sums[i / 4][i % 4] = 0;
  }

  // Reads the queries of this thread to registers, or in float32 those of the block to shared memory.
  __device__ void read_queries() {
    if constexpr (is_half<E>) {
      if (q.is_aligned()) return read_whole_queries();
      for (int i = 0; i < 2; ++i) {
        const E* from = row(i) < sizes.rows() ? query(row(i)) : nullptr;
#pragma unroll
        for (int part = 0; part < DK / 16; ++part) {
          for (int j = 0; j < 2; ++j) {
            const E* pair = from + (part * 16 + 2 * (thread % 4) + 8 * j) * q.column;
            q_parts[part][i + 2 * j] = from ? pair_of(pair[0], pair[q.column]) : 0;
          }
        }
      }
    } else {
      q_rows = reinterpret_cast<E*>(shared) + STAGES * STAGE;
      for (int i = threadIdx.x; i < rows_of_block() * DK; i += THREADS) {
        int r = first_row() + i / DK;
        q_rows[i / DK * K_PITCH + i % DK] = r < sizes.rows() ? query(r)[i % DK * q.column] : E(0);
      }
    }
  }

  // Reads aligned queries through the memory of the last stage, to which no tile is copied yet. In this way
  // threads read 16 bytes at a time, and each query is read once.
  __device__ void read_whole_queries() {
    constexpr int PIECES = DK / PIECE, EACH = (MAX_ROW_WARPS * ROWS * PIECES + THREADS - 1) / THREADS;
    E* place = reinterpret_cast<E*>(shared) + (STAGES - 1) * STAGE;
    // All loads are issued before the first result is used.
    uint4 x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int at = threadIdx.x + THREADS * i, r = at / PIECES;
      // For a row that does not exist, the last row is read. Such a row sees no key.
      x[i] = read_rows(query(min(first_row() + r, sizes.rows() - 1)) + at % PIECES * PIECE);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int at = threadIdx.x + THREADS * i, r = at / PIECES;
      if (r >= rows_of_block()) continue;
      *reinterpret_cast<uint4*>(place + r * K_PITCH + at % PIECES * PIECE) = x[i];
    }
    __syncthreads();
    const E* own = place + (row_of_warp + thread % 16) * K_PITCH + thread / 16 * 8;
#pragma unroll
    for (int part = 0; part < DK / 16; ++part) read_matrices(q_parts[part], own + 16 * part);
    __syncthreads();
  }

  template <int D>
  __device__ void load(E* to, const View<E>& rows, int first, bool aligned) {
    constexpr int PIECES = D / PIECE;
    if constexpr (THREADS % PIECES == 0) {
      if (aligned && first + TILE <= sizes.keys) return load_whole<D>(to, rows, first);
    }
    for (int i = threadIdx.x; i < TILE * PIECES; i += THREADS) {
      int r = i / PIECES, column = i % PIECES * PIECE;
      bool exists = first + r < sizes.keys;
      const E* from = exists ? rows.at(head, first + r) : rows.data;
      E* piece = to + r * (D + PIECE) + column;
      if (aligned) {
        copy_later(piece, exists ? from + column : from, exists);
      } else {
        for (int j = 0; j < PIECE; ++j) piece[j] = exists ? from[(column + j) * rows.column] : E(0);
      }
    }
  }

  // The same as `load`, with fewer instructions, for a tile of which all rows exist.
  template <int D>
  __device__ void load_whole(E* to, const View<E>& rows, int first) {
    constexpr int PIECES = D / PIECE, APART = THREADS / PIECES;
    int r = threadIdx.x / PIECES, column = threadIdx.x % PIECES * PIECE;
    const E* from = rows.at(head, first + r) + column;
    to += r * (D + PIECE) + column;
    long long step = APART * rows.row;
#pragma unroll
    for (int i = 0; i < TILE / APART; ++i, from += step) copy_later(to + i * APART * (D + PIECE), from, true);
  }

  // Multiplies this warp's rows by the keys of `N` steps, which begin at `keys`. Of each step, a thread gets
  // the scores of its two rows with four keys: `k`, `k + 1`, `k + 8` and `k + 9`, where `k` is 2 * (thread %
  // 4). The products of different steps do not depend on each other, which hides their latency.
  template <int N>
  __device__ void multiply_keys(float (&scores)[N][2][4], const E* keys) {
    if constexpr (is_half<E>) {
      keys += (thread / 16 * 8 + thread % 8) * K_PITCH + thread / 8 % 2 * 8;
#pragma unroll
      for (int part = 0; part < DK / 16; ++part) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          unsigned b[4];
          read_matrices(b, keys + n * STEP * K_PITCH + 16 * part);
          multiply<E>(scores[n][0], q_parts[part], b[0], b[1]);
          multiply<E>(scores[n][1], q_parts[part], b[2], b[3]);
        }
      }
    } else {
      const E* rows = q_rows + (row_of_warp + thread / 4) * K_PITCH;
      for (int d = 0; d < DK; ++d) {
        for (int i = 0; i < 8 * N; ++i) {
          int key = i / 4 * 8 + thread % 4 * 2 + i % 2;
          scores[i / 8][i / 4 % 2][i % 4] += rows[i / 2 % 2 * 8 * K_PITCH + d] * keys[key * K_PITCH + d];
        }
      }
    }
  }

  template <int N>
  __device__ void add_values(const float (&p)[N][2][4], const E* values) {
    if constexpr (is_half<E>) {
      unsigned a[N][4];
#pragma unroll
      for (int i = 0; i < 4 * N; ++i) {
        const float* pair = &p[i / 4][i % 4 / 2][i % 2 * 2];
        a[i / 4][i % 4] = pair_of(E(pair[0]), E(pair[1]));
      }
      values += thread % 16 * V_PITCH + thread / 16 * 8;
#pragma unroll
      for (int part = 0; part < DV / 16; ++part) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          unsigned b[4];
          read_transposed(b, values + n * STEP * V_PITCH + 16 * part);
          multiply<E>(sums[2 * part], a[n], b[0], b[1]);
          multiply<E>(sums[2 * part + 1], a[n], b[2], b[3]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < N * STEP; ++i) {
        int owner = thread / 4 * 4 + i % 8 / 2;
        float upper = __shfl_sync(ALL, p[i / STEP][i / 8 % 2][i % 2], owner);
        float lower = __shfl_sync(ALL, p[i / STEP][i / 8 % 2][i % 2 + 2], owner);
        const E* value = values + i * V_PITCH + thread % 4 * 2;
#pragma unroll
        for (int part = 0; part < DV / 8; ++part) {
          for (int j = 0; j < 2; ++j) {
            sums[part][j] += upper * value[8 * part + j];
            sums[part][j + 2] += lower * value[8 * part + j];
          }
        }
      }
    }
  }

  // Returns a bit for each of this thread's scores of a step, which is 1 if the row sees the key.
  __device__ unsigned seen_of(int first) const {
    // In most steps, all rows see all keys.
    if (MASK != SEES_MARKED && first + STEP <= min(ends_at[0], ends_at[1])) return 0xff;
    unsigned seen = 0;
    for (int i = 0; i < 8; ++i) {
      int key = first + i / 4 * 8 + thread % 4 * 2 + i % 2;
      bool sees = key < ends_at[i / 2 % 2];
      if (MASK == SEES_MARKED) sees = sees && marks.data[query_of[i / 2 % 2] * marks.query + key * marks.key];
      seen |= static_cast<unsigned>(sees) << i;
    }
    return seen;
  }

  // The same with the mask bits of a tile for the queries of this thread's rows.
  __device__ unsigned seen_of(const unsigned long long (&bits)[2], int first) const {
    unsigned seen = 0;
    for (int i = 0; i < 2; ++i) {
      // Of the keys from here on, this thread has keys 0, 1, 8 and 9.
      unsigned from = static_cast<unsigned>(bits[i] >> (first + thread % 4 * 2));
      seen |= ((from & 3) | (from >> 4 & 0x30)) << 2 * i;
    }
    return seen;
  }

  // Reads the mask bits of a tile for the queries of this thread's rows.
  __device__ void read_bits(unsigned long long (&bits)[2], int tile) const {
    static_assert(TILE == 8 * sizeof(bits[0]), "a bit for each key");
    for (int i = 0; i < 2; ++i) {
      bits[i] = row(i) < sizes.rows() ? listed.bits(tile, query_of[i]) : 0;
    }
  }

  // Computes attention over `N` steps of keys. `seen` has the bits of `seen_of` for each step.
  template <int N>
  __device__ void attend_to(const E* keys, const E* values, const unsigned* seen) {
    unsigned all = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) all |= seen[n];
    // Skips steps of which no row of the warp sees a key, such as those of other sequences.
    if (!__any_sync(ALL, all != 0)) return;
    float scores[N][2][4] = {};
    multiply_keys(scores, keys);
    weigh(scores, seen);
    add_values(scores, values);
  }

  __device__ float scaled(float score) const {
    score *= scale;
    // The score is -infinity only if a key or query is not finite. With a list, sequences share the pools and
    // the host must detect this. Without the NaN, the key would only get a weight of 0.
    return MASK == SEES_LISTED && score == -INFINITY ? INFINITY - INFINITY : score;
  }

  // Replaces the scores of `N` steps by weights, and rescales the sums if the maximum score grows.
  template <int N>
  __device__ void weigh(float (&scores)[N][2][4], const unsigned* seen) {
    unsigned all = 0xff;
#pragma unroll
    for (int i = 0; i < 8 * N; ++i) {
      float& score = scores[i / 8][i / 4 % 2][i % 4];
      score = scaled(score);
      all &= seen[i / 8];
    }
    // In most steps, all rows see all keys.
    if (!__all_sync(ALL, all == 0xff)) {
#pragma unroll
      for (int i = 0; i < 8 * N; ++i) {
        if (!(seen[i / 8] >> i % 8 & 1)) scores[i / 8][i / 4 % 2][i % 4] = -INFINITY;
      }
    }
    // Few steps have a larger score than all earlier ones.
    bool grows = false;
#pragma unroll
    for (int i = 0; i < 8 * N; ++i) grows = grows || scores[i / 8][i / 4 % 2][i % 4] > most[i / 2 % 2];
    if (__any_sync(ALL, grows)) {
      float highest[2] = {most[0], most[1]};
#pragma unroll
      for (int i = 0; i < 8 * N; ++i) {
        highest[i / 2 % 2] = fmaxf(highest[i / 2 % 2], scores[i / 8][i / 4 % 2][i % 4]);
      }
      float weight[2];
      for (int i = 0; i < 2; ++i) {
        highest[i] = over_row(highest[i], false);
        weight[i] = weight_of(most[i], highest[i]);
        total[i] *= weight[i];
        most[i] = highest[i];
      }
#pragma unroll
      for (int i = 0; i < DV / 2; ++i) sums[i / 4][i % 4] *= weight[i / 2 % 2];
    }
    // If no key is seen, the maximum is -infinity. Subtracting 0 gives weights of 0.
    float from[2];
    for (int i = 0; i < 2; ++i) from[i] = most[i] == -INFINITY ? 0.0f : most[i];
#pragma unroll
    for (int i = 0; i < 8 * N; ++i) {
      float& score = scores[i / 8][i / 4 % 2][i % 4];
      score = power_of_two(score - from[i / 2 % 2]);
      total[i / 2 % 2] += score;
    }
  }

  // Returns the number of tiles with a key that a row of the block may see.
  __device__ int tiles_of(int block) const {
    if (MASK == SEES_LISTED) return listed.count;
    int keys = sizes.keys;
    if (MASK == SEES_UP_TO_ITSELF) {
      int last = min((block + 1) * rows_of_block(), sizes.rows()) - 1;
      keys += last / sizes.group + 1 - sizes.queries;
    }
    return (keys + TILE - 1) / TILE;
  }

  // Returns the first key of tile number `tile` of this block.
  __device__ int first_key(int tile) const { return TILE * (MASK == SEES_LISTED ? listed.number(tile) : tile); }

  // Returns the number of slices of a block of rows, at most `most`. With many rows, a slice has a
  // large partial result to merge. The number is then as small as possible without making the
  // largest slice larger.
  __device__ int slices_of(int block, int most) const {
    int tiles = max(tiles_of_all(block), 1);
    if (MAX_ROW_WARPS * PARTS == 1) return min(tiles, most);
    int each = (tiles + most - 1) / most;
    return (tiles + each - 1) / each;
  }

  // Returns the number of tiles for all blocks of rows of the thread block that includes `block`.
  __device__ int tiles_of_all(int block) const { return tiles_of(block / PARTS * PARTS + PARTS - 1); }

  __device__ void attend_to_slice() {
    attend_to_slice(0, [] {});
  }

  template <typename Wait>
  __device__ void attend_to_slice(int known, const Wait& wait) {
    bool k_aligned = k.is_aligned(), v_aligned = v.is_aligned();
    E* stages = reinterpret_cast<E*>(shared);
    auto load_tile = [&](int first, int place) {
      E* to = stages + place * STAGE;
      load<DK>(to, k, first, k_aligned);
      load<DV>(to + TILE * K_PITCH, v, first, v_aligned);
    };
    // The mask is in global memory. It is loaded for all steps at once.
    unsigned seen[4];
    auto look = [&](int tile) { see(seen, tile); };
    auto attend = [&](int place) {
      const E* keys = stages + place * STAGE;
      const E* values = keys + TILE * K_PITCH;
      keys += key_of_warp * K_PITCH;
      values += key_of_warp * V_PITCH;
      if (steps() == 1) return attend_to<1>(keys, values, seen);
      if (AT_ONCE == 4 && steps() == 4) return attend_to<AT_ONCE>(keys, values, seen);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        if (i < steps()) attend_to<2>(keys + STEP * i * K_PITCH, values + STEP * i * V_PITCH, seen + i);
      }
    };
    auto start = [&](bool) { read_queries(); };
    for_tiles<false>(known, wait, load_tile, [](int) {}, start, [](int, int, bool) {}, look, attend);
  }

  // Sets the bits of `seen_of` for each step of the warp in a tile.
  __device__ void see(unsigned (&seen)[4], int tile) const {
    unsigned long long bits[2];
    if constexpr (MASK == SEES_LISTED) read_bits(bits, tile);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int first = key_of_warp + STEP * i;
      seen[i] = 0;
      if (i >= steps()) continue;
      if constexpr (MASK == SEES_LISTED) {
        seen[i] = seen_of(bits, first);
      } else {
        seen[i] = seen_of(tile * TILE + first);
      }
    }
  }

  // Runs the tiles of the slice. Calls `load` for each tile with its first key and a stage of shared memory,
  // and `start` when the first tiles are loading. Then calls `look` for each tile, and `attend` with its
  // stage when it is loaded. The previous kernel, for which `wait` waits, writes only keys and values from
  // `known` on. With `PREPARES`, the first tile is special: `prepare` is called with its stage, before `wait`
  // if the previous kernel does not write the first tiles. `begin` is then called instead of `attend`; its
  // last argument is whether more tiles follow. The argument of `start` is whether `prepare` is called.
  template <bool PREPARES, typename Wait, typename Load, typename Prepare, typename Start, typename Begin, typename Look,
            typename Attend>
  __device__ void for_tiles(int known, const Wait& wait, const Load& load, const Prepare& prepare, const Start& start,
                            const Begin& begin, const Look& look, const Attend& attend) {
    // With three stages or more, the copy of a tile can begin when all warps have reached the
    // current tile, since no warp reads the stage of the previous tile any more. Warps then wait
    // for each other once for each tile instead of twice. If no warps share rows, this is not done:
    // a warp takes so long for a tile that the copies would begin too late.
    constexpr bool LOADS_LATE = STAGES > 2 && MAX_ROW_WARPS < WARPS;
    int tiles = tiles_of_all(block);
    int first = static_cast<int>(static_cast<long long>(tiles) * blockIdx.x / slices);
    int end = static_cast<int>(static_cast<long long>(tiles) * (blockIdx.x + 1) / slices);
    auto load_tile = [&](int tile) {
      if (tile < end) load(first_key(tile), (tile - first) % STAGES);
      end_of_copies();
    };
    int early = min(first + STAGES - 1, end) - 1;
    bool is_known = early < first || first_key(early) + TILE <= known;
    bool is_prepared = PREPARES && early >= first;
    if (!is_known) wait();
    for (int i = 0; i < STAGES - 1; ++i) load_tile(first + i);
    if (is_prepared && is_known) prepare(0);
    if (is_known) wait();
    start(is_prepared);
    int tile = first;
    if (is_prepared) {
      if (!is_known) prepare(0);
      load_tile(tile + STAGES - 1);
      begin(tile, 0, tile + 1 < end);
      if (!LOADS_LATE) __syncthreads();
      ++tile;
    }
    for (; tile < end; ++tile) {
      if (!LOADS_LATE) load_tile(tile + STAGES - 1);
      look(tile);
      wait_for_copies<(LOADS_LATE ? STAGES - 2 : STAGES - 1)>();
      __syncthreads();
      if (LOADS_LATE) load_tile(tile + STAGES - 1);
      attend((tile - first) % STAGES);
      if (!LOADS_LATE) __syncthreads();
    }
    // The end of the slice uses the memory of the stages.
    if (LOADS_LATE) __syncthreads();
  }

  // Writes four elements of a row, divided by `whole`.
  __device__ void write(E* out, int r, int column, const float (&x)[4], float whole) {
    long long query_head = head * sizes.group + r % sizes.group;
    // The result is `[tokens, heads, DV]`, as the next product reads it.
    long long heads = static_cast<long long>(gridDim.y) * sizes.group;
    E* to = out + (r / sizes.group * heads + query_head) * DV + column;
    for (int i = 0; i < 4; ++i) {
      float value = x[i] / whole;
      if (whole == 0) {
        // The row sees no key. MLX then gives all keys the same weight. With a list or with packed
        // values, only padding queries see no key. With packed values, `v.data` is null.
        value = 0;
        for (int key = 0; MASK != SEES_LISTED && v.data && key < sizes.keys; ++key) {
          value += static_cast<float>(v.at(head, key)[(column + i) * v.column]);
        }
        value /= static_cast<float>(sizes.keys);
      }
      to[i] = E(value);
    }
  }

  // Writes four elements of a row's partial result. `r` is counted from row 0 of the first slice. If the row
  // sees no key, the elements are not written, and the merge does not read them.
  __device__ void leave(
      float* parts, float* stats, int r, int column, const float (&x)[4], float highest, float whole) {
    float* to = parts + static_cast<long long>(r) * DV + column;
    if (whole != 0) *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    if (column == 0) leave_ends(stats, r, highest, whole);
  }

  __device__ static void leave_ends(float* stats, int r, float highest, float whole) {
    *reinterpret_cast<float2*>(stats + 2 * r) = make_float2(highest, whole);
  }

  // Writes four elements of a row of this warp to shared memory, for `add_warps`.
  __device__ void keep(int of_warp, int column, const float (&x)[4]) {
    float* to = reinterpret_cast<float*>(shared) + (warp * ROWS + of_warp) * SUM_PITCH + column;
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  }

  __device__ float* ends() const { return reinterpret_cast<float*>(shared) + WARPS * ROWS * SUM_PITCH; }

  // Writes the maximum score of a row of this warp and the sum of its weights to shared memory.
  __device__ void keep_ends(int of_warp, float highest, float whole) {
    *reinterpret_cast<float2*>(ends() + 2 * (warp * ROWS + of_warp)) = make_float2(highest, whole);
  }

  // Adds the sums of the warps that share rows. Writes the result if there is only one slice, or else the
  // partial result.
  __device__ void end_slice(E* out, float* parts, float* stats) {
    bool is_direct = MAX_ROW_WARPS == WARPS && row_warps == WARPS && slices > 1;
    for (int i = 0; i < 2; ++i) {
      int of_warp = thread / 4 + 8 * i, r = static_cast<int>(blockIdx.x) * rows_of_block() + row_of_warp + of_warp;
      float whole = over_row(total[i], true);
      float* kept = reinterpret_cast<float*>(shared) + (warp * ROWS + of_warp) * SUM_PITCH;
      float* to = (is_direct ? parts + static_cast<long long>(r) * DV : kept) + 2 * (thread % 4);
      if (is_direct && row(i) >= sizes.rows()) continue;
#pragma unroll
      for (int part = 0; part < DV / 8; ++part) {
        *reinterpret_cast<float2*>(to + 8 * part) = make_float2(sums[part][2 * i], sums[part][2 * i + 1]);
      }
      if (thread % 4 != 0) continue;
      if (is_direct) {
        leave_ends(stats, r, most[i], whole);
      } else {
        keep_ends(of_warp, most[i], whole);
      }
    }
    // If no warps share rows, there is nothing to add.
    if (is_direct) return;
    __syncthreads();
    add_warps(out, parts, stats);
  }

  // Adds the sums that all warps have written with `keep` and `keep_ends`.
  __device__ void add_warps(E* out, float* parts, float* stats) {
    if (MAX_ROW_WARPS == WARPS && row_warps == WARPS) return add_shared<1>(out, parts, stats);
    if (MAX_ROW_WARPS > 1 && row_warps == 2) return add_shared<WARPS / 2>(out, parts, stats);
    add_shared<WARPS>(out, parts, stats);
  }

  // The same if `SHARING` warps share each row.
  template <int SHARING>
  __device__ void add_shared(E* out, float* parts, float* stats) {
    constexpr int OF_BLOCK = WARPS * ROWS / SHARING, PIECES = DV / 4;
    const float* all = reinterpret_cast<const float*>(shared);
    const float2* its = reinterpret_cast<const float2*>(ends());
    int rows = min(OF_BLOCK, sizes.rows() - first_row());
#pragma unroll SHARING < 4 ? 4 : 1
    for (int i = threadIdx.x; i < rows * PIECES; i += THREADS) {
      int r = i / PIECES, first = i % PIECES * 4;
      float highest = -INFINITY, whole = 0, sum[4] = {};
#pragma unroll
      for (int n = 0; n < SHARING; ++n) highest = fmaxf(highest, its[r + n * OF_BLOCK].x);
#pragma unroll
      for (int n = 0; n < SHARING; ++n) {
        int at = r + n * OF_BLOCK;
        float weight = weight_of(its[at].x, highest);
        float4 x = *reinterpret_cast<const float4*>(all + at * SUM_PITCH + first);
        whole += weight * its[at].y;
        sum[0] += weight * x.x;
        sum[1] += weight * x.y;
        sum[2] += weight * x.z;
        sum[3] += weight * x.w;
      }
      if (slices == 1) {
        write(out, first_row() + r, first, sum, whole);
      } else {
        leave(parts, stats, static_cast<int>(blockIdx.x) * OF_BLOCK + r, first, sum, highest, whole);
      }
    }
  }
};

}  // namespace etkv
