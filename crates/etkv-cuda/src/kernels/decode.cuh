// Unpacks codes to pairs of elements in registers, as operands of tensor cores.
//
// An element is rounded once, to the type in which it is multiplied: float16 for affine codes, whose scales
// and offsets are float16, and the program's type for all other codes.

namespace etkv {

template <typename F>
inline constexpr bool is_affine = false;
template <int BITS, int GROUP>
inline constexpr bool is_affine<Affine<BITS, GROUP>> = true;

template <bool FIRST, typename A, typename B>
struct Either {
  using Type = A;
};
template <typename A, typename B>
struct Either<false, A, B> {
  using Type = B;
};

// The scale of a pair of codes (`by`) and a correction that is added (`plus`): the offset, the part
// of a scale that bfloat16 rounds away, or the scale times the number by which `Decoder::large`
// exceeds the code. `upper` is the last of these corrections for codes that stay in the upper half
// of a byte.
struct Scales {
  unsigned by, plus, upper;
};

// With `IS_APART`, elements do not include offsets. The caller adds the offsets to the results of
// products.
template <typename F, typename E, bool IS_APART>
struct Decoder {
  // The type of the unpacked elements.
  using Inner = typename Either<is_affine<F>, __half, E>::Type;

  static constexpr int BITS = F::BITS;
  static constexpr bool IS_F16 = cuda::std::is_same_v<Inner, __half>;
  // Whether four codes for the lower halves of pairs and four codes for the upper halves fit one register.
  static constexpr bool IS_JOINED = BITS <= 4;

  // An eight: eight consecutive codes of a row, with the first in the lowest bits. Bits above them are
  // undefined.
  struct Eight {
    unsigned w[(BITS + 3) / 4];
  };
  struct Quads {
    unsigned a, b;
  };

  // Reads the eight with index `eight` from a row, which must be aligned to 4 bytes.
  __device__ static Eight read(const char* row, int eight) {
    Eight e;
    if constexpr (BITS == 16) {
      uint4 x = *reinterpret_cast<const uint4*>(row + 16 * eight);
      e = {{x.x, x.y, x.z, x.w}};
    } else if constexpr (BITS == 8) {
      uint2 x = *reinterpret_cast<const uint2*>(row + 8 * eight);
      e = {{x.x, x.y}};
    } else if constexpr (BITS == 4) {
      e.w[0] = *reinterpret_cast<const unsigned*>(row + 4 * eight);
    } else {
      const unsigned* words = reinterpret_cast<const unsigned*>(row) + BITS * eight / 4;
      int shift = BITS * eight % 4 * 8;
      e.w[0] = __funnelshift_r(words[0], words[1], shift);
      if constexpr (BITS > 4) e.w[1] = __funnelshift_r(words[1], words[2], shift);
    }
    return e;
  }

  // Returns the first or second four codes of an eight in the lowest bits, without other bits.
  __device__ static unsigned four(const Eight& e, int half) {
    constexpr unsigned MASK = BITS == 8 ? ~0u : (1u << 4 * BITS % 32) - 1;
    if constexpr (BITS == 8) return e.w[half];
    if constexpr (BITS <= 4) return (half ? e.w[0] >> 4 * BITS : e.w[0]) & MASK;
    if constexpr (BITS > 4 && BITS < 8) return half ? __funnelshift_r(e.w[0], e.w[1], 4 * BITS) : e.w[0];
    return 0;
  }

  // Returns codes whose pairs are elements `i` and `i + 4` of one eight.
  __device__ static Quads of_one(const Eight& e) {
    if constexpr (BITS == 4) return {e.w[0], 0};
    return joined(four(e, 0), four(e, 1));
  }

  // Returns codes whose pairs are element `4 * half + i` of two eights.
  __device__ static Quads of_two(const Eight& e, const Eight& f, int half) {
    if constexpr (BITS == 4) return {__byte_perm(e.w[0], f.w[0], half ? 0x7632 : 0x5410), 0};
    return joined(four(e, half), four(f, half));
  }

  __device__ static Quads joined(unsigned a, unsigned b) {
    if constexpr (IS_JOINED) return {__byte_perm(a, b, 0x5410), 0};
    return {a, b};
  }

  // Returns the factors for pairs whose halves have the stored scales `s` and `t`, and the offsets `o` and
  // `p`.
  __device__ static Scales scales_of(unsigned s, unsigned t, unsigned o, unsigned p) {
    if constexpr (F::HAS_OFFSETS && !IS_APART) {
      return {__byte_perm(s, t, 0x5410), __byte_perm(o, p, 0x5410), 0};
    }
    if constexpr (F::HAS_OFFSETS) {
      // The scale times -1024, and the scale times -64. Both products are exact.
      unsigned by = __byte_perm(s, t, 0x5410);
      return {by, multiply_add_pairs<Inner>(by, 0xe400e400u, 0), multiply_add_pairs<Inner>(by, 0xd400d400u, 0)};
    }
    if constexpr (is_row<F> && IS_F16) return {__byte_perm(s, t, 0x5410), 0, 0};
    if constexpr (is_row<F>) {
      float x = from_half(s), y = from_half(t);
      unsigned high = rounded_pair<Inner>(x, y);
      float low_x = x - __uint_as_float(high << 16), low_y = y - __uint_as_float(high & 0xffff0000u);
      return {high, rounded_pair<Inner>(low_x, low_y), 0};
    }
    if constexpr (cuda::std::is_same_v<F, Nvfp4>) return {rounded_pair<Inner>(from_e4m3(s), from_e4m3(t)), 0, 0};
    if constexpr (IS_F16) return {rounded_pair<Inner>(__uint_as_float(s << 23), __uint_as_float(t << 23)), 0, 0};
    return {s << 7 | t << 23, 0, 0};
  }

