// The rows of a packed pool, and tiles of rows in shared memory.

namespace etkv {

// The rows of one head. `IS_KEYS` is whether threads read them in the order for keys, or for values.
template <typename F, int DIM, bool IS_KEYS>
struct PackedRows {
  static constexpr int ROW = DIM / 8 * F::BITS;
  static constexpr int COPIED = ROW % 16 == 0 ? 16 : ROW % 8 == 0 ? 8 : 4;
  static constexpr int WHOLE = (ROW + 15) / 16 * 16;
  // Rows in shared memory are padded so that a warp reads from different banks. It reads whole rows of keys
  // at a time, and a word of every second row of values.
  static constexpr bool IS_PADDED = IS_KEYS ? WHOLE % 128 == 0 : WHOLE % 32 == 0;
  static constexpr int PITCH = WHOLE + (IS_PADDED ? 16 : 0);

  __device__ static constexpr int groups() {
    if constexpr (is_plain<F>) return 0;
    else return DIM / group_of<F>(DIM);
  }
  __device__ static constexpr int scale_bytes() {
    if constexpr (is_plain<F>) return 0;
    else return F::SCALE_BYTES * groups();
  }
  __device__ static constexpr int offset_bytes() {
    if constexpr (is_plain<F>) return 0;
    else return F::HAS_OFFSETS ? 2 * groups() : 0;
  }

  static constexpr int SCALES_AT = TILE * PITCH;
  static constexpr int OFFSETS_AT = SCALES_AT + TILE * scale_bytes();
  static constexpr int BYTES = OFFSETS_AT + TILE * offset_bytes();

  const char* codes;
  const char* scales;
  const char* offsets;

  __device__ void open(const Planes& planes, int head) {
    long long first = head * planes.capacity;
    codes = static_cast<const char*>(planes.codes) + first * ROW;
    scales = static_cast<const char*>(planes.scales) + first * scale_bytes();
    offsets = reinterpret_cast<const char*>(planes.offsets) + first * offset_bytes();
  }

  // The number of this thread. The remainder tells the compiler the range. Without it, the compiler spills
  // registers if a warp has two parts of rows.
  __device__ static int own_thread() { return threadIdx.x % THREADS; }

  // Copies a tile. Only `count` rows exist, and the others become zeros.
  __device__ void load(char* to, int first, int count) const {
    load_codes(to, first, count);
    load_plane<scale_bytes()>(to + SCALES_AT, scales, first, count);
    load_plane<offset_bytes()>(to + OFFSETS_AT, offsets, first, count);
  }

  __device__ void load_codes(char* to, int first, int count) const {
    constexpr int PIECES = ROW / COPIED;
    int thread = own_thread();
    if constexpr (THREADS % PIECES == 0 && THREADS / PIECES <= TILE) {
      // If the tile is full, fewer instructions are necessary.
      if (count >= TILE) {
        constexpr int APART = THREADS / PIECES;
        int r = thread / PIECES, at = thread % PIECES * COPIED;
        const char* from = codes + static_cast<long long>(first + r) * ROW + at;
        to += r * PITCH + at;
#pragma unroll
        for (int i = 0; i < TILE / APART; ++i) {
          copy_bytes_later<COPIED>(to + i * APART * PITCH, from + i * APART * ROW, COPIED);
        }
        return;
      }
    }
    for (int i = thread; i < TILE * PIECES; i += THREADS) {
      int r = i / PIECES, at = i % PIECES * COPIED;
      bool exists = r < count;
      const char* from = codes + (exists ? static_cast<long long>(first + r) * ROW + at : 0);
      copy_bytes_later<COPIED>(to + r * PITCH + at, from, exists ? COPIED : 0);
    }
  }

  template <int EACH>
  __device__ static void load_plane(char* to, const char* plane, int first, int count) {
    if constexpr (EACH > 0) {
      const char* from = plane + static_cast<long long>(first) * EACH;
      int bytes = min(max(count, 0), TILE) * EACH;
      // The address may be unaligned if a head has an odd number of rows.
      bool aligned = reinterpret_cast<unsigned long long>(from) % 16 == 0;
      for (int i = own_thread(); i < TILE * EACH / 16; i += THREADS) {
        int left = min(max(bytes - 16 * i, 0), 16);
        if (aligned) {
          copy_bytes_later<16>(to + 16 * i, left ? from + 16 * i : plane_start(plane), left);
        } else {
          for (int j = 0; j < 16; ++j) to[16 * i + j] = j < left ? from[16 * i + j] : 0;
        }
      }
    }
  }

  // Returns an aligned address for copies of 0 bytes.
  __device__ static const char* plane_start(const char* plane) {
    return reinterpret_cast<const char*>(reinterpret_cast<unsigned long long>(plane) / 16 * 16);
  }

  // Returns the stored bits of the scale of a row's group. `offset` returns those of the offset.
  __device__ static unsigned scale(const char* tile, int row, int group) {
    if constexpr (is_plain<F>) {
      return 0;
    } else {
      int at = row * groups() + group;
      if constexpr (F::SCALE_BYTES == 1) return reinterpret_cast<const unsigned char*>(tile + SCALES_AT)[at];
      else return reinterpret_cast<const unsigned short*>(tile + SCALES_AT)[at];
    }
  }

  __device__ static unsigned offset(const char* tile, int row, int group) {
    if constexpr (offset_bytes() == 0) return 0;
    else return reinterpret_cast<const unsigned short*>(tile + OFFSETS_AT)[row * groups() + group];
  }

  // Returns the group of an eight of a row.
  __device__ static int group(int eight) {
    if constexpr (is_plain<F>) return 0;
    else return 8 * eight / group_of<F>(DIM);
  }
};

// Returns the factors for pairs whose halves are from the rows `row` and `other`, which may be the same.
template <typename D, typename R>
__device__ inline Scales scales_of(const char* tile, int row, int other, int group) {
  if constexpr (R::groups() == 0) {
    return {0, 0, 0};
  } else {
    unsigned s = R::scale(tile, row, group), o = R::offset(tile, row, group);
    if (row == other) return D::scales_of(s, s, o, o);
    return D::scales_of(s, R::scale(tile, other, group), o, R::offset(tile, other, group));
  }
}

}  // namespace etkv
