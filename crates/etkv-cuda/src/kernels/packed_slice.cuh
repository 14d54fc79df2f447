// Attention over a slice of packed keys and values: as `Slice`, whose rows, masks, running softmax and ends it
// has, but keys and values come to shared memory packed, and become elements in registers.
//
// Both operands of a product take the elements of a head in the order in which codes lie in memory: the sum
// over them is the same. Of a key, thread `m` of four takes a quarter of all eights of codes, and the queries
// are read in the same order. Of values, thread `g` of eight takes the eight `g` of each 64 elements, so that
// the sums' columns are in another order until they are written.
//
// Where a warp has one part of rows, offsets of affine codes come as products of their own, which saves an
// instruction for each pair of elements. A key's score has the offset of each of its groups times the sum of a query
// over the group, as a number of float16 and what that lacks. The values' weighted offsets of each group are added
// to its columns at the end. With two parts there are too few registers, and half as many elements for each product.

namespace etkv {

template <typename E, typename K, typename V, int DIM, int MASK, int STAGES, int PARTS>
struct PackedSlice {
  using Rows = Slice<E, DIM, DIM, MASK, STAGES, PARTS == 1 ? 4 : 2, PARTS>;
  using Keys = PackedRows<K, DIM, true>;
  using Values = PackedRows<V, DIM, false>;
  static constexpr bool IS_APART = PARTS == 1;
  using KeyCodes = Decoder<K, E, IS_APART>;
  using ValueCodes = Decoder<V, E, IS_APART>;
  using KeyInner = typename KeyCodes::Inner;
  using ValueInner = typename ValueCodes::Inner;

  // Eights of a key that a thread has.
  static constexpr int EIGHTS = DIM / 32;
  // Eights of values that all threads have, 64 elements each; half of the threads' have one more if there are
  // 32 elements more.
  static constexpr int ROUNDS = DIM / 64;
  static constexpr bool HAS_HALF = DIM % 64 != 0;
  static constexpr int VALUES_AT = (Keys::BYTES + 15) / 16 * 16;
  static constexpr int STAGE = VALUES_AT + (Values::BYTES + 15) / 16 * 16;

  // The groups of a row whose offsets come apart.
  static constexpr int KEY_GROUPS = IS_APART ? Keys::offset_bytes() / 2 : 0;
  static constexpr int VALUE_GROUPS = IS_APART ? Values::offset_bytes() / 2 : 0;
  static_assert(KEY_GROUPS <= 8 && VALUE_GROUPS <= 8, "those of one product");

  // Blocks of rows that share the unpacked keys.
  Rows part[PARTS];
  // Of each the sums of its queries over groups, as an operand.
  unsigned q_sums[PARTS][4];
  Keys keys;
  Values values;

  __device__ void start(const Planes& k, const Planes& v) {
    for (int i = 0; i < PARTS; ++i) part[i].start(i);
    keys.open(k, part[0].head);
    values.open(v, part[0].head);
  }

  // Reads the queries of this thread as `multiply_keys` has the keys.
  __device__ void read_queries() {
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int r = part[p].row(i);
        const E* from = r < part[p].sizes.rows() ? part[p].query(r) : nullptr;
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j) {
          uint4 x = make_uint4(0, 0, 0, 0);
          if (from) x = converted(read_rows(from + 8 * (part[p].thread % 4 * EIGHTS + j)));
          part[p].q_parts[2 * j][i] = __byte_perm(x.x, x.z, 0x5410);
          part[p].q_parts[2 * j][i + 2] = __byte_perm(x.x, x.z, 0x7632);
          part[p].q_parts[2 * j + 1][i] = __byte_perm(x.y, x.w, 0x5410);
          part[p].q_parts[2 * j + 1][i + 2] = __byte_perm(x.y, x.w, 0x7632);
        }
      }
      if constexpr (KEY_GROUPS > 0) sum_queries(p);
    }
  }

  // Sums the queries of a part over the groups. Element `g` of the sums of a row is that of group `g`, rounded,
  // and the element `KEY_GROUPS` behind it what was lost.
  __device__ void sum_queries(int p) {
    int m = part[p].thread % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sums[16] = {};
#pragma unroll
      for (int j = 0; j < EIGHTS; ++j) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) sum += sum_of_pair(part[p].q_parts[2 * j + k / 2][i + k % 2 * 2]);
