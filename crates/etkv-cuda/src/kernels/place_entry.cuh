// The kernel that places heads. `Element` and the formats of keys and values must be defined before.

using Keys = ETKV_KEYS;
using Values = ETKV_VALUES;

// The layout is the same on the host. `periods` is null if nothing rotates. `q_normalizes` and `k_normalizes`
// are 0 without a norm, and 2 for a norm with a float32 weight.
struct PlaceWork {
  const Element* x;
  const void* q_norm;
  const void* k_norm;
  const float* periods;
  Element* out;
  const etkv::Step* step;
  etkv::Planes keys, values;
  float q_eps, k_eps;
  int q_normalizes, k_normalizes, queries, each, dim, rotated;
};
static_assert(sizeof(PlaceWork) == 144, "the host has the same layout");

// There is a block for each KV head and each token.
extern "C" __global__ void __launch_bounds__(32 * etkv::MAX_PLACE_WARPS) etkv_place(const PlaceWork work) {
  __shared__ int is_hidden;
  etkv::let_next_begin();
  int head = blockIdx.x, t = blockIdx.y, group = work.queries / work.each, dim = work.dim;
  int thread = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int slot = work.step->slots[t], position = work.step->positions[t];
  const Element* from = work.x + static_cast<long long>(t) * (work.queries + 2 * work.each) * dim;
  Element* out = work.out + (static_cast<long long>(t) * work.queries + head * group) * dim;
  if (threadIdx.x == 0) is_hidden = 0;
  __syncthreads();
  etkv::wait_for_previous();
  // The key and the value come first, because they take longest.
  for (int i = warp; i < group + 2; i += warps) {
    bool is_key = i == 0, is_value = i == 1;
    int number = is_key ? work.queries + head : is_value ? work.queries + work.each + head : head * group + i - 2;
    etkv::Row<Element> row;
    row.thread = thread;
    row.dim = dim;
    row.read(from + number * dim);
    if (is_key && work.k_normalizes) row.normalize({work.k_norm, work.k_eps, work.k_normalizes == 2});
    if (i > 1 && work.q_normalizes) row.normalize({work.q_norm, work.q_eps, work.q_normalizes == 2});
    if (!is_value && work.periods) row.rotate_row(position, work.periods, work.rotated);
    if (!row.is_finite()) is_hidden = 1;
    if (i > 1) {
      row.write(out + (i - 2) * dim);
      continue;
    }
    // Padding tokens have no slot.
    if (slot < 0) continue;
    long long at = head * (is_key ? work.keys : work.values).capacity + slot;
    if (is_key) row.store<Keys>(work.keys, at);
    if (is_value) row.store<Values>(work.values, at);
  }
  __syncthreads();
  if (!is_hidden) return;
  // Codes cannot represent NaN. Queries that are NaN make the logits of the token NaN.
  for (int i = threadIdx.x; i < group * dim; i += blockDim.x) out[i] = Element(__int_as_float(0x7fffffff));
}
