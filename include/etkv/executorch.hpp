// etkv for runners on ExecuTorch: load options, and the sizes that a program
// tells. The one header that names ExecuTorch's types; matches release 1.5.
//
//   Module module("model.pte", Module::LoadMode::Mmap);
//   auto facts = etkv::read_kv_cache_metadata(module);
//   auto session = etkv::make_decode_session(
//       etkv::kMLXBackend, etkv::make_config(*facts, /*capacity=*/4096));
//   etkv::LoadOptions options(session->key());
//   etkv::load_method(module, "forward", options);
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/options.h>

#include "etkv/etkv.hpp"

namespace etkv {

/// The backend that etkv's delegate registers as.
inline constexpr char kMLXBackend[] = "MLXBackend";

/// The dtype of token ids and positions.
inline constexpr auto kLong = executorch::aten::ScalarType::Long;

/// Which rows of a program's logits are computed.
enum class Logits {
  all,  ///< as exported: [1, T, vocabulary]
  last, ///< of the last token only: [1, 1, vocabulary]
};

/// The backend options that a program is loaded with.
class LoadOptions {
 public:
  /// Binds the cache of the session with this key.
  explicit LoadOptions(const char* cache_key) {
    options_.set_option("cache_key", cache_key);
  }

  /// `Logits::last` spares a prompt the wide last product on every row but one.
  /// Programs whose output is not one such product refuse to load with it.
  LoadOptions& logits(Logits rows) {
    options_.set_option("logits", rows == Logits::last ? "last" : "all");
    return *this;
  }

  /// For Module::load_method; valid while this object is.
  executorch::runtime::LoadBackendOptionsMap map() {
    executorch::runtime::LoadBackendOptionsMap map;
    map.set_options(kMLXBackend, options_.view());
    return map;
  }

 private:
  executorch::runtime::BackendOptions<4> options_;
};

namespace detail {
/// The delegate's own words for a code of ExecuTorch's, if it had any.
inline Error executorch_error(
    executorch::runtime::Error code,
    const std::string& what) {
  if (etkv_error* error = etkv_delegate_take_error()) {
    return Error::adopt(etkv_error_status(error), error);
  }
  return Error(
      ETKV_ERROR_PROGRAM, what + ": " + executorch::runtime::to_string(code));
}
} // namespace detail

/// Loads a method of `module` with `options`, with the delegate's own error.
///
/// A method that is loaded already stays bound to the cache it has, so that is
/// an error: unload it first.
inline Result<void> load_method(
    executorch::extension::Module& module,
    const std::string& method,
    LoadOptions& options) {
  if (module.is_method_loaded(method)) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT,
        "the method " + method +
            " is loaded already, with the cache it had then; unload it first");
  }
  // An earlier failure on this thread is not this one's reason.
  etkv_error_free(etkv_delegate_take_error());
  const auto map = options.map();
  const auto code = module.load_method(
      method, /*planned_memory=*/nullptr, /*event_tracer=*/nullptr, &map);
  if (code != executorch::runtime::Error::Ok) {
    return detail::executorch_error(code, "cannot load the method " + method);
  }
  return {};
}

/// Runs a method of `module`, with the delegate's own error.
inline Result<std::vector<executorch::runtime::EValue>> execute(
    executorch::extension::Module& module,
    const std::string& method,
    const std::vector<executorch::runtime::EValue>& inputs) {
  etkv_error_free(etkv_delegate_take_error());
  auto outputs = module.execute(method, inputs);
  if (!outputs.ok()) {
    return detail::executorch_error(
        outputs.error(), "cannot run the method " + method);
  }
  return std::move(outputs.get());
}

/// What a program says of its caches: architecture facts, and the step that it
/// was exported for.
struct ModelCacheParams {
  std::vector<LayerConfig> layers;
  int32_t prefill_chunk_size = 0; ///< most tokens of one step
  int32_t max_context_length = 0; ///< positions that it was exported for
};