#pragma unroll
        for (int g = 0; g < KEY_GROUPS; ++g) sums[g] += Keys::group(m * EIGHTS + j) == g ? sum : 0;
      }
#pragma unroll
      for (int g = 0; g < KEY_GROUPS; ++g) {
        float sum = over_row(sums[g], true);
        sums[g] = float(KeyInner(sum));
        sums[KEY_GROUPS + g] = sum - sums[g];
      }
#pragma unroll
      for (int pair = 0; pair < 8; ++pair) {
        if (pair % 4 != m) continue;
        q_sums[p][pair / 4 * 2 + i] = rounded_pair<KeyInner>(sums[2 * pair], sums[2 * pair + 1]);
      }
    }
  }

  __device__ static float sum_of_pair(unsigned pair) {
    KeyInner halves[2];
    memcpy(halves, &pair, 4);
    return float(halves[0]) + float(halves[1]);
  }

  // The offsets of a key for the elements 2 * `m` and the next of the queries' sums, or for those 8 behind.
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

  // Returns elements in the type of the keys' products. float16 has all numbers of bfloat16 that make a
  // difference to a score; what is larger than all of it becomes its largest, and NaN stays.
  __device__ static uint4 converted(uint4 x) {
    if constexpr (cuda::std::is_same_v<E, KeyInner>) return x;
    unsigned words[4] = {x.x, x.y, x.z, x.w};
    for (int i = 0; i < 4; ++i) {
      float low = __uint_as_float(words[i] << 16), high = __uint_as_float(words[i] & 0xffff0000u);
      words[i] = rounded_pair<KeyInner>(limited(low), limited(high));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  __device__ static float limited(float x) { return fabsf(x) > 65504.0f ? copysignf(65504.0f, x) : x; }

  __device__ void load(char* to, int first) const {
    int count = part[0].sizes.keys - first;
    keys.load(to, first, count);
    values.load(to + VALUES_AT, first, count);
  }

  // Multiplies the rows of all parts by the keys from `at` on, as `Slice` does.
  __device__ void multiply_keys(float (&scores)[PARTS][1][2][4], const char* tile, int at) {
    int m = part[0].thread % 4, first = at + part[0].thread / 4;
    typename KeyCodes::Eight eights[2][EIGHTS];
    Scales scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) read_eights(eights[half], tile + (first + 8 * half) * Keys::PITCH, m);
#pragma unroll
    for (int j = 0; j < EIGHTS; ++j) {
      // The products of two keys in turn: those of one wait for each other.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int key = first + 8 * half;
        if (j % same_scale() == 0) {
          scales[half] = scales_of<KeyCodes, Keys>(tile, key, key, Keys::group(m * EIGHTS + j));
        }
        unsigned pairs[4];
        KeyCodes::unpack(pairs, KeyCodes::of_one(eights[half][j]), scales[half]);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
          multiply<KeyInner>(scores[p][0][half], part[p].q_parts[2 * j], pairs[0], pairs[1]);
        }
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
          multiply<KeyInner>(scores[p][0][half], part[p].q_parts[2 * j + 1], pairs[2], pairs[3]);
        }
      }
    }
    if constexpr (KEY_GROUPS > 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned low = key_offsets(tile, first + 8 * half, m, 0);
        unsigned high = KEY_GROUPS > 4 ? key_offsets(tile, first + 8 * half, m, 1) : 0;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) multiply<KeyInner>(scores[p][0][half], q_sums[p], low, high);
      }
    }
  }

  // How many of a thread's eights share a scale, beginning with each multiple of that.
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

  // Reads a thread's eights of a key, 16 bytes at a time where they are whole groups of that.
  __device__ static void read_eights(typename KeyCodes::Eight (&eights)[EIGHTS], const char* row, int m) {
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
      for (int j = 0; j < EIGHTS; ++j) eights[j] = KeyCodes::read(row, m * EIGHTS + j);
    }
  }

  // Adds the values from `at` on, by the weights of all parts.
  __device__ void add_values(const float (&p)[PARTS][1][2][4], const char* tile, int at) {
    unsigned a[PARTS][4];
#pragma unroll
    for (int i = 0; i < 4 * PARTS; ++i) {
      const float* pair = &p[i / 4][0][i % 4 / 2][i % 2 * 2];
      a[i / 4][i % 4] = rounded_pair<ValueInner>(pair[0], pair[1]);
    }
    int g = part[0].thread / 4, first = at + part[0].thread % 4 * 2;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      typename ValueCodes::Eight eights[2][2];
      Scales scales[2];
      read_values(eights, scales, tile, first, 8 * round + g);
#pragma unroll
      for (int half = 0; half < 2; ++half) multiply_values(a, eights, scales, half, 8 * round + 4 * half);
    }
    if constexpr (HAS_HALF) {
      // Two threads share an eight.
      typename ValueCodes::Eight eights[2][2];
      Scales scales[2];
      read_values(eights, scales, tile, first, 8 * ROUNDS + g % 4);
      multiply_values(a, eights, scales, g / 4, 8 * ROUNDS);
    }
    if constexpr (VALUE_GROUPS > 0) {
      unsigned b[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int value = first + 8 * i, group = g % VALUE_GROUPS;
        unsigned offsets = Values::offset(tile, value, group) | Values::offset(tile, value + 1, group) << 16;
        b[i] = g < VALUE_GROUPS ? offsets : 0;
      }
#pragma unroll
      for (int p = 0; p < PARTS; ++p) multiply<ValueInner>(part[p].offsets, a[p], b[0], b[1]);
    }
  }

  // Adds the weighted offsets of each group to the sums of its columns.
  __device__ void add_offsets(int p) {
    int m = part[p].thread % 4;
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; ++g) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float offset = __shfl_sync(ALL, part[p].offsets[2 * i + g % 2], part[p].thread / 4 * 4 + g / 2);
#pragma unroll
        for (int tile = 0; tile < DIM / 8; ++tile) {
          for (int j = 0; j < 2; ++j) {
            bool is_of_group = (column(tile, m) + 8 * j) / group_of<V>(DIM) == g;
            part[p].sums[tile][2 * i + j] += is_of_group ? offset : 0;
          }
        }
      }
    }
  }

  // Reads an eight of the values `first` and the next, and of those 8 later.
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

  // Multiplies half of these eights. `to` is the first of four columns of sums.
  __device__ void multiply_values(const unsigned (&a)[PARTS][4], const typename ValueCodes::Eight (&eights)[2][2],
                                  const Scales (&scales)[2], int half, int to) {
    unsigned upper[4], lower[4];
    ValueCodes::unpack(upper, ValueCodes::of_two(eights[0][0], eights[0][1], half), scales[0]);
    ValueCodes::unpack(lower, ValueCodes::of_two(eights[1][0], eights[1][1], half), scales[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int p = 0; p < PARTS; ++p) multiply<ValueInner>(part[p].sums[to + i], a[p], upper[i], lower[i]);
    }
  }

  // The elements of column `tile` of the sums that thread `m` of four has: this, and 8 behind it.
  __device__ static int column(int tile, int m) {
    int round = tile / 8;
    if (round < ROUNDS) return 64 * round + 16 * m + tile % 8;
    return 64 * ROUNDS + 16 * (m % 2) + 4 * (m / 2) + tile % 8;
  }

  template <typename Wait>
  __device__ void attend_to_slice(int known, const Wait& wait) {
    char* stages = part[0].shared;
    auto load_tile = [&](int first, int place) { load(stages + place * STAGE, first); };
    auto attend = [&](int tile, int place) {
      unsigned seen[PARTS][4];
#pragma unroll
      for (int p = 0; p < PARTS; ++p) part[p].see(seen[p], tile);
      Rows::wait_for_tile();
      const char* rows = stages + place * STAGE;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unsigned all = 0;
        for (int p = 0; p < PARTS; ++p) all |= seen[p][i];
        if (i >= part[0].row_warps || !__any_sync(ALL, all != 0)) continue;
        int at = part[0].key_of_warp + STEP * i;
        float scores[PARTS][1][2][4] = {};
        multiply_keys(scores, rows, at);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) part[p].weigh(scores[p], seen[p] + i);
        add_values(scores, rows + VALUES_AT, at);
      }
    };
    part[0].for_tiles(known, wait, load_tile, [&] { read_queries(); }, attend);
  }

  // Ends a part. The parts share the memory for it.
  __device__ void end_slice(int p, E* out, float* parts, float* stats) {
    if (p > 0) __syncthreads();
    if constexpr (VALUE_GROUPS > 0) add_offsets(p);
    part[p].end_slice(out, parts, stats, [](int tile, int m) { return column(tile, m); }, 8);
  }
};

}  // namespace etkv
