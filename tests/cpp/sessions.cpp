// Sessions, keys and programs: the cache that a program finds, and its
// lifetime.

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "examples/common/clock.hpp"
#include "fixture.hpp"

namespace etkv::tests {
namespace {

CacheConfig small_config(size_t n_layers, int32_t kv_heads, int32_t head_dim) {
  CacheConfig config;
  config.layers.assign(n_layers, LayerConfig{kv_heads, head_dim, head_dim, 0});
  config.capacity = 16;
  config.k_format = "f32";
  config.v_format = "f32";
  return config;
}

void what_a_program_tells() {
  Model model("tiny-llama-f32");
  const auto params = model.params();
  CHECK_INT(params.layers.size(), 2);
  for (const auto& layer : params.layers) {
    CHECK_INT(layer.n_kv_heads, 2);
    CHECK_INT(layer.k_head_dim, 16);
    CHECK_INT(layer.v_head_dim, 16);
    CHECK_INT(layer.window, 0);
  }
  CHECK_INT(params.prefill_chunk_size, kMaxTokens);
  CHECK_INT(params.max_context_length, 2048);

  Module absent("/nowhere/model.pte");
  CHECK_REFUSED(
      read_kv_cache_metadata(absent), ETKV_ERROR_PROGRAM, "cannot open");
  LoadOptions options("cache");
  CHECK_REFUSED(
      load_method(absent, "forward", options), ETKV_ERROR_PROGRAM, "forward");
  CHECK_REFUSED(
      load_method(model.module(), "backward", options),
      ETKV_ERROR_PROGRAM,
      "backward");
}

/// By default ExecuTorch checks only the first bytes of a program. Here the
/// table after them has fields far outside the file.
void damaged_tables() {
  std::string bytes = contents(program_path("tiny-llama-f32"));
  uint32_t root = 0;
  std::memcpy(&root, bytes.data(), sizeof(root));
  REQUIRE(root + 4 < bytes.size());
  std::memset(bytes.data() + root, 0x7f, 4);
  const std::string path =
      std::filesystem::temp_directory_path() / "etkv-damaged-tables.pte";
  std::ofstream(path, std::ios::binary) << bytes;

  Module module(path, Module::LoadMode::Mmap);
  CHECK_REFUSED(
      read_kv_cache_metadata(module), ETKV_ERROR_PROGRAM, "cannot open");
  LoadOptions options("cache");
  CHECK_REFUSED(
      load_method(module, "forward", options), ETKV_ERROR_PROGRAM, "forward");
  CHECK_REFUSED(execute(module, "forward", {}), ETKV_ERROR_PROGRAM, "forward");
  CHECK(!module.is_loaded());
  std::filesystem::remove(path);
}

void faces_in_cpp() {
  Model model("tiny-llama-f32");
  Session session =
      session_for(model, [](CacheConfig& config) { config.capacity = 16; });
  const std::string key = session.key();

  // Moving keeps the key and the cache; the moved-from session is empty.
  Session moved = std::move(session);
  CHECK(key == moved.key());
  CHECK_INT(moved->capacity(), 16);
  CHECK(session.key() == nullptr); // NOLINT: on purpose
  CHECK_INT(session.cache().capacity(), 0);
  CHECK_INT(session.cache().n_layers(), 0);
  CHECK(session.cache().kind().empty());
  // Calls on a moved-from face return errors.
  const auto none = ETKV_ERROR_INVALID_ARGUMENT;
  CHECK_REFUSED(session.cache().can_extend(0), none, "cache is NULL");
  CHECK_REFUSED(session.cache().length(), none, "cache is NULL");
  CHECK_REFUSED(session.cache().formats(), none, "cache is NULL");
  CHECK_REFUSED(session.cache().memory(), none, "cache is NULL");
  CHECK_REFUSED(session.cache().share().length(), none, "cache is NULL");
  CHECK_REFUSED(
      session.cache().rewind(0), ETKV_ERROR_INVALID_ARGUMENT, "cache is NULL");
  session = std::move(moved);
  CHECK(key == session.key());

  CHECK(*session->can_extend() && *session->can_extend(16));
  CHECK(!*session->can_extend(17));
  CHECK_REFUSED(session->can_extend(-1), none, "n is -1");
  CHECK_INT(session.cache().memory()->allocated, 0);

  auto refused = make_decode_session("NoBackend", small_config(1, 1, 1));
  CHECK(!refused);
  CHECK_REFUSED(refused, ETKV_ERROR_KIND, "NoBackend");
  CHECK_REFUSED(
      make_decode_session(backend(), CacheConfig{}),
      ETKV_ERROR_INVALID_ARGUMENT,
      "layer");
}

void unknown_keys() {
  Model model("tiny-llama-f32");
  CHECK_REFUSED(model.load("cache-none"), ETKV_ERROR_NO_CACHE, "cache-none");
  CHECK_REFUSED(model.load(" "), ETKV_ERROR_NO_CACHE, "` `");
  CHECK_REFUSED(
      model.load(std::string(1000, 'k').c_str()), ETKV_ERROR_NO_CACHE, "kkk");

  std::string key;
  {
    const Session gone = session_for(model);
    key = gone.key();
  }
  CHECK_REFUSED(model.load(key.c_str()), ETKV_ERROR_NO_CACHE, "session alive");

  // A program can be loaded after a failed load.
  const Session session = session_for(model);
  must(model.load(session.key()));
  // A loaded program keeps its cache; another key is an error.
  CHECK_REFUSED(
      model.load(session.key()), ETKV_ERROR_INVALID_ARGUMENT, "already loaded");
  model.at(0, text(3));
  CHECK_INT(*session.cache().length(), 3);
}

void unknown_options() {
  Model model("tiny-llama-f32");
  const Session session = session_for(model);
  executorch::runtime::BackendOptions<2> options;
  REQUIRE(
      options.set_option("cache_key", session.key()) ==
      executorch::runtime::Error::Ok);
  REQUIRE(
      options.set_option("logits", "some") == executorch::runtime::Error::Ok);
  executorch::runtime::LoadBackendOptionsMap map;
  REQUIRE(
      map.set_options(kMLXBackend, options.view()) ==
      executorch::runtime::Error::Ok);
  CHECK(
      model.module().load_method("forward", nullptr, nullptr, &map) ==
      executorch::runtime::Error::InvalidArgument);
  etkv_error* error = etkv_delegate_take_error();
  CHECK_INT(etkv_error_status(error), ETKV_ERROR_INVALID_ARGUMENT);
  CHECK_HAS(etkv_error_message(error), "some");
  etkv_error_free(error);
}

void no_key() {
  const auto check = [](Model& model) {
    const auto ran = model.step(text(3), run(0, 3));
    CHECK_REFUSED(ran, ETKV_ERROR_NO_CACHE, "cache_key");
    // Later steps are refused too.
    CHECK_REFUSED(
        model.step(text(1), run(0, 1)), ETKV_ERROR_NO_CACHE, "cache_key");
  };
  // Without an explicit load, Module loads the method at its first run.
  Model by_itself("tiny-llama-f32");
  check(by_itself);
  // Loaded without a key.
  Model without("tiny-llama-f32");
  REQUIRE(
      without.module().load_method("forward") ==
      executorch::runtime::Error::Ok);
  check(without);
  // An empty key counts as no key.
  Model empty("tiny-llama-f32");
  must(empty.load(""));
  check(empty);
}

/// Options that a host sets for its thread instead of passing them.
void options_of_the_thread() {
  using executorch::runtime::Error;
  const auto set = [](const char* key, const char* logits) {
    return detail::run(
        etkv_delegate_set_load_options, key, logits, nullptr, nullptr);
  };
  Model model("tiny-llama-f32");
  const Session session = session_for(model);
  CHECK_REFUSED(set("cache-0", "some"), ETKV_ERROR_INVALID_ARGUMENT, "some");
  CHECK_REFUSED(set("\xff", nullptr), ETKV_ERROR_INVALID_ARGUMENT, "UTF-8");

  must(set(session.key(), "last"));
  // The options do not affect another thread's loads.
  std::thread([] {
    Model other("tiny-llama-f32");
    REQUIRE(other.module().load_method("forward") == Error::Ok);
    CHECK_REFUSED(
        other.step(text(1), run(0, 1)), ETKV_ERROR_NO_CACHE, "cache_key");
  }).join();
  REQUIRE(model.module().load_method("forward") == Error::Ok);
  CHECK_INT(must(model.step(text(3), run(0, 3))).count, 1);
  CHECK_INT(*session.cache().length(), 3);

  // Options that ExecuTorch passes take precedence.
  Model second("tiny-llama-f32");
  const Session own = session_for(second);
  must(second.load(own.key()));
  must(second.step(text(2), run(0, 2)));
  CHECK_INT(*own.cache().length(), 2);
  CHECK_INT(*session.cache().length(), 3);

  must(set("no such key", nullptr));
  Model third("tiny-llama-f32");
  CHECK(third.module().load_method("forward") == Error::NotFound);
  must(set(nullptr, nullptr));
  REQUIRE(third.module().load_method("forward") == Error::Ok);
  CHECK_REFUSED(
      third.step(text(1), run(0, 1)), ETKV_ERROR_NO_CACHE, "cache_key");
}

/// A payload can be checked without its constants.
void a_payload_alone() {
  const auto check = [](const std::vector<uint8_t>& payload) {
    return detail::run(etkv_delegate_check, payload.data(), payload.size());
  };
  CHECK_REFUSED(check({}), ETKV_ERROR_PROGRAM, "0 bytes");
  CHECK_REFUSED(
      check(std::vector<uint8_t>(100)), ETKV_ERROR_PROGRAM, "not MLX0");
  CHECK_REFUSED(
      detail::run(etkv_delegate_check, nullptr, size_t{5}),
      ETKV_ERROR_INVALID_ARGUMENT,
      "payload is NULL");
}

void another_number_of_layers() {
  for (const size_t n_layers : {1, 3}) {
    auto session =
        must(make_decode_session(backend(), small_config(n_layers, 2, 16)));
    Model model("tiny-llama-f32");
    const auto words = "has " + std::to_string(n_layers);
    CHECK_REFUSED(model.load(session.key()), ETKV_ERROR_SHAPE, words.c_str());
    CHECK_INT(*session->length(), 0);
    CHECK_INT(session->memory()->allocated, 0);
  }
}

void other_sizes() {
  struct Case {
    CacheConfig config;
    const char* words;
  };
  auto last_layer = small_config(2, 2, 16);
  last_layer.layers[1].v_head_dim = 8;
  const Case cases[] = {
      {small_config(2, 2, 32), "layer 0"},
      {small_config(2, 4, 16), "layer 0"},
      {small_config(2, 1, 16), "layer 0"},
      // This fault is detected after the first layer is written.
      {last_layer, "expected values of shape"},
  };
  for (const auto& [config, words] : cases) {
    auto session = must(make_decode_session(backend(), config));
    const CacheState before(session.cache());
    Model model("tiny-llama-f32");
    if (const auto loaded = model.load(session.key()); !loaded.ok()) {
      CHECK_REFUSED(loaded, ETKV_ERROR_SHAPE, words);
      continue;
    }
    for (int i = 0; i < 2; ++i) {
      CHECK_REFUSED(model.step(text(3), run(0, 3)), ETKV_ERROR_SHAPE, words);
      CHECK_INT(*session->length(), 0);
      CHECK_INT(session->memory()->used, 0);
      CHECK(*session->can_extend(16));
    }
    // Layers before the one that refuses may keep new slots until the cache is
    // cleared.
    must(session->clear(/*release=*/true));
    CHECK(CacheState(session.cache()) == before);
  }
}

/// Returns a session of the C interface, whose handles may outlive it.
etkv_session* raw_session(Model& model) {
  const auto params = model.params();
  auto made = make_config(params, 64, "f32", 4);
  const detail::RawConfig config(made);
  etkv_session* session = nullptr;
  REQUIRE(
      etkv_session_new(
          backend(), Cache::kKind, config.get(), &session, nullptr) == ETKV_OK);
  return session;
}

/// A session, a handle and a program are freed in any order. The cache is freed
/// with the last of them.
void any_order_of_leaving() {
  const Ids ids = text(9);
  Bound fresh;
  fresh.at(0, slice(ids, 0, 6));
  const Rows wanted = fresh.at(6, slice(ids, 6, 3));

  std::string order = "hps";
  do {
    const uint64_t before = examples::mlx_memory().active;
    auto model = std::make_unique<Model>("tiny-llama-f32");
    etkv_session* session = raw_session(*model);
    const std::string key = etkv_session_key(session);
    auto handle = std::make_unique<Cache>(etkv_session_cache(session));
    must(model->load(key.c_str()));
    model->at(0, slice(ids, 0, 6));

    for (const char leaving : order) {
      // For the remaining owners the cache is unchanged.
      switch (leaving) {
        case 'h':
          handle.reset();
          break;
        case 'p':
          model.reset();
          break;
        default:
          etkv_session_free(std::exchange(session, nullptr));
      }
      if (handle) {
        must(handle->rewind(6));
        CHECK_INT(*handle->length(), 6);
      }
      if (model) {
        // This overwrites earlier rows, unless the handle removed them.
        CHECK(model->at(6, slice(ids, 6, 3)) == wanted);
      }
      Model next("tiny-llama-f32");
      if (session != nullptr) {
        must(next.load(key.c_str()));
        CHECK(next.at(6, slice(ids, 6, 3)) == wanted);
      } else {
        CHECK_REFUSED(next.load(key.c_str()), ETKV_ERROR_NO_CACHE, key.c_str());
      }
    }
    CHECK_INT(examples::mlx_memory().active, before);
  } while (std::next_permutation(order.begin(), order.end()));
}

void two_programs_on_one_cache() {
  const Ids ids = text(20);
  Bound alone;
  alone.model.read(ids, 7, 0, 7);
  const Rows wanted = alone.model.read(ids, 1, 7);

  Bound first;
  Model second("tiny-llama-f32");
  must(second.load(first.session.key()));
  first.model.read(ids, 7, 0, 7);
  Rows found;
  for (size_t i = 7; i < ids.size(); ++i) {
    Model& turn = i % 2 == 0 ? first.model : second;
    found.append(turn.read(ids, 1, i, i + 1));
  }
  CHECK(found == wanted);
  CHECK_INT(*first.cache().length(), 20);

  Model half("tiny-llama-bf16");
  if (on_cpu()) {
    CHECK_REFUSED(
        half.load(first.session.key()),
        ETKV_ERROR_KIND,
        "the program is for backend `MLXBackend`");
    must(first.cache().rewind(8));
  } else {
    // A program of another dtype reads the same storage.
    must(half.load(first.session.key()));
    must(first.cache().rewind(7));
    const Rows close = half.at(7, {ids[7]});
    CHECK(distance(close, wanted.row(0)) < 0.5);
  }
  CHECK_INT(*first.cache().length(), 8);

  // A program with other shapes is refused, and the first one continues.
  Model other("tiny-qwen3-f32");
  if (auto loaded = other.load(first.session.key()); loaded.ok()) {
    CHECK_REFUSED(other.step({ids[8]}, run(8, 1)), ETKV_ERROR_SHAPE, "layer 0");
  }
  CHECK_INT(*first.cache().length(), 8);
  must(first.cache().rewind(7));
  CHECK(first.at(7, {ids[7]}) == wanted.row(0));
  CHECK(first.at(8, {ids[8]}) == wanted.row(1));
}

void two_sessions_of_one_file() {
  const Ids a = text(12, 1);
  const Ids b = text(12, 2);
  const Rows wanted_a = Bound().model.read(a, 3);
  const Rows wanted_b = Bound().model.read(b, 3);
  CHECK(!(wanted_a == wanted_b));

  Bound first;
  Bound second;
  Rows found_a;
  Rows found_b;
  for (size_t i = 0; i < a.size(); i += 3) {
    found_a.append(first.model.read(a, 3, i, i + 3));
    found_b.append(second.model.read(b, 3, i, i + 3));
  }
  CHECK(found_a == wanted_a);
  CHECK(found_b == wanted_b);
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  what_a_program_tells();
  damaged_tables();
  faces_in_cpp();
  unknown_keys();
  if (!on_cpu()) {
    unknown_options();
    a_payload_alone();
  }
  options_of_the_thread();
  no_key();
  another_number_of_layers();
  other_sizes();
  any_order_of_leaving();
  two_programs_on_one_cache();
  two_sessions_of_one_file();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
