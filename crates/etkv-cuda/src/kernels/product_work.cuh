// The argument of a product. `Element` must be defined before.

// The layout is the same on the host.
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
  int normalizes, gate, rows, outputs, inner, head_dim, rotated, queries, each, most_shared, team;
};
static_assert(sizeof(ProductWork) == 144, "the host has the same layout");

__device__ inline etkv::FewRows<Element> rows_of(const ProductWork& work) {
  return {
      work.x, work.inner, 1, work.w, work.bias, 1, work.normalizes != 0, work.eps, work.norm, 1,
      work.plus, work.outputs, 1, work.gate, work.rows, work.outputs, work.inner, work.head_dim,
      work.rotated, work.step->positions, 1, work.periods, 1,
      {work.keys, work.values, work.keys_head, work.values_head, work.step->slots, work.queries, work.each},
      work.most_shared};
}
