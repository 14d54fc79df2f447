// The facts that a program reports about its caches: in versioned metadata, in
// methods of ExecuTorch's exporter, or not at all. Unit tests of etkv-core test
// all values that are refused.

#include <map>
#include <stdexcept>
#include <tuple>

#include "fixture.hpp"

namespace etkv::tests {
namespace {

using ::executorch::extension::TensorPtr;
using Value = std::optional<EValue>;

/// Constant methods of a test.
struct Facts {
  std::map<std::string, EValue> values;
  std::vector<TensorPtr> tensors;

  Facts& set(const std::string& name, int64_t value) {
    values.insert_or_assign(name, EValue(value));
    return *this;
  }
  template <typename T>
  Facts& set(const std::string& name, std::vector<T> list) {
    tensors.push_back(
        ::executorch::extension::make_tensor_ptr(std::move(list)));
    values.insert_or_assign(name, EValue(*tensors.back()));
    return *this;
  }
  ConstantMethods constants() const {
    return [this](const std::string& name) -> Result<Value> {
      CHECK(!name.empty());
      const auto found = values.find(name);
      return found == values.end() ? Value() : Value(found->second);
    };
  }
  Result<ModelCacheParams> read() const {
    return read_kv_cache_metadata(constants());
  }
};

Facts versioned() {
  Facts facts;
  facts.set("kv_cache.schema_version", 1)
      .set("kv_cache.n_layers", 2)
      .set("kv_cache.n_kv_heads", 8)
      .set("kv_cache.head_dim", 64);
  return facts;
}

Facts exporters() {
  Facts facts;
  facts.set("get_n_caches", 2)
      .set("get_kv_heads", std::vector<int32_t>{4, 2})
      .set("get_head_dims", std::vector<int32_t>{64, 128})
      .set("get_windows", std::vector<int32_t>{0, 512})
      .set("get_prefill_chunk_size", 256)
      .set("get_max_ctx_len", 4096);
  return facts;
}

void of_our_version() {
  const auto uniform = must(versioned().read());
  CHECK_INT(uniform.layers.size(), 2);
  for (const auto& layer : uniform.layers) {
    CHECK_INT(layer.n_kv_heads, 8);
    CHECK_INT(layer.k_head_dim, 64);
    CHECK_INT(layer.v_head_dim, 64);
    CHECK_INT(layer.window, 0);
    CHECK_INT(layer.sinks, 0);
  }
  CHECK_INT(uniform.prefill_chunk_size, 0);
  CHECK_INT(uniform.max_context_length, 0);

  // Tensors with a value for each layer, int32 or int64. Versioned metadata
  // take precedence over the methods of ExecuTorch's exporter.
  auto facts = exporters();
  for (const auto& [name, value] : versioned().values) {
    facts.values.insert_or_assign(name, value);
  }
  facts.set("kv_cache.n_kv_heads", std::vector<int64_t>{8, 4})
      .set("kv_cache.v_head_dim", std::vector<int32_t>{32, 48})
      .set("kv_cache.window", std::vector<int32_t>{0, 1024})
      .set("kv_cache.sinks", std::vector<int64_t>{0, 4})
      .set("kv_cache.schema_version", 3)
      .set("kv_cache.chunk", std::vector<int64_t>{8192, 0})
      .set("kv_cache.values_in_keys", std::vector<int32_t>{1, 0});
  const auto params = must(facts.read());
  CHECK_INT(params.layers[0].chunk, 8192);
  CHECK_INT(params.layers[1].chunk, 0);
  CHECK_INT(params.layers[0].n_kv_heads, 8);
  CHECK_INT(params.layers[1].n_kv_heads, 4);
  CHECK_INT(params.layers[1].k_head_dim, 64);
  CHECK_INT(params.layers[0].v_head_dim, 32);
  CHECK_INT(params.layers[1].v_head_dim, 48);
  CHECK_INT(params.layers[0].window, 0);
  CHECK_INT(params.layers[1].window, 1024);
  CHECK_INT(params.layers[1].sinks, 4);
  CHECK(params.layers[0].values_in_keys && !params.layers[1].values_in_keys);
  CHECK(!uniform.layers[0].values_in_keys);
  CHECK_INT(params.prefill_chunk_size, 256);
  CHECK_INT(params.max_context_length, 4096);

  // A config has the facts, and the caller's choices.
  const auto config = make_config(params, 100, "affine8g32", 16);
  CHECK_INT(config.layers.size(), 2);
  CHECK_INT(config.capacity, 100);
  CHECK_INT(config.max_step_tokens, 256);
  CHECK_INT(config.min_chunk, 16);
  CHECK(config.k_format == "affine8g32" && config.v_format == "affine8g32");
  // 48 elements are not a multiple of 32.
  CHECK_REFUSED(
      make_decode_session(kMLXBackend, config),
      ETKV_ERROR_INVALID_ARGUMENT,
      "layer 1: values");
}

void values_in_keys() {
  auto facts = versioned();
  facts.set("kv_cache.v_head_dim", 48).set("kv_cache.values_in_keys", 1);
  auto config = make_config(must(facts.read()), 10, "f32");
  config.growth = Growth::exact;
  // Only keys take bytes, so 48 elements of a value need not be a multiple of
  // the group.
  CHECK_INT(must(estimate(config, 10)).allocated, 2 * 10 * 8 * 64 * 4);
  config.k_format = config.v_format = "affine8g64";
  CHECK(make_decode_session(kMLXBackend, config).ok());
  facts.set("kv_cache.values_in_keys", 2);
  CHECK_REFUSED(
      facts.read(),
      ETKV_ERROR_PROGRAM,
      "`kv_cache.values_in_keys` has 2, expected 0 or 1");
}

void of_another_version() {
  for (const int64_t version : {0, 4, 1000}) {
    // The version is refused even if the program also has the methods of
    // ExecuTorch's exporter.
    auto facts = exporters();
    facts.set("kv_cache.schema_version", version);
    CHECK_REFUSED(
        facts.read(), ETKV_ERROR_PROGRAM, std::to_string(version).c_str());
    CHECK_REFUSED(facts.read(), ETKV_ERROR_PROGRAM, "reads versions 1 to 3");
  }
  auto facts = versioned();
  facts.set("kv_cache.schema_version", -1);
  CHECK_REFUSED(facts.read(), ETKV_ERROR_PROGRAM, "kv_cache.schema_version");
  facts.set("kv_cache.schema_version", std::vector<int32_t>{1});
  CHECK_REFUSED(facts.read(), ETKV_ERROR_PROGRAM, "kv_cache.schema_version");
}

/// A convolution and a recurrence.
Facts recurrent() {
  std::vector<int32_t> layers = {1, 160, 4, 0, 0, 0, 0, 0};
  for (const int32_t field : {2, 0, 0, 2, 4, 16, 24, 1}) {
    layers.push_back(field);
  }
  Facts facts = versioned();
  facts.set("kv_cache.schema_version", 2)
      .set("kv_cache.recurrent_layers", layers);
  return facts;
}

void of_recurrent_layers() {
  auto params = must(recurrent().read());
  CHECK_INT(params.layers.size(), 2);
  CHECK_INT(params.recurrent_layers.size(), 2);
  const auto& convolution = params.recurrent_layers[0];
  CHECK(convolution.kind == RecurrentKind::convolution);
  CHECK_INT(convolution.channels, 160);
  CHECK_INT(convolution.width, 4);
  const auto& recurrence = params.recurrent_layers[1];
  CHECK(recurrence.kind == RecurrentKind::recurrence);
  CHECK_INT(recurrence.k_heads, 2);
  CHECK_INT(recurrence.heads, 4);
  CHECK_INT(recurrence.k_dim, 16);
  CHECK_INT(recurrence.v_dim, 24);
  CHECK(recurrence.channel_decay);

  // A session has these layers.
  auto config = make_config(params, 256);
  config.growth = Growth::upfront;
  for (const char* backend : {kMLXBackend, kCPUBackend}) {
    auto session = must(make_decode_session(backend, config));
    CHECK_INT(session->n_layers(), 2);
    CHECK_INT(session->n_recurrent_layers(), 2);
    const auto found = must(session->memory());
    const auto wanted = must(estimate(config, 0));
    CHECK(found == wanted);
    CHECK_INT(found.recurrent_layers.size(), 2);
    for (size_t i = 0; i < 2; ++i) {
      const auto& layer = found.recurrent_layers[i];
      const auto& expected = wanted.recurrent_layers[i];
      CHECK(layer.rows_allocated > 0);
      CHECK_INT(layer.rows_allocated, expected.rows_allocated);
      CHECK_INT(layer.rows_used, 0);
      CHECK((layer.anchors_allocated > 0) == (i == 1));
      CHECK_INT(layer.anchors_allocated, expected.anchors_allocated);
      CHECK_INT(layer.anchors_used, 0);
    }
    CHECK_HAS(
        must(cache_report(session.cache())).c_str(), "\"channel_decay\":true");
    CHECK_INT(must(session->mark(200)), 192);
    CHECK_INT(must(session->reachable(200)), 0);
    auto sequences = must(make_seq_session(backend, config));
    CHECK_INT(must(sequences->seq_mark(3, 200)), 192);
    CHECK_INT(must(sequences->seq_reachable(3, 200)), 0);
  }
  config.checkpoints = kNoCheckpoints;
  auto session = must(make_tree_session(kCPUBackend, config));
  CHECK_INT(must(session->mark(200)), 0);
  config.anchors = 65;
  CHECK_REFUSED(
      make_tree_session(kCPUBackend, config),
      ETKV_ERROR_INVALID_ARGUMENT,
      "anchors is 65, the maximum is 64");

  // A program needs no attention layers.
  auto facts = recurrent();
  facts.set("kv_cache.n_layers", 0)
      .set("kv_cache.n_kv_heads", 0)
      .set("kv_cache.head_dim", 0);
  params = must(facts.read());
  CHECK_INT(params.layers.size(), 0);
  session = must(make_tree_session(kCPUBackend, make_config(params, 256)));
  CHECK_INT(session->n_layers(), 0);
  CHECK_INT(session->n_recurrent_layers(), 2);
  facts.set("kv_cache.schema_version", 1);
  CHECK_REFUSED(facts.read(), ETKV_ERROR_PROGRAM, "is 0, expected 1 to");
  CHECK_INT(must(versioned().read()).recurrent_layers.size(), 0);

  facts = recurrent();
  facts.values.erase("kv_cache.recurrent_layers");
  CHECK_REFUSED(
      facts.read(),
      ETKV_ERROR_PROGRAM,
      "does not report `kv_cache.recurrent_layers`");
  facts.set("kv_cache.recurrent_layers", std::vector<float>(8));
  CHECK_REFUSED(facts.read(), ETKV_ERROR_PROGRAM, "has 0 integers");
}

void of_executorchs_exporter() {
  const auto params = must(exporters().read());
  CHECK_INT(params.layers.size(), 2);
  CHECK_INT(params.layers[0].n_kv_heads, 4);
  CHECK_INT(params.layers[1].k_head_dim, 128);
  CHECK_INT(params.layers[1].v_head_dim, 128);
  CHECK_INT(params.layers[0].window, 0);
  CHECK_INT(params.layers[1].window, 512);
  CHECK_INT(params.prefill_chunk_size, 256);
  CHECK_INT(params.max_context_length, 4096);

  // Exporters have different names for the context length.
  auto facts = exporters();
  facts.values.erase("get_max_ctx_len");
  facts.set("get_max_seq_len", 128);
  CHECK_INT(must(facts.read()).max_context_length, 128);
  facts.set("get_max_context_len", 2048);
  CHECK_INT(must(facts.read()).max_context_length, 2048);
}

void what_is_missing_or_wrong() {
  CHECK_REFUSED(Facts().read(), ETKV_ERROR_PROGRAM, "get_n_caches");
  for (const char* name :
       {"get_n_caches", "get_kv_heads", "get_head_dims", "get_windows"}) {
    auto facts = exporters();
    facts.values.erase(name);
    CHECK_REFUSED(facts.read(), ETKV_ERROR_PROGRAM, name);
  }
  for (const char* name :
       {"kv_cache.n_layers", "kv_cache.n_kv_heads", "kv_cache.head_dim"}) {
    auto facts = versioned();
    facts.values.erase(name);
    CHECK_REFUSED(facts.read(), ETKV_ERROR_PROGRAM, name);
    facts.set(name, -3);
    CHECK_REFUSED(facts.read(), ETKV_ERROR_PROGRAM, name);
    facts.set(name, int64_t{1} << 40);
    CHECK_REFUSED(facts.read(), ETKV_ERROR_PROGRAM, name);
    facts.values.insert_or_assign(name, EValue(1.5));
    CHECK_REFUSED(facts.read(), ETKV_ERROR_PROGRAM, name);
    facts.set(name, std::vector<int32_t>{1, 2, 3});
    CHECK_REFUSED(facts.read(), ETKV_ERROR_PROGRAM, name);
    facts.set(name, std::vector<float>{1, 2});
    CHECK_REFUSED(facts.read(), ETKV_ERROR_PROGRAM, name);
  }
  // An error of the host's function is returned.
  CHECK_REFUSED(
      read_kv_cache_metadata([](const std::string&) -> Result<Value> {
        return Error(ETKV_ERROR_UNSUPPORTED, "no constants here");
      }),
      ETKV_ERROR_UNSUPPORTED,
      "no constants here");
}

/// Facts from a method and its inputs.
void of_a_method() {
  Model model("tiny-llama-f32");
  REQUIRE(model.module().load() == executorch::runtime::Error::Ok);
  const auto meta = model.module().method_meta("forward");
  REQUIRE(meta.ok());
  const Facts facts = versioned();
  const auto params = must(read_kv_cache_metadata(*meta, facts.constants()));
  CHECK_INT(params.layers.size(), 2);
  CHECK_INT(params.prefill_chunk_size, kMaxTokens);
  CHECK_REFUSED(
      read_kv_cache_metadata(*meta, facts.constants(), "OtherBackend"),
      ETKV_ERROR_PROGRAM,
      "does not run on OtherBackend");
}

/// Without a format, rows are stored in the program's dtype.
void default_formats() {
  for (const auto& [name, dtype, format] :
       {std::tuple("tiny-llama-f32", Dtype::f32, "f32"),
        std::tuple("cpu-tiny-llama-f32", Dtype::f32, "f32"),
        std::tuple("tiny-llama-bf16", Dtype::bf16, "bf16")}) {
    Model model(name);
    const auto params = model.params();
    for (const auto& layer : params.layers) {
      CHECK(layer.dtype == dtype);
    }
    auto config = make_config(params, 48);
    auto named = make_config(params, 48, format);
    CHECK(must(estimate(config, 40)) == must(estimate(named, 40)));
    auto session = must(make_decode_session(params.backend_id, config));
    CHECK(session.cache().formats()->k == format);
    CHECK(session.cache().formats()->v == format);
    CHECK_INT(session.cache().max_step_tokens(), 48);
    config.layers[1].dtype = Dtype::f16;
    CHECK_REFUSED(
        make_decode_session(params.backend_id, config),
        ETKV_ERROR_INVALID_ARGUMENT,
        "k_format is not set, and the dtype of layer 1 is f16");
    config.layers[0].dtype = config.layers[1].dtype = Dtype::unknown;
    session = must(make_decode_session(params.backend_id, config));
    CHECK(session.cache().formats()->k == "f16");
  }
  // ExecuTorch's exporter does not report the dtype, so the dtype of the logits
  // is used.
  Model model("tiny-llama-bf16");
  const auto meta = model.module().method_meta("forward");
  REQUIRE(meta.ok());
  auto facts = versioned();
  CHECK(
      must(read_kv_cache_metadata(*meta, facts.constants())).layers[0].dtype ==
      Dtype::bf16);
  facts.set("kv_cache.dtype", 1);
  CHECK_REFUSED(
      facts.read(),
      ETKV_ERROR_PROGRAM,
      "`kv_cache.dtype` is 1, expected f32, f16 or bf16");
  std::string word = "\"f32\xff";
  ::executorch::aten::ArrayRef<char> view(word.data(), word.size());
  facts.values.insert_or_assign("kv_cache.dtype", EValue(&view));
  CHECK_REFUSED(
      facts.read(),
      ETKV_ERROR_PROGRAM,
      "`kv_cache.dtype` is \"?f32?\", expected f32, f16 or bf16");
}

/// The memory of a session can be estimated before the session is made.
void estimates() {
  Model model("tiny-llama-f32");
  auto config = make_config(model.params(), 48, "", 4);
  config.k_format = "row-int4";
  config.v_format = "mxfp8";
  // 16 elements are not a multiple of 32.
  CHECK_REFUSED(
      estimate(config, 1), ETKV_ERROR_INVALID_ARGUMENT, "layer 0: values");
  config.v_format = "nvfp4";
  config.quantized_kv_start = 10;
  config.layers[1].window = 4;
  config.max_step_tokens = 8;
  On<Cache> on([&](CacheConfig& own) { own = config; });
  const Ids ids = text(40);
  for (int32_t length = 0; length < 40; length += 5) {
    const Memory wanted = must(estimate(config, length));
    const Memory found = *on->memory();
    CHECK(wanted == found);
    CHECK_INT(found.layers.size(), 2);
    for (size_t i = 0; i < found.layers.size(); ++i) {
      CHECK_INT(found.layers[i].k_allocated, wanted.layers[i].k_allocated);
      CHECK_INT(found.layers[i].k_used, wanted.layers[i].k_used);
      CHECK_INT(found.layers[i].v_allocated, wanted.layers[i].v_allocated);
      CHECK_INT(found.layers[i].v_used, wanted.layers[i].v_used);
    }
    CHECK(on->formats()->k == (length < 10 ? "f32" : "row-int4"));
    CHECK(on->formats()->v == (length < 10 ? "f32" : "nvfp4"));
    on.model.read(ids, 5, length, length + 5);
  }
  CHECK_REFUSED(
      estimate(config, 49), ETKV_ERROR_INVALID_ARGUMENT, "length is 49");
}

/// A call that would exceed the budget is refused, and changes nothing.
void budgets() {
  Model model("tiny-llama-f32");
  const auto config = make_config(model.params(), 48, "f16", 16);
  const uint64_t first = must(estimate(config, 1)).allocated;
  const uint64_t before = must(memory_budget()).held;
  const Ids ids = text(24);
  On<Cache> on([&](CacheConfig& own) { own = config; });
  must(set_memory_budget(before + first));
  on.model.at(0, slice(ids, 0, 8));
  CHECK_INT(must(memory_budget()).held, before + first);
  on.model.at(8, slice(ids, 8, 8));
  const std::string message =
      "the memory budget is " + std::to_string(before + first) + " bytes";
  const auto full = must(on->memory());
  CHECK_REFUSED(on->convert("f32", "f32"), ETKV_ERROR_BACKEND, message.c_str());
  // The 17th position needs 32 slots, and the old 16 stay until they are
  // copied.
  must(set_memory_budget(before + 3 * first - 1));
  CHECK(!on.model.step(slice(ids, 16, 8), run(16, 8)).ok());
  CHECK(must(on->memory()) == full);
  CHECK_INT(must(on->length()), 16);
  must(set_memory_budget(before + 3 * first));
  on.model.at(16, slice(ids, 16, 8));
  CHECK_INT(must(memory_budget()).held, before + must(on->memory()).allocated);
  must(set_memory_budget(0));
}

/// Before a step is refused, the host's callback can free another cache.
void callbacks_for_memory() {
  const Ids ids = text(8);
  const auto before = must(memory_budget()).held;
  std::optional<On<Cache>> spare(std::in_place);
  spare->model.at(0, ids);
  On<Cache> on;
  std::vector<uint64_t> asked;
  must(set_memory_callback([&](uint64_t bytes) -> uint64_t {
    asked.push_back(bytes);
    CHECK_INT(on->length().error().status(), ETKV_ERROR_STEP);
    CHECK_INT(set_memory_callback({}).error().status(), ETKV_ERROR_STEP);
    if (spare) {
      spare.reset();
      return bytes;
    }
    throw std::runtime_error("there is no other cache");
  }));
  const uint64_t held = must(memory_budget()).held - before;
  must(set_memory_budget(before + held + held / 8));
  on.model.at(0, ids);
  CHECK_INT(asked.size(), 1);
  CHECK_HAS(must(process_report()).c_str(), on.session.key());
  // The 9th position needs 16 slots, and the old 8 stay until they are copied.
  must(set_memory_budget(before + 3 * held - 1));
  CHECK(!on.model.step(text(1), run(8, 1)).ok());
  CHECK_INT(asked.size(), 2);
  must(set_memory_callback({}));
  CHECK(!on.model.step(text(1), run(8, 1)).ok());
  CHECK_INT(asked.size(), 2);
  must(set_memory_budget(0));
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  etkv::examples::quiet_executorch();
  of_our_version();
  values_in_keys();
  of_another_version();
  of_recurrent_layers();
  of_executorchs_exporter();
  what_is_missing_or_wrong();
  of_a_method();
  default_formats();
  estimates();
  budgets();
  callbacks_for_memory();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
