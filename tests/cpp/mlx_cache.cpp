// A host that computes with MLX itself. Results are compared with rows that the
// test keeps.
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <mlx/mlx.h>

#include "check.h"
#include "etkv/etkv.hpp"
#include "etkv/executorch_mlx_cache.hpp"
#include "etkv/mlx_cache.hpp"

namespace mx = mlx::core;

namespace {

constexpr int kLayers = 2, kHeads = 4, kKvHeads = 2, kDim = 64;
constexpr float kScale = 0.125f;

etkv::CacheConfig config(const std::string& format, int32_t window = 0) {
  etkv::CacheConfig config;
  etkv::LayerConfig layer;
  layer.n_kv_heads = kKvHeads;
  layer.k_head_dim = kDim;
  config.layers.assign(kLayers, layer);
  config.layers[1].window = window;
  config.capacity = 64;
  config.k_format = config.v_format = format;
  return config;
}

template <typename T>
T must(etkv::Result<T> result) {
  if (!result.ok()) {
    printf("%s\n", result.error().message().c_str());
  }
  REQUIRE(result.ok());
  return std::move(result.value());
}

etkv::Cache new_cache(const std::string& format = "f32", int32_t window = 0) {
  return must(
      etkv::make_cache<etkv::Cache>(
          "MLXBackend", "contiguous", config(format, window)));
}

mx::array random_rows(int heads, int n) {
  return mx::random::normal({1, heads, n, kDim});
}

double distance(const mx::array& a, const mx::array& b) {
  return mx::max(mx::abs(mx::subtract(a, b))).item<float>();
}

std::vector<int32_t> positions(int32_t first, int32_t n) {
  std::vector<int32_t> positions(n);
  std::iota(positions.begin(), positions.end(), first);
  return positions;
}

// Rows of each layer, for comparison.
struct ReferenceRows {
  std::vector<mx::array> k = {}, v = {};

