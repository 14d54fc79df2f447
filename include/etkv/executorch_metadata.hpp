// The facts that a program reports about its caches. A part of executorch.hpp,
// which includes this file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/executor/method_meta.h>

#include "etkv/backend_id.hpp"
#include "etkv/etkv.hpp"
#include "etkv/executorch_detail.hpp"

namespace etkv {

/// Facts about a program's caches: its layers, and the step length that it was
/// exported for.
struct ModelCacheParams {
  std::vector<LayerConfig> layers;
  /// The maximum tokens of one step; 0 if the program does not report it.
  int32_t prefill_chunk_size = 0;
  /// The context length that the program was exported for; 0 if the program
  /// does not report it.
  int32_t max_context_length = 0;
  /// The backend of sessions for the program: kMLXBackend or kCPUBackend.
  std::string backend_id = kMLXBackend;
  /// The recurrent layers. Their ids begin at 0, as do those of `layers`.
  std::vector<RecurrentLayerConfig> recurrent_layers = {};
};

/// Returns the value of the program's constant method with this name: nullopt
/// if there is none, an error if the method cannot run. Tensors live as long as
/// the program.
using ConstantMethods =
    std::function<Result<std::optional<executorch::runtime::EValue>>(
        const std::string&)>;

namespace detail {
/// Returns the dtype of etkv for a scalar type of ExecuTorch.
inline Dtype dtype_of(executorch::aten::ScalarType type) {
  using executorch::aten::ScalarType;
  switch (type) {
    case ScalarType::Float:
      return Dtype::f32;
    case ScalarType::Half:
      return Dtype::f16;
    case ScalarType::BFloat16:
      return Dtype::bf16;
    default:
      return Dtype::unknown;
  }
}

/// Returns a constant as JSON for etkv_metadata_read(), or null if that
/// function reads no constant of this type.
inline std::string as_json(const executorch::runtime::EValue& value) {
  using executorch::aten::ScalarType;
  const auto list = [](const auto* data, size_t n) {
    std::string json = "[";
    for (size_t i = 0; i < n; ++i) {
      json += (i == 0 ? "" : ",") + std::to_string(data[i]);
    }
    return json + "]";
  };
  if (value.isInt()) {
    return std::to_string(value.toInt());
  }
  if (value.isString()) {
    std::string json = "\"";
    for (const char c : value.toString()) {
      // The strings that are read have only such characters, so no escapes are
      // needed.
      const bool plain = c >= ' ' && c <= '~' && c != '"' && c != '\\';
      json += plain ? c : '?';
    }
    return json + '"';
  }
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    const auto n = static_cast<size_t>(tensor.numel());
    // No fact has more integers than this, but a damaged program can have a
    // tensor of any size.
    constexpr size_t kMaxIntegers = size_t{8} << 16;
    if (n > kMaxIntegers) {
      return "null";
    }
    if (tensor.scalar_type() == ScalarType::Int) {
      return list(tensor.const_data_ptr<int32_t>(), n);
    }
    if (tensor.scalar_type() == ScalarType::Long) {
      return list(tensor.const_data_ptr<int64_t>(), n);
    }
  }
  return "null";
}
} // namespace detail

/// Reads the facts of a program's caches from its constant methods. See
/// etkv_metadata_read for their names and for the errors.
inline Result<ModelCacheParams> read_kv_cache_metadata(
    const ConstantMethods& constants) {
  std::string json = "{";
  for (size_t i = 0; const char* name = etkv_metadata_name(i); ++i) {
    const auto value = constants(name);
    if (!value.ok()) {
      return value.error();
    }
    if (value->has_value()) {
      json += json.size() > 1 ? ",\"" : "\"";
      json += std::string(name) + "\":" + detail::as_json(**value);
    }
  }
  json += "}";
  etkv_metadata raw{};
  raw.struct_size = sizeof(raw);
  const auto read = [&] {
    return detail::run(etkv_metadata_read, json.c_str(), &raw);
  };
  if (auto counted = read(); !counted.ok()) {
    return counted.error();
  }
  std::vector<etkv_layer_config> layers(raw.n_layers);
  if (!layers.empty()) {
    layers[0].struct_size = sizeof(layers[0]);
  }
  std::vector<etkv_recurrent_layer_config> recurrent_layers(
      raw.n_recurrent_layers);
  if (!recurrent_layers.empty()) {
    recurrent_layers[0].struct_size = sizeof(recurrent_layers[0]);
  }
  raw.layers = layers.data();
  raw.recurrent_layers = recurrent_layers.data();
  if (auto filled = read(); !filled.ok()) {
    return filled.error();
  }
  ModelCacheParams params;
  params.prefill_chunk_size = raw.max_step_tokens;
  params.max_context_length = raw.context_length;
  for (const auto& layer : layers) {
    params.layers.push_back(
        {layer.n_kv_heads,
         layer.k_head_dim,
         layer.v_head_dim,
         layer.window,
         layer.sinks,
         static_cast<Dtype>(layer.dtype),
         layer.values_in_keys != 0,
         layer.chunk});
  }
  for (const auto& layer : recurrent_layers) {
    params.recurrent_layers.push_back(
        {static_cast<RecurrentKind>(layer.kind),
         layer.channels,
         layer.width,
         layer.k_heads,
         layer.heads,
         layer.k_dim,
         layer.v_dim,
         layer.channel_decay != 0});
  }
  return params;
}

