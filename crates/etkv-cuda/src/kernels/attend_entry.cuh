// Attention over pools, for an `Element`, a `DIM` and `STAGES` that are defined before.

// As the host has it.
struct AttendWork {
  const Element* q;
  const Element* keys;
  const Element* values;
  Element* out;
  const etkv::Step* step;
  float* partial;
  unsigned* counts;
  long long keys_head, values_head;
  float scale;
  int tokens, queries, each;
};
static_assert(sizeof(AttendWork) == 88, "as the host has it");

extern "C" __global__ void __launch_bounds__(etkv::THREADS) etkv_attend(const AttendWork work) {
  extern __shared__ uint4 shared_memory[];
  etkv::let_next_begin();
  etkv::wait_for_previous();
  etkv::Attention<Element, DIM, DIM, etkv::SEES_UP_TO_ITSELF, STAGES, 4> attention;
  attention.q = {work.q, DIM, static_cast<long long>(work.queries) * DIM, 1};
  attention.k = {work.keys, work.keys_head, DIM, 1};
  attention.v = {work.values, work.values_head, DIM, 1};
  attention.sizes = {work.queries / work.each, work.tokens, work.step->keys};
  attention.scale = work.scale * etkv::LOG2_E;
  attention.shared = reinterpret_cast<char*>(shared_memory);
  attention.run(work.out, work.partial, work.counts);
}