  void
  append(std::size_t layer, const mx::array& k_new, const mx::array& v_new) {
    if (k.size() == layer) {
      k.push_back(k_new);
      v.push_back(v_new);
    } else {
      k[layer] = mx::concatenate({k[layer], k_new}, 2);
      v[layer] = mx::concatenate({v[layer], v_new}, 2);
    }
  }
};

mx::array
attention(const mx::array& q, const mx::array& k, const mx::array& v) {
  return mx::fast::scaled_dot_product_attention(q, k, v, kScale, "causal");
}

// Steps of several sizes, on streams of the host and of the library.
void rows_come_back() {
  for (const char* kind : {"contiguous", "seq", "tree"}) {
    auto cache =
        must(etkv::make_cache<etkv::Cache>("MLXBackend", kind, config("f32")));
    auto forwards = must(etkv::MLXForwards::make(cache));
    const std::vector<mx::StreamOrDevice> streams = {
        {}, mx::default_device(), mx::new_stream(mx::default_device())};
    ReferenceRows kept;
    int32_t length = 0;
    for (int32_t n : {5, 1, 1, 7, 1}) {
      for (std::size_t layer = 0; layer < kLayers; ++layer) {
        const auto k = random_rows(kKvHeads, n), v = random_rows(kKvHeads, n);
        kept.append(layer, k, v);
        const auto spec = must(forwards.update_and_fetch(
            layer, positions(length, n), k, v, streams[length % 3]));
        CHECK(distance(spec.k, kept.k[layer]) == 0.0);
        CHECK(distance(spec.v, kept.v[layer]) == 0.0);
        CHECK((spec.kind == etkv::AttendSpec::Mask::Causal) == (n > 1));
        CHECK(!spec.mask);
      }
      length += n;
      CHECK_INT(*cache.length(), length);
    }
  }
}

void attention_is_over_what_is_stored() {
  const std::pair<const char*, double> formats[] = {
      {"f32", 1e-5}, {"f16", 1e-2}, {"affine8g64", 5e-2}, {"row-int4", 1.0}};
  for (const auto& [format, bound] : formats) {
    auto cache = new_cache(format);
    auto forwards = must(etkv::MLXForwards::make(cache));
    ReferenceRows kept;
    int32_t length = 0;
    double worst = 0;
    for (int32_t n : {6, 1, 3}) {
      for (std::size_t layer = 0; layer < kLayers; ++layer) {
        const auto k = random_rows(kKvHeads, n), v = random_rows(kKvHeads, n);
        const auto q = random_rows(kHeads, n);
        kept.append(layer, k, v);
        const auto out = must(forwards.update_and_attend(
            layer, positions(length, n), q, k, v, kScale));
        const auto expected = attention(q, kept.k[layer], kept.v[layer]);
        CHECK(out.shape() == expected.shape() && out.dtype() == q.dtype());
        worst = std::max(worst, distance(out, expected));
      }
      length += n;
    }
    printf("%s: off by %g\n", format, worst);
    CHECK(worst < bound);
    CHECK(worst > 0.0 || std::string(format) == "f32");
  }
}

void a_window_comes_with_its_mask() {
  auto cache = new_cache("f32", 3);
  auto forwards = must(etkv::MLXForwards::make(cache));
  const auto rows = random_rows(kKvHeads, 6);
  must(forwards.update_and_fetch(0, positions(0, 6), rows, rows));
  const auto spec =
      must(forwards.update_and_fetch(1, positions(0, 6), rows, rows));
  REQUIRE(spec.kind == etkv::AttendSpec::Mask::Explicit && spec.mask);
  const auto at = mx::arange(6);
  const auto back =
      mx::subtract(mx::expand_dims(at, 1), mx::expand_dims(at, 0));
  const auto seen = mx::logical_and(
      mx::greater_equal(back, mx::array(0)), mx::less(back, mx::array(3)));
  auto same = mx::array_equal(mx::reshape(*spec.mask, {6, 6}), seen);
  CHECK(same.item<bool>());
}

void what_cannot_be_is_refused() {
  auto cache = new_cache();
  auto forwards = must(etkv::MLXForwards::make(cache));
  const auto rows = random_rows(kKvHeads, 2);
  const auto says = [&](std::size_t layer,
                        std::vector<int32_t> at,
                        const mx::array& k,
                        etkv_status status,
                        const char* words) {
    const auto result = forwards.update_and_fetch(layer, at, k, rows);
    REQUIRE(!result.ok());
    CHECK_INT(result.error().status(), status);
    CHECK_HAS(result.error().message().c_str(), words);
    CHECK_INT(*cache.length(), 0);
  };
  says(2, {0, 1}, rows, ETKV_ERROR_SHAPE, "got 2");
  says(0, {1, 2}, rows, ETKV_ERROR_POSITION, "1");
  says(0, {}, rows, ETKV_ERROR_INVALID_ARGUMENT, "");
  says(0, {0, 1, 2}, rows, ETKV_ERROR_SHAPE, "3");
  says(0, {0, 1}, mx::array(1.0f), ETKV_ERROR_SHAPE, "[]");
  says(0, {0, 1}, mx::astype(rows, mx::int32), ETKV_ERROR_DTYPE, "Int32");
  const auto q = random_rows(3, 2);
  const auto odd = forwards.update_and_attend(0, {0, 1}, q, rows, rows, kScale);
  REQUIRE(!odd.ok());
  CHECK_INT(odd.error().status(), ETKV_ERROR_SHAPE);
  const auto endless = forwards.update_and_attend(
      0, {0, 1}, random_rows(kHeads, 2), rows, rows, std::nanf(""));
  CHECK(!endless.ok());

  // A refused or aborted forward is rolled back.
  must(forwards.update_and_fetch(0, {0, 1}, rows, rows));
  CHECK(!cache.rewind(0).ok());
  CHECK(forwards.abort().ok());
  CHECK(cache.rewind(0).ok());

  // abi_table.c tests other invalid arguments.
  etkv_mlx_rows raw{};
  raw.struct_size = sizeof(raw);
  const int32_t zero = 0;
  raw.positions = &zero;
  raw.n_positions = 1;
  mx::array out(0.0f);
  etkv_mask kind = 7;
  etkv_forwards* bare = nullptr;
  REQUIRE(etkv_forwards_new(cache.raw(), &bare, nullptr) == ETKV_OK);
  // Without rows.
  CHECK_INT(
      etkv_forwards_update_and_fetch(
          bare, &raw, &out, &out, &kind, &out, nullptr),
      ETKV_ERROR_INVALID_ARGUMENT);
  CHECK_INT(kind, 7);
  etkv_forwards_free(bare);
  CHECK_INT(*cache.length(), 0);
}

// Rows that are not evaluated yet stay valid after an aborted forward.
void lazy_forwards_stay() {
  auto cache = new_cache();
  auto forwards = must(etkv::MLXForwards::make(cache));
  const auto rows = random_rows(kKvHeads, 3);
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    must(forwards.update_and_fetch(layer, {0, 1, 2}, rows, rows));
  }
  const auto one = random_rows(kKvHeads, 1);
  must(forwards.update_and_fetch(0, {3}, one, one));
  CHECK(forwards.abort().ok());
  CHECK(!forwards.update_and_fetch(0, {5}, one, one).ok());
  const auto spec = must(forwards.update_and_fetch(0, {3}, one, one));
  CHECK(distance(spec.k, mx::concatenate({rows, one}, 2)) == 0.0);
  // Any refusal ends the forward.
  const auto wrong = mx::astype(random_rows(kHeads, 1), mx::int32);
  const auto odd = forwards.update_and_attend(1, {3}, wrong, one, one, kScale);
  REQUIRE(!odd.ok());
  CHECK_INT(odd.error().status(), ETKV_ERROR_DTYPE);
}

