// Packs rows. The codes have the same bits as those of the caches' codecs on MLX arrays, and of MLX's
// `affine_quantize` on CUDA. All computation is in float32. A warp packs a row, and a thread eight elements
// of it, so that each thread writes whole bytes.

namespace etkv {

constexpr float F16_MAX = 65504.0f;

__device__ inline float clipped(float x, float most) { return fminf(fmaxf(x, -most), most); }

__device__ inline unsigned short half_bits(float x) {
  __half half(x);
  return half.bits;
}

// Combines the numbers of the `threads` threads that share a group. `threads` is a power of two.
template <typename Combine>
__device__ inline float over_group(float x, int threads, const Combine& combine) {
  for (int step = 1; step < threads; step *= 2) x = combine(x, __shfl_xor_sync(ALL, x, step));
  return x;
}

__device__ inline float peak_of(const float (&x)[8], int threads) {
  float peak = 0;
  for (int i = 0; i < 8; ++i) peak = fmaxf(peak, fabsf(x[i]));
  return over_group(peak, threads, [](float a, float b) { return fmaxf(a, b); });
}

// Returns the nearest E2M1 code, ties to even. E2M1 has three ranges with different step sizes, and the code
// for the right range is the smallest of the three.
__device__ inline unsigned to_e2m1(float x) {
  float size = fabsf(x);
  float by_half = rintf(size * 2.0f), by_one = rintf(size) + 2.0f, by_two = rintf(size * 0.5f) + 4.0f;
  unsigned code = static_cast<unsigned>(fminf(fminf(by_half, by_one), fminf(by_two, 7.0f)));
  return code | (x < 0 ? 8u : 0u);
}

// Returns the nearest E4M3 code, ties to even. Larger numbers become 448.
__device__ inline unsigned to_e4m3(float x) {
  unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  if (size >= 0x43e00000u) return sign | 0x7e;
  // E4M3 numbers below 2^-6 are multiples of 2^-9, and so are float32 numbers from 2^14 on.
  if (size < 121u << 23) return sign | ((__float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000u) & 0xff);
  return sign | (((size - (120u << 23)) + 0x0007ffffu + (size >> 20 & 1)) >> 20 & 0xff);
}

// Returns the code of the smallest power of two by which `peak` must be divided to be at most 1.75 * 2^top.
// Sets `inverse` to the inverse of that power.
__device__ inline unsigned e8m0(float peak, unsigned top, float& inverse) {
  unsigned exponent = (__float_as_uint(peak) + 0x001fffffu) >> 23;
  unsigned code = min(max(exponent, top) - top, 254u - top);
  inverse = __uint_as_float((254u - code) << 23);
  return code;
}

// Writes eight codes to a row, from element 8 * `place` on.
template <int BITS>
__device__ inline void write_codes(void* row, int place, const unsigned (&codes)[8]) {
  unsigned char* to = static_cast<unsigned char*>(row) + place * BITS;
  unsigned long long word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) word |= static_cast<unsigned long long>(codes[i]) << BITS * i;
  if constexpr (BITS == 8) {
    *reinterpret_cast<unsigned long long*>(to) = word;
  } else if constexpr (BITS == 4) {
    *reinterpret_cast<unsigned*>(to) = static_cast<unsigned>(word);
  } else {
#pragma unroll
    for (int i = 0; i < BITS; ++i) to[i] = static_cast<unsigned char>(word >> 8 * i);
  }
}

// Computes the same as MLX's kernel: the maximum is at least 0, and ties are rounded away from zero. `x` must
// be within the range of float16.
template <int BITS>
__device__ inline void fit_affine(const float (&x)[8], int threads, unsigned (&codes)[8], float& scale, float& offset) {
  constexpr float TOP = (1 << BITS) - 1;
  float least = x[0], most = 0;
  for (int i = 0; i < 8; ++i) {
    least = fminf(least, x[i]);
    most = fmaxf(most, x[i]);
  }
  least = over_group(least, threads, [](float a, float b) { return fminf(a, b); });
  most = over_group(most, threads, [](float a, float b) { return fmaxf(a, b); });
  bool reaches_down = fabsf(least) > fabsf(most);
  float step = fmaxf((most - least) / TOP, 1e-7f);
  step = reaches_down ? step : -step;
  float edge = reaches_down ? least : most, to_edge = roundf(edge / step);
  bool is_none = to_edge == 0.0f;
  scale = is_none ? step : edge / to_edge;
  offset = is_none ? 0.0f : edge;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    codes[i] = static_cast<unsigned>(fmaxf(fminf(roundf((x[i] - offset) / scale), TOP), 0.0f));
  }
}

// Packs a row of `dim` elements, of which this thread has eight, to row `at` of the planes. All threads of
// the warp must call this. Those without elements pass zeros.
template <typename F>
__device__ inline void encode(float (&x)[8], int thread, int dim, const Planes& planes, long long at) {
  constexpr int BITS = F::BITS;
  int group = group_of<F>(dim), threads = F::GROUP ? F::GROUP / 8 : 32;
  bool exists = 8 * thread < dim, is_first = exists && 8 * thread % group == 0;
  unsigned codes[8];
  long long at_scale = at * (dim / group) + 8 * thread / group;
  if constexpr (F::HAS_OFFSETS) {
    float scale, offset;
    for (int i = 0; i < 8; ++i) x[i] = clipped(x[i], F16_MAX);
    fit_affine<BITS>(x, threads, codes, scale, offset);
    if (is_first) {
      static_cast<unsigned short*>(planes.scales)[at_scale] = half_bits(scale);
      planes.offsets[at_scale] = half_bits(offset);
    }
  } else if constexpr (is_row<F>) {
    constexpr bool IS_INTEGER = cuda::std::is_same_v<F, RowInt4>;
    // Codes are computed with the scale after its rounding to float16.
    __half stored(fminf(peak_of(x, threads) / (IS_INTEGER ? 7.0f : 6.0f), F16_MAX));
    float scale = static_cast<float>(stored), by = scale == 0.0f ? 1.0f : scale;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float steps = x[i] / by;
      codes[i] = IS_INTEGER ? static_cast<unsigned>(fminf(fmaxf(rintf(steps), -8.0f), 7.0f) + 8.0f) : to_e2m1(steps);
    }
    if (is_first) static_cast<unsigned short*>(planes.scales)[at_scale] = stored.bits;
  } else {
    constexpr bool IS_E4M3 = cuda::std::is_same_v<F, Mxfp8>;
    float peak = peak_of(x, threads), inverse;
    unsigned code;
    if constexpr (cuda::std::is_same_v<F, Nvfp4>) {
      code = to_e4m3(fminf(peak / 6.0f, 448.0f));
      // All elements of a block with scale 0 become 0.
      inverse = code == 0 ? 0.0f : 1.0f / from_e4m3(code);
    } else {
      code = e8m0(peak, IS_E4M3 ? 8 : 2, inverse);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float steps = x[i] * inverse;
      codes[i] = IS_E4M3 ? to_e4m3(steps) : to_e2m1(steps);
    }
    if (is_first) static_cast<unsigned char*>(planes.scales)[at_scale] = static_cast<unsigned char>(code);
  }
  if (exists) write_codes<BITS>(static_cast<char*>(planes.codes) + at * (dim / 8 * BITS), thread, codes);
}

}  // namespace etkv