/// Reads the same facts for one method of a program. The method must run on the
/// backend.
///
/// A MethodMeta of release 1.5 has no values, so the facts come from the
/// program's constant methods. If these do not report the maximum tokens of a
/// step, it is the length of the method's first one-dimensional int64 input. If
/// they do not report the dtype, it is that of the method's first output, the
/// logits.
inline Result<ModelCacheParams> read_kv_cache_metadata(
    const executorch::runtime::MethodMeta& method,
    const ConstantMethods& constants,
    const std::string& backend_id = kMLXBackend) {
  const bool on_cpu = backend_id == kCPUBackend;
  const bool renamed =
      backend_id == kMLXBackend && method.uses_backend(kEtkvBackend);
  if (!renamed &&
      !method.uses_backend(on_cpu ? kCPUDelegate : backend_id.c_str())) {
    return Error(
        ETKV_ERROR_PROGRAM,
        std::string("the method ") + method.name() + " does not run on " +
            backend_id);
  }
  auto params = read_kv_cache_metadata(constants);
  if (!params.ok()) {
    return params;
  }
  params->backend_id = backend_id;
  const auto output = method.output_tensor_meta(0);
  for (auto& layer : params->layers) {
    if (layer.dtype == Dtype::unknown && output.ok()) {
      layer.dtype = detail::dtype_of(output->scalar_type());
    }
  }
  if (params->prefill_chunk_size > 0) {
    return params;
  }
  for (size_t i = 0; i < method.num_inputs(); ++i) {
    const auto input = method.input_tensor_meta(i);
    if (input.ok() &&
        input->scalar_type() == executorch::aten::ScalarType::Long &&
        input->sizes().size() == 1) {
      params->prefill_chunk_size = input->sizes()[0];
      break;
    }
  }
  return params;
}

/// Reads the same facts from a Module, without running `method`. The method's
/// inputs give the maximum tokens of a step if the constant methods do not.
inline Result<ModelCacheParams> read_kv_cache_metadata(
    executorch::extension::Module& module,
    const std::string& method = "forward") {
  using Value = std::optional<executorch::runtime::EValue>;
  etkv_error_free(etkv_delegate_take_error());
  if (auto opened =
          detail::open(module, "cannot open the program (is its path right?)");
      !opened.ok()) {
    return opened.error();
  }
  const auto names = module.method_names();
  if (!names.ok()) {
    return detail::executorch_error(
        names.error(), "cannot open the program (is its path right?)");
  }
  const ConstantMethods constants =
      [&](const std::string& name) -> Result<Value> {
    if (names->count(name) == 0) {
      return Value();
    }
    auto values = module.execute(name);
    if (!values.ok() || values->empty()) {
      return Error(ETKV_ERROR_PROGRAM, "cannot read `" + name + "`");
    }
    return Value((*values)[0]);
  };
  if (names->count(method) != 0) {
    const auto meta = module.method_meta(method);
    if (meta.ok() && meta->uses_backend(kCPUDelegate)) {
      return read_kv_cache_metadata(*meta, constants, kCPUBackend);
    }
    if (meta.ok() &&
        (meta->uses_backend(kMLXBackend) || meta->uses_backend(kEtkvBackend))) {
      return read_kv_cache_metadata(*meta, constants);
    }
  }
  return read_kv_cache_metadata(constants);
}

/// Returns a config from the program's facts and the caller's choices. The
/// caller may set its other fields.
///
/// @param capacity   the maximum number of positions: the context length
/// @param format     the format of keys and values; empty for the program's
///                   dtype
/// @param min_chunk  slots of the first allocation; 0 for the default
inline CacheConfig make_config(
    const ModelCacheParams& params,
    int32_t capacity,
    const std::string& format = {},
    int32_t min_chunk = 0) {
  CacheConfig config;
  config.layers = params.layers;
  config.recurrent_layers = params.recurrent_layers;
  config.capacity = capacity;
  config.max_step_tokens = params.prefill_chunk_size;
  config.min_chunk = min_chunk;
  config.k_format = format;
  config.v_format = format;
  return config;
}

} // namespace etkv
