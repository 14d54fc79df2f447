// The formats of keys and values as types: what codes a row has, and what shares a scale.

namespace etkv {

// Elements as they are.
struct Plain {
  static constexpr int BITS = 16;
};

// Integers with a float16 scale and offset for each group.
template <int CODE_BITS, int ELEMENTS>
struct Affine {
  static constexpr int BITS = CODE_BITS, GROUP = ELEMENTS, SCALE_BYTES = 2;
  static constexpr bool HAS_OFFSETS = true;
};

// E4M3 or E2M1 elements, with an E8M0 scale for every 32.
struct Mxfp8 {
  static constexpr int BITS = 8, GROUP = 32, SCALE_BYTES = 1;
  static constexpr bool HAS_OFFSETS = false;
};
struct Mxfp4 {
  static constexpr int BITS = 4, GROUP = 32, SCALE_BYTES = 1;
  static constexpr bool HAS_OFFSETS = false;
};

// E2M1 elements, with an E4M3 scale for every 16.
struct Nvfp4 {
  static constexpr int BITS = 4, GROUP = 16, SCALE_BYTES = 1;
  static constexpr bool HAS_OFFSETS = false;
};

// Integers from -8 to 7 with 8 added, or E2M1 elements, with a float16 scale for the row.
struct RowInt4 {
  static constexpr int BITS = 4, GROUP = 0, SCALE_BYTES = 2;
  static constexpr bool HAS_OFFSETS = false;
};
struct RowFp4 {
  static constexpr int BITS = 4, GROUP = 0, SCALE_BYTES = 2;
  static constexpr bool HAS_OFFSETS = false;
};

template <typename F>
inline constexpr bool is_plain = cuda::std::is_same_v<F, Plain>;
template <typename F>
inline constexpr bool is_e2m1 =
    cuda::std::is_same_v<F, Mxfp4> || cuda::std::is_same_v<F, Nvfp4> || cuda::std::is_same_v<F, RowFp4>;
template <typename F>
inline constexpr bool is_row = cuda::std::is_same_v<F, RowInt4> || cuda::std::is_same_v<F, RowFp4>;

// The elements that share a scale, in rows of `dim`.
template <typename F>
__device__ constexpr int group_of(int dim) {
  return F::GROUP ? F::GROUP : dim;
}

// A code of E4M3 that is not negative.
__device__ inline float from_e4m3(unsigned code) {
  // The exponent's bias is 7, and 127 in float32.
  return __uint_as_float((code & 0x7f) << 20) * __uint_as_float((127u + 120u) << 23);
}

// Where the rows of a pool are, as the host has it: plain rows are `codes`. Each head has `capacity` rows.
struct Planes {
  void* codes;
  void* scales;
  unsigned short* offsets;
  long long capacity;
};
static_assert(sizeof(Planes) == 32, "as the host has it");

}  // namespace etkv
