// The kernels of a step but attention, for an `Element` that is defined before.

// As the host has it.
struct ProductWork {
  const Element* x;
  const Element* w;
  const Element* bias;
  const Element* norm;
  const Element* plus;
  Element* out;
  const float* periods;
  Element* keys;
  Element* values;
  const etkv::Step* step;
  long long keys_head, values_head;
  float eps;
  int normalizes, gate, rows, outputs, inner, head_dim, turned, queries, each, most_shared;
};
static_assert(sizeof(ProductWork) == 144, "as the host has it");

__device__ inline etkv::FewRows<Element> rows_of(const ProductWork& work) {
  return {
      work.x, work.inner, 1, work.w, work.bias, 1, work.normalizes != 0, work.eps, work.norm, 1,
      work.plus, work.outputs, 1, work.gate, work.rows, work.outputs, work.inner, work.head_dim,
      work.turned, work.step->positions, 1, work.periods, 1,
      {work.keys, work.values, work.keys_head, work.values_head, work.step->slots, work.queries, work.each},
      work.most_shared};
}

extern "C" __global__ void __launch_bounds__(256, 2) etkv_row(const ProductWork work) {
  extern __shared__ uint4 shared_memory[];
  __shared__ float squares[etkv::SHARES];
  etkv::let_next_begin();
  etkv::OneRow<Element> row{rows_of(work)};
  row.run_row(work.out, reinterpret_cast<Element*>(shared_memory), squares);
}

extern "C" __global__ void __launch_bounds__(256, 2) etkv_product(const ProductWork work) {
  extern __shared__ uint4 shared_memory[];
  __shared__ float sums[etkv::SUMS], squares[etkv::SQUARES];
  etkv::let_next_begin();
  etkv::FewRows<Element> rows = rows_of(work);
  rows.run(work.out, reinterpret_cast<Element*>(shared_memory), sums, squares);
}

template <int HALVES, bool HELD>
using Tiled = etkv::TiledRows<Element, HALVES, HELD>;

extern "C" __global__ void __launch_bounds__(32 * etkv::TILED_WARPS, 1) etkv_tiled(const ProductWork work) {
  extern __shared__ uint4 shared_memory[];
  etkv::let_next_begin();
  Element* memory = reinterpret_cast<Element*>(shared_memory);
  bool is_held = work.inner <= etkv::MOST_HELD, is_half = work.rows <= 8;
  if (is_held && is_half) Tiled<1, true>{rows_of(work)}.run_tiled(work.out, memory);
  if (is_held && !is_half) Tiled<2, true>{rows_of(work)}.run_tiled(work.out, memory);
  if (!is_held && is_half) Tiled<1, false>{rows_of(work)}.run_tiled(work.out, memory);
  if (!is_held && !is_half) Tiled<2, false>{rows_of(work)}.run_tiled(work.out, memory);
}

extern "C" __global__ void __launch_bounds__(etkv::EMBED_THREADS) etkv_embed(
    Element* out, const Element* table, const etkv::Step* step, int vocabulary, int inner) {
  etkv::let_next_begin();
  etkv::wait_for_previous();
  etkv::embed(out, table, step, vocabulary, inner);
}

extern "C" __global__ void __launch_bounds__(etkv::CHOOSE_THREADS) etkv_choose(
    int* out, const Element* logits, int vocabulary) {
  __shared__ etkv::Choice choices[etkv::CHOOSE_THREADS];
  etkv::let_next_begin();
  etkv::wait_for_previous();
  etkv::choose(out, logits, vocabulary, choices);
}
