// Attention over a slice of packed keys and values. Blocks, tiles and the merge are those of `Slice`. Keys
// and values are packed in shared memory, and are unpacked in registers.
//
// The 16 rows of a matrix product are keys, or elements of values, and its 8 columns are query rows. A token
// usually has 4 or 8 query rows for a KV head. If these were the 16 rows, at least half of each product would
// be padding, and sums and queries would need twice the registers. A part of a warp's rows has one or two
// tiles of 8 rows. In each tile, thread `m` of four has rows 2 * `m` and 2 * `m` + 1. In each step of keys,
// thread `g` of eight has keys `g` and `g` + 8.
//
// Both operands of a product have the elements of a head in the order of the codes in memory, so the sum over
// them is right. A row consists of eights, which have eight consecutive codes each. Of a key, thread `m`
// reads a quarter of the eights, and queries are read in the same order. Of each 64 elements of a value,
// thread `g` reads the eight with index `g`.
//
// If a warp has one part of rows, the offsets of affine codes are multiplied in separate products, which
// saves an instruction for each pair of elements. For keys, this adds to each score the offset of each group
// times the sum of the query over the group. That sum is a float16 number and the remainder of its rounding.
// For values, the weighted offsets of each group are added to the elements at the end. With two parts there
// are too few registers for this, and unpacking costs half as much for each product.

namespace etkv {

// `ROW_TILES` is the number of a warp's tiles of 8 rows, two of which are a part. `ROW_WARPS` is the number
// of warps among which the rows are divided.
template <typename E, typename K, typename V, int DIM, int MASK, int STAGES, int ROW_TILES, int ROW_WARPS>
struct PackedSlice {
  static constexpr int PARTS = (ROW_TILES + 1) / 2;
  using Rows = Slice<E, DIM, DIM, MASK, STAGES, ROW_WARPS, true, PARTS>;
  using Keys = PackedRows<K, DIM, true>;
  using Values = PackedRows<V, DIM, false>;
  static constexpr bool IS_APART = PARTS == 1;
  using KeyCodes = Decoder<K, E, IS_APART>;
  using ValueCodes = Decoder<V, E, IS_APART>;
  using KeyInner = typename KeyCodes::Inner;
  using ValueInner = typename ValueCodes::Inner;

  static constexpr int ROW_TILE = 8;
  // The row tiles of a part.
  static constexpr int EACH = ROW_TILES / PARTS;
  static_assert(EACH * PARTS == ROW_TILES && ROW_TILES * ROW_TILE <= 32, "a thread of a warp for each row");
  // The eights of a key that a thread has.
  static constexpr int EIGHTS = DIM / 32;
  // The eights of a value that a thread has, one for each 64 elements. If 32 elements remain, two threads
  // share each eight of them.
  static constexpr int ROUNDS = DIM / 64;
  static constexpr bool HAS_HALF = DIM % 64 != 0;
  // The elements of a row's sum that a thread has.
  static constexpr int ELEMENTS = DIM / 8;
  static constexpr int VALUES_AT = (Keys::BYTES + 15) / 16 * 16;
  static constexpr int STAGE = VALUES_AT + (Values::BYTES + 15) / 16 * 16;

  // The number of groups of a row whose offsets are multiplied separately.
  static constexpr int KEY_GROUPS = IS_APART ? Keys::offset_bytes() / 2 : 0;
  static constexpr int VALUE_GROUPS = IS_APART ? Values::offset_bytes() / 2 : 0;
  static_assert(KEY_GROUPS <= 8 && VALUE_GROUPS <= 8, "one product has all offsets of a row");

  // The parts of rows, which share unpacked keys. Only the blocks and slices of these objects are used, since
  // threads have rows in the order above.
  Rows part[PARTS];
  // The queries as operands of products, and their sums over groups.
  unsigned q_parts[ROW_TILES][DIM / 16][2];
  unsigned q_sums[ROW_TILES][2];
  // The running softmax of two rows of each tile. `sums[t][i]` has two elements of each of the two rows.
  float most[ROW_TILES][2];
  float total[ROW_TILES][2];
  float sums[ROW_TILES][ELEMENTS / 2][4];
  // The sums of weighted offsets of group `g` of packed values.
  float offsets[ROW_TILES][4];
  // For the masks, each thread represents one of the warp's rows: the end (exclusive) of the keys that the
  // row may see, or a negative number if the row does not exist, and the query of the row.
  int ends_at, query_of;
  Keys keys;
  Values values;

