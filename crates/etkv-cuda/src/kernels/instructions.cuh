// GPU instructions for which C++ has no syntax. The other files contain no such instructions, so
// they also run in a C++ program that defines functions with these names.

namespace etkv {

template <typename E>
inline constexpr bool is_half = sizeof(E) == 2;

// Copies 16 bytes to shared memory without waiting; writes zeros if `exists` is false.
__device__ inline void copy_later(void* to, const void* from, bool exists) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}

// Copies `N` bytes (4, 8 or 16) to shared memory without waiting. The bytes from `bytes` on become zeros.
template <int N>
__device__ inline void copy_bytes_later(void* to, const void* from, int bytes) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (N == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(N), "r"(bytes)
                 : "memory");
  }
}

__device__ inline void end_of_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits for all groups of this thread's copies except the last `N`.
template <int N>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Reads four matrices of 8x8 half-precision elements. Thread `i` passes the address of row `i % 8` of matrix
// `i / 8`. It gets elements 2 * (i % 4) and 2 * (i % 4) + 1 of row `i / 4` of each matrix.
__device__ inline void read_matrices(unsigned (&to)[4], const void* row) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

// The same, but transposes each matrix.
__device__ inline void read_transposed(unsigned (&to)[4], const void* row) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

// Transposes a matrix of 8x8 half-precision elements. Before and after, thread `i` has elements 2 * (i % 4)
// and 2 * (i % 4) + 1 of row `i / 4`.
__device__ inline unsigned transposed(unsigned pair) {
  unsigned to;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(pair));
  return to;
}

// Reads 16 bytes that no other block reads, so they are not cached.
__device__ inline uint4 read_once(const void* at) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(at));
  return x;
}

// Reads 16 bytes that the previous kernel may have written. If kernels overlap, this must not be a
// read of constant memory: the compiler may move such a read, and the cache of constant memory may
// be stale.
__device__ inline uint4 read_rows(const void* at) {
#ifdef ETKV_OVERLAPS
  return *reinterpret_cast<const uint4*>(at);
#else
  return __ldg(reinterpret_cast<const uint4*>(at));
#endif
}

// Reads four floats that other blocks have written.
__device__ inline float4 read_four(const float* at) { return __ldcg(reinterpret_cast<const float4*>(at)); }

__device__ inline float2 read_two(const float* at) { return __ldcg(reinterpret_cast<const float2*>(at)); }

// Lets the next kernel begin when all blocks have called this.
__device__ inline void let_next_begin() {
#ifdef ETKV_OVERLAPS
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the end of the previous kernel, which has waited for the one before it. Until then, a kernel must
// not write, or read what another kernel writes.
__device__ inline void wait_for_previous() {
#ifdef ETKV_OVERLAPS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Waits for the other threads of a team of this block. A team has `threads` threads, and a block at most 15
// teams.
__device__ inline void wait_for_team(int team, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
}

// Adds the product of a 16x16 matrix and a 16x8 matrix to a 16x8 matrix in float32.
template <typename E>
__device__ inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (cuda::std::is_same_v<E, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Returns `(x & mask) | bits`.
__device__ inline unsigned masked_with(unsigned x, unsigned mask, unsigned bits) {
  unsigned d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(x), "r"(mask), "r"(bits));
  return d;
}

// Returns `a * b + c` for each element of pairs, rounded once.
template <typename E>
__device__ inline unsigned multiply_add_pairs(unsigned a, unsigned b, unsigned c) {
  unsigned d;
  if constexpr (cuda::std::is_same_v<E, __half>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

// Returns 2 to the power of x, or 0 if the result would be subnormal.
__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounds two numbers to a pair.
template <typename E>
__device__ inline unsigned rounded_pair(float low, float high) {
  unsigned d;
  if constexpr (cuda::std::is_same_v<E, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  }
  return d;
}

// Rounds two numbers to a pair of float16. Numbers out of range become the largest finite number, and NaN
// stays NaN.
__device__ inline unsigned limited_pair(float low, float high) {
  unsigned d;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

}  // namespace etkv