// Calls the adapter as ExecuTorch's backend does.
void inside_executorch() {
  auto cache = new_cache();
  etkv::ExecuTorchMLXCache in_tree(cache);
  executorch::backends::mlx::MLXCache& backend = in_tree;
  auto* control = in_tree.as_control();
  REQUIRE(control != nullptr);
  CHECK(in_tree.as_planner() == nullptr);
  CHECK_INT(control->capacity(), 64);
  const auto rows = random_rows(kKvHeads, 4);
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto spec = backend.update_and_fetch(layer, 0, rows, rows, {});
    CHECK(distance(spec.K, rows) == 0.0 && distance(spec.V, rows) == 0.0);
    CHECK(spec.kind == executorch::backends::mlx::AttendSpec::Mask::Causal);
  }
  CHECK(control->can_extend(60) && !control->can_extend(61));
  CHECK(!control->rewind(5) && control->rewind(2));
  bool refused = false;
  try {
    backend.update_and_fetch(0, 4, rows, rows, {});
  } catch (const std::runtime_error& error) {
    refused = std::string(error.what()).find("4") != std::string::npos;
  }
  CHECK(refused);
  control->clear();
  CHECK_INT(*cache.length(), 0);
}

// The adapter is an owner of the cache.
void the_adapter_outlives_the_session() {
  auto session = std::make_unique<etkv::CacheSession<etkv::Cache>>(
      must(etkv::make_decode_session("MLXBackend", config("f32"))));
  etkv::ExecuTorchMLXCache in_tree(session->cache());
  session.reset();
  CHECK(in_tree.can_extend(64) && !in_tree.can_extend(65));
  const auto rows = random_rows(kKvHeads, 2);
  for (int layer = 0; layer < kLayers; ++layer) {
    in_tree.update_and_fetch(layer, 0, rows, rows, {});
  }
  CHECK(in_tree.rewind(1));

  auto cache = new_cache();
  auto other = cache.share();
  auto forwards = must(etkv::MLXForwards::make(cache));
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    must(forwards.update_and_fetch(layer, {0, 1}, rows, rows));
  }
  CHECK_INT(*other.length(), 2);
  // Assignment to an object frees its old handle.
  const size_t live = etkv_live_handles();
  other = std::move(cache);
  CHECK_INT(etkv_live_handles(), live - 1);
}

} // namespace

int main() {
  rows_come_back();
  attention_is_over_what_is_stored();
  a_window_comes_with_its_mask();
  what_cannot_be_is_refused();
  lazy_forwards_stay();
  inside_executorch();
  the_adapter_outlives_the_session();
  return check_report();
}
