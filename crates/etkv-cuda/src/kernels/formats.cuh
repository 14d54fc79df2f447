// The storage formats of keys and values, as types.

namespace etkv {

// Elements that are not packed.
struct Plain {
  static constexpr int BITS = 16;
};

// Unsigned integers, with a float16 scale and offset for each group.
template <int CODE_BITS, int ELEMENTS>
struct Affine {
  static constexpr int BITS = CODE_BITS, GROUP = ELEMENTS, SCALE_BYTES = 2;
  static constexpr bool HAS_OFFSETS = true;
};

// E4M3 elements (`Mxfp8`) or E2M1 elements (`Mxfp4`), with an E8M0 scale for every 32.
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

// Integers from -8 to 7, stored with 8 added (`RowInt4`), or E2M1 elements (`RowFp4`), with a float16 scale
// for each row.
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

// The number of elements that share a scale, in rows of `dim` elements.
template <typename F>
__device__ constexpr int group_of(int dim) {
  return F::GROUP ? F::GROUP : dim;
}

// Converts an E4M3 code that is not negative.
__device__ inline float from_e4m3(unsigned code) {
  // The bias of the exponent is 7 in E4M3 and 127 in float32.
  return __uint_as_float((code & 0x7f) << 20) * __uint_as_float((127u + 120u) << 23);
}

// The planes of a pool, with the same layout on the host. Each head has `capacity` rows. In a plain pool,
// `codes` has the rows.
struct Planes {
  void* codes;
  void* scales;
  unsigned short* offsets;
  long long capacity;
};
static_assert(sizeof(Planes) == 32, "the host has the same layout");

}  // namespace etkv
