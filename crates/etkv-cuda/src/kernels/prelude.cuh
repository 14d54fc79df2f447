// The parts of CUDA's headers that the other files use. With them, the files compile without CUDA's headers.

#define INFINITY (__int_as_float(0x7f800000))

namespace cuda {
namespace std {

template <typename A, typename B>
inline constexpr bool is_same_v = false;
template <typename A>
inline constexpr bool is_same_v<A, A> = true;

}  // namespace std
}  // namespace cuda

struct __half {
  unsigned short bits;

  __half() = default;
  __device__ explicit __half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

struct __nv_bfloat16 {
  unsigned short bits;

  __nv_bfloat16() = default;
  __device__ explicit __nv_bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};