  __device__ static float from_half(unsigned bits) {
    __half x;
    x.bits = static_cast<unsigned short>(bits);
    return static_cast<float>(x);
  }

  // Unpacks codes to four pairs of elements.
  __device__ static void unpack(unsigned (&pairs)[4], const Quads& q, const Scales& scales) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (F::HAS_OFFSETS && IS_APART) {
        // The fused operation multiplies the scale by `large` and subtracts the excess without intermediate
        // rounding.
        bool upper = BITS == 4 && i % 2;
        pairs[i] = multiply_add_pairs<Inner>(large(q, i), scales.by, upper ? scales.upper : scales.plus);
        continue;
      }
      unsigned code;
      if constexpr (is_e2m1<F>) {
        code = e2m1(q.a, i);
      } else if constexpr (cuda::std::is_same_v<F, Mxfp8>) {
        code = e4m3(q, i);
      } else {
        code = integer(q, i);
      }
      unsigned rest = F::HAS_OFFSETS ? scales.plus : 0;
      // In bfloat16, a float16 scale is the sum of two numbers.
      if constexpr (is_row<F> && !IS_F16) rest = multiply_add_pairs<Inner>(code, scales.plus, 0);
      pairs[i] = multiply_add_pairs<Inner>(code, scales.by, rest);
    }
  }

  // Returns a pair of codes in the last bits of a power of two, so the value is 1024 + code, or 128 + code in
  // bfloat16. In float16, every second code of 4 bits stays in the upper half of its byte, with the value 64
  // + code. This saves a shift.
  __device__ static unsigned large(const Quads& q, int i) {
    constexpr unsigned MASK = (1u << BITS) - 1, PAIR = MASK | MASK << 16;
    constexpr unsigned LARGE = IS_F16 ? 0x64006400u : 0x43004300u;
    if constexpr (BITS == 4 && IS_F16) {
      unsigned shifted = i < 2 ? q.a : q.a >> 8;
      return i % 2 ? masked_with(shifted, 0x00f000f0u, 0x54005400u) : masked_with(shifted, 0x000f000fu, LARGE);
    } else if constexpr (IS_JOINED) {
      return masked_with(q.a >> BITS * i, PAIR, LARGE);
    } else if constexpr (BITS == 8) {
      return masked_with(__byte_perm(q.a, q.b, i * 0x1111 + 0x4400), PAIR, LARGE);
    } else {
      return masked_with(__byte_perm(q.a >> BITS * i, q.b >> BITS * i, 0x5410), PAIR, LARGE);
    }
  }

  // Returns a pair of codes as numbers.
  __device__ static unsigned integer(const Quads& q, int i) {
    constexpr unsigned ONES = IS_F16 ? 0x3c003c00u : 0x3f803f80u;
    // Row codes are stored with 8 added. Affine codes are always unpacked to float16.
    constexpr unsigned MINUS = !is_row<F> ? 0xe400e400u : IS_F16 ? 0xe408e408u : 0xc308c308u;
    constexpr unsigned MINUS_UPPER = is_row<F> ? 0xd480d480u : 0xd400d400u;
    bool upper = BITS == 4 && IS_F16 && i % 2;
    return multiply_add_pairs<Inner>(large(q, i), ONES, upper ? MINUS_UPPER : MINUS);
  }

  // Returns a pair of E2M1 numbers. Their bits are moved to the same fields of the wider float, which makes
  // them too small by a power of two.
  __device__ static unsigned e2m1(unsigned a, int i) {
    unsigned top = i < 3 ? a << (12 - 4 * i) : a;
    unsigned small = IS_F16 ? (top >> 3) & 0x0e000e00u : (top >> 6) & 0x01c001c0u;
    return multiply_add_pairs<Inner>(small | (top & 0x80008000u), IS_F16 ? 0x74007400u : 0x7e807e80u, 0);
  }

  __device__ static unsigned e4m3(const Quads& q, int i) {
    unsigned top = __byte_perm(q.a, q.b, i * 0x1111 + 0x4400);
    unsigned small = IS_F16 ? (top >> 1) & 0x3f803f80u : (top >> 4) & 0x07f007f0u;
    return multiply_add_pairs<Inner>(small | (top & 0x80008000u), IS_F16 ? 0x5c005c00u : 0x7b807b80u, 0);
  }
};

// Elements that are not packed.
template <typename E, bool IS_APART>
struct Decoder<Plain, E, IS_APART> {
  using Inner = E;
  struct Eight {
    unsigned w[4];
  };
  struct Quads {
    unsigned w[4];
  };

  __device__ static Eight read(const char* row, int eight) {
    uint4 x = *reinterpret_cast<const uint4*>(row + 16 * eight);
    return {{x.x, x.y, x.z, x.w}};
  }

  __device__ static Quads of_one(const Eight& e) { return of_pairs(e.w[0], e.w[1], e.w[2], e.w[3]); }

  __device__ static Quads of_two(const Eight& e, const Eight& f, int half) {
    return half ? of_pairs(e.w[2], e.w[3], f.w[2], f.w[3]) : of_pairs(e.w[0], e.w[1], f.w[0], f.w[1]);
  }

  __device__ static Quads of_pairs(unsigned a, unsigned b, unsigned c, unsigned d) {
    return {{__byte_perm(a, c, 0x5410), __byte_perm(a, c, 0x7632), __byte_perm(b, d, 0x5410),
             __byte_perm(b, d, 0x7632)}};
  }

  __device__ static void unpack(unsigned (&pairs)[4], const Quads& q, const Scales&) {
    for (int i = 0; i < 4; ++i) pairs[i] = q.w[i];
  }
};

}  // namespace etkv