  __device__ void start(const Planes& k, const Planes& v) {
    for (int i = 0; i < PARTS; ++i) part[i].start(i);
    keys.open(k, part[0].head);
    values.open(v, part[0].head);
    const Sizes& sizes = part[0].sizes;
    int r = row(part[0].thread / ROW_TILE % ROW_TILES, part[0].thread % ROW_TILE);
    query_of = r / sizes.group;
    ends_at = sizes.keys;
    if (MASK == SEES_UP_TO_ITSELF) ends_at += query_of + 1 - sizes.queries;
    if (r >= sizes.rows() || part[0].thread >= ROW_TILES * ROW_TILE) ends_at = -1;
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
      for (int i = 0; i < 2; ++i) {
        most[t][i] = -INFINITY;
        total[t][i] = 0;
      }
#pragma unroll
      for (int i = 0; i < 2 * ELEMENTS; ++i) sums[t][i / 4][i % 4] = 0;
      for (int i = 0; i < 4; ++i) offsets[t][i] = 0;
    }
  }

  // Returns the row in the KV head of row `of_tile` of a tile of this warp.
  __device__ int row(int tile, int of_tile) const {
    // The parts of a block are consecutive.
    int first = part[0].first_row() + tile / EACH * part[0].rows_of_block();
    return first + part[0].row_of_warp + tile % EACH * ROW_TILE + of_tile;
  }

  // Reads the queries of this thread in the order of the keys in `multiply_keys`.
  __device__ void read_queries() {
    int g = part[0].thread / 4, m = part[0].thread % 4;
    // For a row that does not exist, the last row is read. Such a row sees no key.
    uint4 all[ROW_TILES][EIGHTS];
#pragma unroll
    for (int i = 0; i < ROW_TILES * EIGHTS; ++i) {
      int r = min(row(i / EIGHTS, g), part[0].sizes.rows() - 1);
      all[i / EIGHTS][i % EIGHTS] = read_rows(part[0].query(r) + 8 * (m * EIGHTS + i % EIGHTS));
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES * EIGHTS; ++i) {
      int t = i / EIGHTS, j = i % EIGHTS;
      uint4 x = converted(all[t][j]);
      q_parts[t][2 * j][0] = __byte_perm(x.x, x.z, 0x5410);
      q_parts[t][2 * j][1] = __byte_perm(x.x, x.z, 0x7632);
      q_parts[t][2 * j + 1][0] = __byte_perm(x.y, x.w, 0x5410);
      q_parts[t][2 * j + 1][1] = __byte_perm(x.y, x.w, 0x7632);
    }
  }

