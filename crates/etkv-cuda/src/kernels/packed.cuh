// Weights in MLX's affine format with 4 or 8 bits. The code of element `i` of a row begins at bit `BITS * i`.
// Each group of elements has a scale and a bias, and the value of code `q` is `scale * q + bias`. The value
// is rounded to the element type, as MLX does when it unpacks a weight.

namespace etkv {

// The number of codes in 16 bytes, the piece that a thread loads. They belong to one group.
template <int BITS>
constexpr int CODES = 128 / BITS;

template <typename E, int BITS>
struct Codes {
  // A piece consists of eights, which have eight codes each.
  static constexpr int EIGHTS = CODES<BITS> / 8;

  // Rotates a piece so that the eight with index `first` comes first.
  __device__ static uint4 rotated(uint4 piece, int first) {
    if (BITS == 4 && first % 2) piece = make_uint4(piece.y, piece.z, piece.w, piece.x);
    if (BITS == 4 ? first / 2 : first) piece = make_uint4(piece.z, piece.w, piece.x, piece.y);
    return piece;
  }

  // Unpacks eight codes to pairs, in the order of `arranged`. `group` has a scale in its lower half and a
  // bias in its upper half. `mask` has the four lowest bits of both halves.
  __device__ static void unpack(unsigned (&pairs)[4], uint4 piece, int eight, unsigned group, unsigned mask) {
    unsigned words[4] = {piece.x, piece.y, piece.z, piece.w};
    unsigned scales = __byte_perm(group, 0, 0x1010), biases = __byte_perm(group, 0, 0x3232);
    constexpr bool IS_F16 = cuda::std::is_same_v<E, __half>;
    if constexpr (BITS == 8 && !IS_F16) {
      // bfloat16 has too few bits for the method below.
      float scale = __uint_as_float(group << 16), bias = __uint_as_float(group & 0xffff0000u);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unsigned word = words[2 * eight + i / 2];
        float numbers[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          // The code is put in the last byte of 2^23.
          float number = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i % 2 * 2 + j)) - 8388608.0f;
          numbers[j] = number * scale + bias;
        }
        pairs[i] = rounded_pair<E>(numbers[0], numbers[1]);
      }
      return;
    }
    // The codes are put in the last bits of 1024, or of 128 in bfloat16.
    constexpr unsigned ONES = IS_F16 ? 0x3c003c00u : 0x3f803f80u;
    constexpr unsigned LARGE = IS_F16 ? 0x64006400u : 0x43004300u;
    constexpr unsigned MINUS_LARGE = LARGE | 0x80008000u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned codes;
      if constexpr (BITS == 4) {
        codes = ((words[eight] >> 4 * i) & mask) | LARGE;
      } else {
        codes = __byte_perm(words[2 * eight + i / 2], LARGE, i % 2 ? 0x5352 : 0x5150);
      }
      codes = multiply_add_pairs<E>(codes, ONES, MINUS_LARGE);
      pairs[i] = multiply_add_pairs<E>(codes, scales, biases);
    }
  }

  // Returns eight elements in the order of `unpack`: with 4 bits, elements `i` and `i + 4` are a pair.
  __device__ static uint4 arranged(uint4 x) {
    if constexpr (BITS == 8) return x;
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                      __byte_perm(x.y, x.w, 0x7632));
  }
};

// Products of one or a few rows with a packed weight. A block computes a tile of 16 outputs at a time, and
// its warps share the inner axis. Codes are unpacked in registers, as operands of tensor cores.
template <typename E, int BITS>
struct PackedRows : OneRow<E> {
  using Base = OneRow<E>;
  using Base::inner, Base::outputs, Base::rows;
  using Base::is_shared, Base::width;
  using Kind = Codes<E, BITS>;

  // The codes begin at `w`. A group has `1 << group_shift` elements.
  const E* scales;
  const E* biases;
  int group_shift;

  // The number of elements of a piece, of the pieces of four threads (a span), and of a step, in
  // which each warp has two spans. The last number is that of the steps that a thread loads ahead.
  static constexpr int PIECE = CODES<BITS>;
  static constexpr int SPAN = 4 * PIECE;
  static constexpr int PACKED_STEP = 2 * SPAN * SHARES;
  static constexpr int PACKED_DEPTH = 2;

  __device__ void run_packed(E* out, E* shared, float* sums, float* squares) const {
    if (rows <= ROWS) {
      run_tiles<1>(out, shared, sums, squares);
    } else {
      run_tiles<2>(out, shared, sums, squares);
    }
  }

  template <int TILES>
  __device__ void run_tiles(E* out, E* shared, float* sums, float* squares) const {
    if (is_shared()) {
      multiply_packed<TILES, true>(out, shared, sums, squares);
    } else {
      multiply_packed<TILES, false>(out, shared, sums, squares);
    }
  }

  // Returns the scale of an element's group in the lower half, and the bias in the upper half.
  __device__ unsigned group_of(long long element) const {
    long long at = element >> group_shift;
    unsigned scale = __ldg(reinterpret_cast<const unsigned short*>(scales) + at);
    unsigned bias = __ldg(reinterpret_cast<const unsigned short*>(biases) + at);
    return scale | bias << 16;
  }