namespace detail {
inline Result<executorch::runtime::EValue> constant(
    executorch::extension::Module& module,
    const std::string& name) {
  auto values = module.execute(name);
  if (!values.ok() || values->empty()) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "the program does not tell `" + name +
            "`; export it with an off-graph KV cache");
  }
  return (*values)[0];
}

inline Result<int32_t> constant_int(
    executorch::extension::Module& module,
    const std::string& name) {
  auto value = constant(module, name);
  if (!value.ok()) {
    return value.error();
  }
  if (!value->isInt() || value->toInt() < 0 || value->toInt() > INT32_MAX) {
    return Error(ETKV_ERROR_PROGRAM, "`" + name + "` is not a 32-bit count");
  }
  return static_cast<int32_t>(value->toInt());
}

inline Result<std::vector<int32_t>> constant_ints(
    executorch::extension::Module& module,
    const std::string& name,
    int32_t n) {
  auto value = constant(module, name);
  if (!value.ok()) {
    return value.error();
  }
  if (!value->isTensor() ||
      value->toTensor().scalar_type() != executorch::aten::ScalarType::Int ||
      value->toTensor().numel() != n) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "`" + name + "` is not one int32 for each of " + std::to_string(n) +
            " layers");
  }
  const auto* data = value->toTensor().const_data_ptr<int32_t>();
  return std::vector<int32_t>(data, data + n);
}
} // namespace detail

/// Reads the constant methods that ExecuTorch's exporter writes: get_n_caches,
/// get_kv_heads, get_head_dims, get_windows, get_prefill_chunk_size and
/// get_max_ctx_len.
inline Result<ModelCacheParams> read_kv_cache_metadata(
    executorch::extension::Module& module) {
  etkv_error_free(etkv_delegate_take_error());
  if (const auto code = module.load(); code != executorch::runtime::Error::Ok) {
    return detail::executorch_error(code, "cannot open the program");
  }
  auto n_layers = detail::constant_int(module, "get_n_caches");
  if (!n_layers.ok()) {
    return n_layers.error();
  }
  auto kv_heads = detail::constant_ints(module, "get_kv_heads", *n_layers);
  if (!kv_heads.ok()) {
    return kv_heads.error();
  }
  auto head_dims = detail::constant_ints(module, "get_head_dims", *n_layers);
  if (!head_dims.ok()) {
    return head_dims.error();
  }
  auto windows = detail::constant_ints(module, "get_windows", *n_layers);
  if (!windows.ok()) {
    return windows.error();
  }
  auto chunk = detail::constant_int(module, "get_prefill_chunk_size");
  if (!chunk.ok()) {
    return chunk.error();
  }
  auto context = detail::constant_int(module, "get_max_ctx_len");
  if (!context.ok()) {
    return context.error();
  }
  ModelCacheParams params;
  params.prefill_chunk_size = *chunk;
  params.max_context_length = *context;
  for (int32_t i = 0; i < *n_layers; ++i) {
    LayerConfig layer;
    layer.n_kv_heads = (*kv_heads)[i];
    layer.k_head_dim = (*head_dims)[i];
    layer.v_head_dim = (*head_dims)[i];
    layer.window = (*windows)[i];
    params.layers.push_back(layer);
  }
  return params;
}

/// The program's facts and the caller's policy, as one configuration.
///
/// @param capacity   positions, the session's context length
/// @param format     storage of keys and values
/// @param min_chunk  slots of the first allocation; 0 for the default
inline CacheConfig make_config(
    const ModelCacheParams& params,
    int32_t capacity,
    etkv_format format = ETKV_FORMAT_DEFAULT,
    int32_t min_chunk = 0) {
  CacheConfig config;
  config.layers = params.layers;
  config.capacity = capacity;
  config.min_chunk = min_chunk;
  config.k_format = format;
  config.v_format = format;
  return config;
}

} // namespace etkv
