// The kernels of products of many rows, for the `Element` of `ProductWork`.

// As the host has it.
struct ManyWork {
  ProductWork product;
  float4* sums;
  int* counts;
  int splits, unused;
};
static_assert(sizeof(ManyWork) == 168, "as the host has it");

extern "C" __global__ void __launch_bounds__(etkv::MANY_THREADS, 1) etkv_many(const ManyWork work) {
  extern __shared__ uint4 shared_memory[];
  etkv::let_next_begin();
  Element* memory = reinterpret_cast<Element*>(shared_memory);
  etkv::FewRows<Element> rows = rows_of(work.product);
  etkv::Shared shared{work.sums, work.counts, work.splits};
  if (work.product.rows <= 32) {
    etkv::ManyRows<Element, 2>{rows, shared}.run_many(work.product.out, memory);
  } else {
    etkv::ManyRows<Element, 4>{rows, shared}.run_many(work.product.out, memory);
  }
}

// Writes the rows of a product, normalized, to `out`.
extern "C" __global__ void __launch_bounds__(256) etkv_normalize(const ProductWork work, Element* out) {
  __shared__ float squares[8];
  etkv::let_next_begin();
  etkv::wait_for_previous();
  etkv::normalize(rows_of(work), out, squares);
}
