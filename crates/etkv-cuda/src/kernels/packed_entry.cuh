// The kernels that read packed weights. `Element` and `BITS` must be defined before.

// The layout is the same on the host. The weight in `product` has the codes.
struct PackedWork {
  ProductWork product;
  const Element* scales;
  const Element* biases;
  int group_shift, unused;
};
static_assert(sizeof(PackedWork) == 168, "the host has the same layout");

extern "C" __global__ void __launch_bounds__(256, 2) etkv_packed(const PackedWork work) {
  extern __shared__ uint4 shared_memory[];
  __shared__ float sums[etkv::SUMS], squares[etkv::SQUARES];
  etkv::let_next_begin();
  etkv::PackedRows<Element, BITS> rows{{rows_of(work.product)}, work.scales, work.biases, work.group_shift};
  rows.run_packed(work.product.out, reinterpret_cast<Element*>(shared_memory), sums, squares);
}

extern "C" __global__ void __launch_bounds__(etkv::EMBED_THREADS)
    etkv_embed_packed(Element* out, const unsigned* codes, const Element* scales, const Element* biases,
                      const Element* by, const etkv::Step* step, int group_shift, int vocabulary, int inner) {
  etkv::let_next_begin();
  etkv::wait_for_previous();
  etkv::embed_packed<Element, BITS>(out, codes, scales, biases, group_shift, by, step, vocabulary, inner);
}