  // Sums the queries of all tiles over groups. Prepared keys include their offsets and do not need these
  // sums.
  __device__ void sum_all_queries() {
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
      if constexpr (KEY_GROUPS > 0) sum_queries(t);
    }
  }

  // Sums the queries of a tile over groups, as a product with a matrix that is 1 where an element is in a
  // group. Element `i` of a row's sums is the rounded sum of group `i`. Element `i + KEY_GROUPS` is the
  // remainder of the rounding.
  __device__ void sum_queries(int t) {
    constexpr bool IS_LONG = 2 * KEY_GROUPS > 8;
    int g = part[0].thread / 4, m = part[0].thread % 4;
    // Two sums alternate, because consecutive products of one sum depend on each other.
    float c[4] = {}, d[4] = {};
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) {
      int group = Keys::group(m * EIGHTS + j);
      auto ones = [&](int i) { return i < 2 * KEY_GROUPS && i % max(KEY_GROUPS, 1) == group ? 0x3c003c00u : 0; };
      unsigned first = ones(g), second = IS_LONG ? ones(g + 8) : 0, a[4] = {first, second, first, second};
      multiply<KeyInner>(c, a, q_parts[t][2 * j][0], q_parts[t][2 * j][1]);
      multiply<KeyInner>(d, a, q_parts[t][2 * j + 1][0], q_parts[t][2 * j + 1][1]);
    }
    for (int i = 0; i < 4; ++i) {
      c[i] += d[i];
      if (g + i / 2 * 8 >= KEY_GROUPS) c[i] -= float(KeyInner(c[i]));
    }
    q_sums[t][0] = transposed(rounded_pair<KeyInner>(c[0], c[1]));
    q_sums[t][1] = IS_LONG ? transposed(rounded_pair<KeyInner>(c[2], c[3])) : 0;
  }

  // Returns the offsets of a key for elements 2 * `m` and 2 * `m` + 1 of the queries' sums, plus 8 *
  // `eights`.
  __device__ static unsigned key_offsets(const char* tile, int key, int m, int eights) {
    int first = 2 * m + 8 * eights;
    bool exists = first < 2 * KEY_GROUPS;
    auto group = [](int element) { return element % KEY_GROUPS; };
    unsigned offsets;
    if constexpr (KEY_GROUPS % 2 == 0) {
      const char* at = tile + Keys::OFFSETS_AT + 2 * (key * KEY_GROUPS + group(first));
      offsets = *reinterpret_cast<const unsigned*>(at);
    } else {
      offsets = Keys::offset(tile, key, group(first)) | Keys::offset(tile, key, group(first + 1)) << 16;
    }
    return exists ? offsets : 0;
  }

  // Converts elements to the type of the products with keys. The range of float16 includes all bfloat16
  // numbers that matter for a score.
  __device__ static uint4 converted(uint4 x) {
    if constexpr (cuda::std::is_same_v<E, KeyInner>) return x;
    unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = limited_pair(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  __device__ void load(char* to, int first) const {
    int count = part[0].sizes.keys - first;
    keys.load(to, first, count);
    values.load(to + VALUES_AT, first, count);
  }

  // Unpacks this thread's eights of keys `g` and `g` + 8, counted from key `at`. `Codes` determines whether
  // elements include offsets.
  template <typename Codes>
  struct KeysOf {
    typename Codes::Eight eights[2][EIGHTS];
    Scales scales[2];
    const char* tile;
    int first, m;

    __device__ KeysOf(const char* its, int at, int thread) : tile(its), first(at + thread / 4), m(thread % 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) read_eights<Codes>(eights[half], tile + (first + 8 * half) * Keys::PITCH, m);
    }

    __device__ void unpack(unsigned (&pairs)[2][4], int j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int key = first + 8 * half;
        if (j % same_scale() == 0) {
          scales[half] = scales_of<Codes, Keys>(tile, key, key, Keys::group(m * EIGHTS + j));
        }
        Codes::unpack(pairs[half], Codes::of_one(eights[half][j]), scales[half]);
      }
    }
  };

  // Multiplies the pairs of this thread's eight with index `j` by the rows.
  __device__ void multiply_pairs(float (&scores)[ROW_TILES][4], const unsigned (&pairs)[2][4], int j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned a[4] = {pairs[0][2 * i], pairs[1][2 * i], pairs[0][2 * i + 1], pairs[1][2 * i + 1]};
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) {
        multiply<KeyInner>(scores[t], a, q_parts[t][2 * j + i][0], q_parts[t][2 * j + i][1]);
      }
    }
  }

  // Multiplies 16 keys from `at` on by the rows. For each row tile, a thread gets the scores of keys `g` and
  // `g` + 8 with its two rows.
  __device__ void multiply_keys(float (&scores)[ROW_TILES][4], const char* tile, int at) {
    KeysOf<KeyCodes> its(tile, at, part[0].thread);
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) {
      unsigned pairs[2][4];
      its.unpack(pairs, j);
      multiply_pairs(scores, pairs, j);
    }
    if constexpr (KEY_GROUPS > 0) {
      unsigned a[4] = {};
#pragma unroll
      for (int i = 0; i < (KEY_GROUPS > 4 ? 4 : 2); ++i) a[i] = key_offsets(tile, its.first + i % 2 * 8, its.m, i / 2);
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) multiply<KeyInner>(scores[t], a, q_sums[t][0], q_sums[t][1]);
    }
  }

  // Returns the number of a thread's consecutive eights that share a scale. Such a run begins at each
  // multiple of it.
  __device__ static constexpr int same_scale() {
    if constexpr (is_plain<K>) return EIGHTS;
    else {
      int a = EIGHTS, b = group_of<K>(DIM) / 8;
      while (b) {
        int rest = a % b;
        a = b;
        b = rest;
      }
      return a;
    }
  }

  // Reads a thread's eights of a key, 16 bytes at a time if their size allows it.
  template <typename Codes>
  __device__ static void read_eights(typename Codes::Eight (&eights)[EIGHTS], const char* row, int m) {
    constexpr int MINE = EIGHTS * K::BITS;
    if constexpr (K::BITS == 4 && MINE % 16 == 0) {
#pragma unroll
      for (int j = 0; j < EIGHTS; j += 4) {
        uint4 x = *reinterpret_cast<const uint4*>(row + MINE * m + 4 * j);
        eights[j].w[0] = x.x;
        eights[j + 1].w[0] = x.y;
        eights[j + 2].w[0] = x.z;
        eights[j + 3].w[0] = x.w;
      }
    } else if constexpr (K::BITS == 4 && MINE % 8 == 0) {
#pragma unroll
      for (int j = 0; j < EIGHTS; j += 2) {
        uint2 x = *reinterpret_cast<const uint2*>(row + MINE * m + 4 * j);
        eights[j].w[0] = x.x;
        eights[j + 1].w[0] = x.y;
      }
    } else if constexpr (K::BITS == 8 && MINE % 16 == 0) {
#pragma unroll
      for (int j = 0; j < EIGHTS; j += 2) {
        uint4 x = *reinterpret_cast<const uint4*>(row + MINE * m + 8 * j);
        eights[j] = {{x.x, x.y}};
        eights[j + 1] = {{x.z, x.w}};
      }
    } else {
#pragma unroll
      for (int j = 0; j < EIGHTS; ++j) eights[j] = Codes::read(row, m * EIGHTS + j);
    }
  }

  // Returns a bit for each key of a tile, which is 1 if the row of this thread sees the key.
  __device__ unsigned long long seen_of(int tile) const {
    if (ends_at < 0) return 0;
    if constexpr (MASK == SEES_LISTED) return part[0].listed.bits(tile, query_of);
    int count = min(max(ends_at - TILE * tile, 0), TILE);
    return count == TILE ? ~0ull : (1ull << count) - 1;
  }

  // Replaces the scores of a step by weights, and rescales the sums if the maximum score grows. `seen` has a
  // bit for each key of the step that the row of this thread sees.
  __device__ void weigh(float (&scores)[ROW_TILES][4], unsigned seen) {
#pragma unroll
    for (int i = 0; i < 4 * ROW_TILES; ++i) {
      float& score = scores[i / 4][i % 4];
      score = part[0].scaled(score);
    }
    // In most steps, all rows see all keys.
    if (!__all_sync(ALL, ends_at < 0 || seen == 0xffff)) {
      int g = part[0].thread / 4, m = part[0].thread % 4;
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i) {
        unsigned of_row = __shfl_sync(ALL, seen, i / 2 * ROW_TILE + 2 * m + i % 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!(of_row >> (g + 8 * half) & 1)) scores[i / 2][2 * half + i % 2] = -INFINITY;
        }
      }
    }
    bool grows = false;