  // Multiplies up to 8 * TILES rows, as `FewRows` does. The rows of `x` must be aligned to 16 bytes.
  template <int TILES, bool IN_SHARED>
  __device__ void multiply_packed(E* out, E* shared, float* sums, float* squares) const {
    int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    int group = thread / 4, member = thread % 4;
    int tiles = (outputs + width() - 1) / width(), slots = (inner + PACKED_STEP - 1) / PACKED_STEP;
    int first = 2 * SPAN * warp, mine = first + PIECE * member;
    // The threads of a group begin with different eights, so that they read shared memory from different
    // banks.
    int rotation = member * Kind::EIGHTS / 4;

    uint4 a[PACKED_DEPTH][2][2];
    unsigned groups[PACKED_DEPTH][2][2];
    long long at_row[2];
    int next_tile = blockIdx.x, next_slot = 0;
    auto aim = [&]() {
#pragma unroll
      for (int i = 0; i < 2; ++i) at_row[i] = static_cast<long long>(this->row_of(next_tile, group, i)) * inner;
    };
    auto ask = [&](int place) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int from = next_slot * PACKED_STEP + mine + SPAN * half;
        bool exists = next_tile < tiles && from < inner;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          a[place][i][half] = make_uint4(0, 0, 0, 0);
          groups[place][i][half] = 0;
          if (!exists) continue;
          a[place][i][half] = read_once(reinterpret_cast<const uint4*>(this->w) + (at_row[i] + from) / PIECE);
          groups[place][i][half] = group_of(at_row[i] + from);
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
    for (int place = 0; place < PACKED_DEPTH; ++place) ask(place);
    wait_for_previous();
    if (IN_SHARED && rows == 1) this->share_row(shared, squares);
    if (IN_SHARED && rows > 1) this->share(shared, squares);

    // Rows after the last have no outputs, so any address is valid for them.
    const E* at_x[TILES];
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      int r = min(group + ROWS * j, rows - 1);
      at_x[j] = IN_SHARED ? shared + r * (inner + PAD) : this->x + r * this->row;
    }
    // The compiler must not know this value: it would move a constant to a register for each use, which would
    // be a seventh of all instructions here. The shift is never negative.
    unsigned mask = 0x000f000fu | (group_shift >> 31);
    float acc[TILES][4] = {};
    int tile = blockIdx.x, slot = 0, parity = 0;
    while (tile < tiles) {
#pragma unroll
      for (int place = 0; place < PACKED_DEPTH; ++place) {
        if (tile >= tiles) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int from = slot * PACKED_STEP + SPAN * half;
          if (from + first >= inner) continue;
          // Codes after the end of a row are zeros, and so are their scales and biases.
          int from_x = min(from + mine, inner - PIECE);
          uint4 upper = Kind::rotated(a[place][0][half], rotation), lower = Kind::rotated(a[place][1][half], rotation);
#pragma unroll
          for (int i = 0; i < Kind::EIGHTS; ++i) {
            unsigned up[4], low[4];
            Kind::unpack(up, upper, i, groups[place][0][half], mask);
            Kind::unpack(low, lower, i, groups[place][1][half], mask);
            unsigned head[4] = {up[0], low[0], up[1], low[1]};
            unsigned tail[4] = {up[2], low[2], up[3], low[3]};
            int at = from_x + 8 * ((i + rotation) % Kind::EIGHTS);
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
              uint4 y = IN_SHARED ? *reinterpret_cast<const uint4*>(at_x[j] + at) : read_rows(at_x[j] + at);
              y = Kind::arranged(y);
              multiply<E>(acc[j], head, y.x, y.y);
              multiply<E>(acc[j], tail, y.z, y.w);
            }
          }
        }
        ask(place);
        if (++slot < slots) continue;
        // Slower warps may still read the other half of `sums`.
        this->template end_tile<TILES>(out, sums + parity * (SUMS / 2), tile, acc);
        slot = 0;
        parity = 1 - parity;
        tile += gridDim.x;
      }
    }
  }
};

// Unpacks the embeddings of tokens, one in each block. Rounds the elements before it multiplies them by `by`.
template <typename E, int BITS>
__device__ inline void embed_packed(E* out, const unsigned* codes, const E* scales, const E* biases, int group_shift,
                                    const E* by, const Step* step, int vocabulary, int inner) {
  int id = max(min(step->ids[blockIdx.x], vocabulary - 1), 0);
  long long row = static_cast<long long>(id) * inner;
  E* to = out + static_cast<long long>(blockIdx.x) * inner;
  constexpr int OF_WORD = 32 / BITS;
  for (int i = OF_WORD * threadIdx.x; i < inner; i += OF_WORD * EMBED_THREADS) {
    unsigned word = codes[(row + i) / OF_WORD];
    long long group = (row + i) >> group_shift;
    float scale = static_cast<float>(scales[group]), bias = static_cast<float>(biases[group]);
#pragma unroll
    for (int j = 0; j < OF_WORD; ++j) {
      int code = word >> BITS * j & ((1 << BITS) - 1);
      E x = static_cast<E>(scale * static_cast<float>(code) + bias);
      to[i + j] = by ? static_cast<E>(static_cast<float>(x) * static_cast<float>(*by)) : x;
    }
  }
}

}  // namespace etkv
