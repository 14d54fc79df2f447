// The kernels of products with plain weights, of embeddings and of the argmax, for the `Element` of
// `ProductWork`.

extern "C" __global__ void __launch_bounds__(256, 2) etkv_row(const ProductWork work) {
  extern __shared__ uint4 shared_memory[];
  __shared__ float squares[etkv::SHARES];
  __shared__ float2 left[2 * etkv::SHARES];
  etkv::let_next_begin();
  etkv::OneRow<Element> row{rows_of(work)};
  row.run_row(work.out, reinterpret_cast<Element*>(shared_memory), squares, work.team, left);
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
  bool is_held = work.inner <= etkv::MAX_HELD, is_half = work.rows <= 8;
  if (is_held && is_half) Tiled<1, true>{rows_of(work)}.run_tiled(work.out, memory);
  if (is_held && !is_half) Tiled<2, true>{rows_of(work)}.run_tiled(work.out, memory);
  if (!is_held && is_half) Tiled<1, false>{rows_of(work)}.run_tiled(work.out, memory);
  if (!is_held && !is_half) Tiled<2, false>{rows_of(work)}.run_tiled(work.out, memory);
}

extern "C" __global__ void __launch_bounds__(etkv::EMBED_THREADS) etkv_embed(
    Element* out, const Element* table, const Element* scale, const etkv::Step* step, int vocabulary, int inner) {
  etkv::let_next_begin();
  etkv::wait_for_previous();
  etkv::embed(out, table, scale, step, vocabulary, inner);
}

extern "C" __global__ void __launch_bounds__(etkv::CHOOSE_THREADS) etkv_choose(
    int* out, const Element* logits, int vocabulary) {
  __shared__ etkv::Choice choices[etkv::CHOOSE_THREADS];
  etkv::let_next_begin();
  etkv::wait_for_previous();
  etkv::choose(out, logits, vocabulary, choices);
}