#pragma unroll
    for (int i = 0; i < 4 * ROW_TILES; ++i) grows = grows || scores[i / 4][i % 4] > most[i / 4][i % 2];
    if (__any_sync(ALL, grows)) grow(scores);
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) {
      float& highest = most[i / 2][i % 2];
      // If the row has seen no key so far, `highest` is -infinity. Subtracting 0 then gives weights
      // of 0.
      float from = highest == -INFINITY ? 0.0f : highest;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[i / 2][2 * half + i % 2];
        score = power_of_two(score - from);
        total[i / 2][i % 2] += score;
      }
    }
  }

  // Updates the maximum scores, and rescales the sums.
  __device__ void grow(const float (&scores)[ROW_TILES][4]) {
#pragma unroll
    for (int t = 0; t < ROW_TILES; ++t) {
      float weight[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float own = fmaxf(most[t][i], fmaxf(scores[t][i], scores[t][i + 2])), highest = over_column(own, false);
        weight[i] = weight_of(most[t][i], highest);
        total[t][i] *= weight[i];
        most[t][i] = highest;
      }
#pragma unroll
      for (int i = 0; i < 2 * ELEMENTS; ++i) sums[t][i / 4][i % 4] *= weight[i % 2];
      for (int i = 0; i < 2; ++i) offsets[t][i] *= weight[i];
    }
  }

  // Adds the values from `at` on, multiplied by the weights of all rows.
  __device__ void add_values(const float (&weights)[ROW_TILES][4], const char* tile, int at) {
    unsigned b[ROW_TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) {
      const float* pair = &weights[i / 2][i % 2 * 2];
      b[i / 2][i % 2] = transposed(rounded_pair<ValueInner>(pair[0], pair[1]));
    }
    int g = part[0].thread / 4, first = at + part[0].thread % 4 * 2;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      typename ValueCodes::Eight eights[2][2];
      Scales scales[2];
      read_values(eights, scales, tile, first, 8 * round + g);
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply_values(b, eights, scales, half, 8 * round + 4 * half);
    }
    if constexpr (HAS_HALF) {
      // Two threads share an eight.
      typename ValueCodes::Eight eights[2][2];
      Scales scales[2];
      read_values(eights, scales, tile, first, 8 * ROUNDS + g % 4);
      multiply_values(b, eights, scales, g / 4, 8 * ROUNDS);
    }
    if constexpr (VALUE_GROUPS > 0) {
      unsigned a[4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int value = first + 8 * i, group = g % VALUE_GROUPS;
        unsigned both = Values::offset(tile, value, group) | Values::offset(tile, value + 1, group) << 16;
        a[2 * i] = g < VALUE_GROUPS ? both : 0;
      }
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) multiply<ValueInner>(offsets[t], a, b[t][0], b[t][1]);
    }
  }

  // Reads the same eight of the values `first`, `first + 1`, `first + 8` and `first + 9`.
  __device__ static void read_values(typename ValueCodes::Eight (&eights)[2][2], Scales (&scales)[2], const char* tile,
                                     int first, int eight) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int value = first + 8 * i;
      const char* row = tile + value * Values::PITCH;
      eights[i][0] = ValueCodes::read(row, eight);
      eights[i][1] = ValueCodes::read(row + Values::PITCH, eight);
      scales[i] = scales_of<ValueCodes, Values>(tile, value, value + 1, Values::group(eight));
    }
  }

  // Multiplies half of the eights from `read_values` by the weights. `to` is the first of this
  // thread's four sums to which the products are added.
  __device__ void multiply_values(const unsigned (&b)[ROW_TILES][2], const typename ValueCodes::Eight (&eights)[2][2],
                                  const Scales (&scales)[2], int half, int to) {
    unsigned upper[4], lower[4];
    ValueCodes::unpack(upper, ValueCodes::of_two(eights[0][0], eights[0][1], half), scales[0]);
    ValueCodes::unpack(lower, ValueCodes::of_two(eights[1][0], eights[1][1], half), scales[1]);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      unsigned a[4] = {upper[i], upper[i + 1], lower[i], lower[i + 1]};
#pragma unroll
      for (int t = 0; t < ROW_TILES; ++t) multiply<ValueInner>(sums[t][(to + i) / 2], a, b[t][0], b[t][1]);
    }
  }

  // Returns the index in a head of element `element` of this thread's sums. `element` is a multiple
  // of 4, and the three elements after it are also consecutive in the head.
  __device__ static int column(int element, int g) {
    if (element < 8 * ROUNDS) return element / 8 * 64 + 8 * g + element % 8;
    return 64 * ROUNDS + 8 * (g % 4) + 4 * (g / 4);
  }

  template <typename Wait>
  __device__ void attend_to_slice(int known, const Wait& wait) {
    char* stages = part[0].shared;
    auto load_tile = [&](int first, int place) { load(stages + place * STAGE, first); };
    // With a short cache, each block has one tile. Its keys are unpacked before the queries are available.
    unsigned prepared[EIGHTS][2][4];
    auto prepare = [&](int place) {
      wait_for_copies<(STAGES > 1 ? STAGES - 2 : 0)>();
      __syncthreads();
      KeysOf<Decoder<K, E, false>> its(stages + place * STAGE, part[0].key_of_warp, part[0].thread);
#pragma unroll
      for (int j = 0; j < EIGHTS; ++j) its.unpack(prepared[j], j);
    };
    auto start = [&](bool is_prepared) {
      read_queries();
      if (!is_prepared) sum_all_queries();
    };
    auto begin = [&](int tile, int place, bool is_followed) {
      if constexpr (ROW_TILES == 1) {
        unsigned of_step = static_cast<unsigned>(seen_of(tile) >> part[0].key_of_warp) & 0xffff;
        if (__any_sync(ALL, of_step != 0)) {
          // Two sums alternate, because consecutive products of one sum depend on each other.
          float scores[ROW_TILES][4] = {}, others[ROW_TILES][4] = {};
#pragma unroll
          for (int j = 0; j < EIGHTS; ++j) multiply_pairs(j % 2 ? others : scores, prepared[j], j);
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[0][i] += others[0][i];
          weigh(scores, of_step);
          add_values(scores, stages + place * STAGE + VALUES_AT, part[0].key_of_warp);
        }
        if (is_followed) sum_all_queries();
      }
    };
    unsigned long long seen = 0;
    auto look = [&](int tile) { seen = seen_of(tile); };
    auto attend = [&](int place) {
      const char* rows = stages + place * STAGE;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int at = part[0].key_of_warp + STEP * i;
        unsigned of_step = static_cast<unsigned>(seen >> at % TILE) & 0xffff;
        // Skips steps of which no row of the warp sees a key, such as those of other sequences.
        if (i >= part[0].steps() || !__any_sync(ALL, of_step != 0)) continue;
        float scores[ROW_TILES][4] = {};
        multiply_keys(scores, rows, at);
        weigh(scores, of_step);
        add_values(scores, rows + VALUES_AT, at);
      }
    };
    part[0].template for_tiles<ROW_TILES == 1>(known, wait, load_tile, prepare, start, begin, look, attend);
  }

  // Adds the sums of a part, and writes its result or partial result. All parts use the same memory for this.
  __device__ void end_slice(int p, E* out, float* parts, float* stats) {
    if (p > 0) __syncthreads();
    int g = part[0].thread / 4, m = part[0].thread % 4;
#pragma unroll
    for (int i = 0; i < 2 * EACH; ++i) {
      int t = p * EACH + i / 2, of_pair = i % 2, of_warp = i / 2 * ROW_TILE + 2 * m + of_pair;
      float whole = over_column(total[t][of_pair], true);
#pragma unroll
      for (int element = 0; element < ELEMENTS; element += 4) {
        int first = column(element, g);
        float offset = 0;
        if constexpr (VALUE_GROUPS > 0) {
          offset = __shfl_sync(ALL, offsets[t][of_pair], first / group_of<V>(DIM) * 4 + m);
        }
        float x[4];
        for (int j = 0; j < 4; ++j) x[j] = sums[t][(element + j) / 2][j % 2 * 2 + of_pair] + offset;
        part[p].keep(of_warp, first, x);
      }
      if (g == 0) part[p].keep_ends(of_warp, most[t][of_pair], whole);
    }
    __syncthreads();
    part[p].add_warps(out, parts, stats);
  }
};

}  // namespace etkv
