// The kernels of products of many rows, for the `Element` of `ProductWork`.

// The layout is the same on the host.
struct ManyWork {
  ProductWork product;
  float4* sums;
  int* counts;
  int splits, unused;
};
static_assert(sizeof(ManyWork) == 168, "the host has the same layout");

// The kinds of outputs. A kernel has the code for one kind only, because the code for all does not fit the
// instruction cache.
enum Kinds { PLAIN, GATED, HEADS };

template <int KIND>
__device__ inline void run_many(const ManyWork& work, void* shared_memory) {
  etkv::let_next_begin();
  Element* memory = static_cast<Element*>(shared_memory);
  etkv::FewRows<Element> rows = rows_of(work.product);
  if (KIND != GATED) rows.gate = etkv::NO_GATE;
  if (KIND != HEADS) rows.head_dim = 0;
  if (KIND == HEADS) rows.plus = nullptr;
  etkv::Shared shared{work.sums, work.counts, work.splits};
  if (work.product.rows <= 32) {
    etkv::ManyRows<Element, 2>{rows, shared}.run_many(work.product.out, memory);
  } else {
    etkv::ManyRows<Element, 4>{rows, shared}.run_many(work.product.out, memory);
  }
}

extern "C" __global__ void __launch_bounds__(etkv::MANY_THREADS, 1) etkv_many(const ManyWork work) {
  extern __shared__ uint4 shared_memory[];
  run_many<PLAIN>(work, shared_memory);
}

extern "C" __global__ void __launch_bounds__(etkv::MANY_THREADS, 1) etkv_many_gated(const ManyWork work) {
  extern __shared__ uint4 shared_memory[];
  run_many<GATED>(work, shared_memory);
}

extern "C" __global__ void __launch_bounds__(etkv::MANY_THREADS, 1) etkv_many_heads(const ManyWork work) {
  extern __shared__ uint4 shared_memory[];
  run_many<HEADS>(work, shared_memory);
}

// Writes the normalized rows of a product to `out`.
extern "C" __global__ void __launch_bounds__(256) etkv_normalize(const ProductWork work, Element* out) {
  __shared__ float squares[8];
  etkv::let_next_begin();
  etkv::wait_for_previous();
  etkv::normalize(rows_of(work), out, squares);
}
