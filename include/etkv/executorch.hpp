// etkv for runners on ExecuTorch: load options, and the sizes that a program
// reports. This file and backend_id.hpp use types of ExecuTorch, release 1.5.
//
//   Module module("model.pte", Module::LoadMode::Mmap);
//   auto facts = etkv::read_kv_cache_metadata(module);
//   auto made = etkv::make_decode_session_and_options(
//       etkv::kMLXBackend, etkv::make_config(*facts, /*capacity=*/4096));
//   auto& [session, options] = *made;
//   etkv::load_method(module, "forward", options);
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/executor/method_meta.h>

#include "etkv/backend_id.hpp"
#include "etkv/etkv.hpp"

namespace etkv {

/// The dtype of token ids and positions.
inline constexpr auto kLong = executorch::aten::ScalarType::Long;

/// The rows of logits that a program returns.
enum class Logits {
  all,  ///< as exported: [1, T, vocabulary]
  last, ///< of the last token only: [1, 1, vocabulary]
  /// All rows in steps of proposed candidates or declared sequences, and only
  /// the last row in other steps. MLX delegate only.
  proposed,
};

/// The passes that change a program of the MLX delegate when it is loaded.
enum class Passes {
  standard, ///< passes that make it faster on its device
  none, ///< only passes that other options need, for comparison and debugging
  /// As `standard`, but captures no step as a CUDA graph.
  interpreted,
};

/// The backend options that a program is loaded with.
class LoadOptions {
 public:
  /// Binds the cache of the session with this key, in programs of etkv's
  /// backends and in programs of `backend_id` if that is another backend.
  /// ExecuTorch stores backend ids of at most 63 characters, and passes no
  /// options to a backend with a longer id.
  explicit LoadOptions(
      const char* cache_key,
      const std::string& backend_id = kMLXBackend)
      : backend_id_(backend_id) {
    options_.set_option("cache_key", cache_key == nullptr ? "" : cache_key);
    // Gives each program its own working memory, so that programs on several
    // threads do not wait for each other.
    xnnpack_.set_option("workspace_sharing_mode", 1);
  }

  /// Sets the rows of the logits. CPU programs fail to load with
  /// `Logits::proposed`. With `Logits::last`, the last and widest matrix
  /// product of a prompt computes one row only. A program whose output is not
  /// one such product then fails to load.
  LoadOptions& logits(Logits rows) {
    options_.set_option(
        "logits",
        rows == Logits::last       ? "last"
        : rows == Logits::proposed ? "proposed"
                                   : "all");
    return *this;
  }

  /// Sets the passes over programs of the MLX delegate. They change results by
  /// float rounding at most.
  LoadOptions& passes(Passes passes) {
    options_.set_option(
        "passes",
        passes == Passes::none          ? "none"
        : passes == Passes::interpreted ? "interpreted"
                                        : "default");
    return *this;
  }

  /// Names the buffers that the program keeps between calls, such as a cache in
  /// its graph, for reset_buffers(). Programs may share a name. ExecuTorch
  /// stores names of at most 255 characters.
  LoadOptions& buffers(const char* name) {
    options_.set_option("buffers", name);
    return *this;
  }

  /// Returns the options for Module::load_method. The map lives as long as this
  /// object.
  executorch::runtime::LoadBackendOptionsMap map() {
    executorch::runtime::LoadBackendOptionsMap map;
    for (const char* id :
         {kMLXBackend, kEtkvBackend, kCPUDelegate, backend_id_.c_str()}) {
      map.set_options(id, options_.view());
    }
    map.set_options("XnnpackBackend", xnnpack_.view());
    return map;
  }

 private:
  std::string backend_id_;
  executorch::runtime::BackendOptions<4> options_;
  executorch::runtime::BackendOptions<1> xnnpack_;
};

/// Resets the buffers of the programs that were loaded with this buffer name to
/// zeros. The next call starts afresh.
inline Result<void> reset_buffers(const char* name) {
  return detail::run([&](etkv_error** error) {
    return etkv_delegate_reset_buffers(name, error);
  });
}

/// A session, and the load options by which a program finds its cache.
template <typename Face>
struct SessionAndOptions {
  CacheSession<Face> session;
  LoadOptions options;
};

namespace detail {
template <typename Face>
Result<SessionAndOptions<Face>> with_options(
    const std::string& backend_id,
    Result<CacheSession<Face>> session) {
  if (!session.ok()) {
    return session.error();
  }
  LoadOptions options(session->key(), backend_id);
  return SessionAndOptions<Face>{
      std::move(session.value()), std::move(options)};
}
} // namespace detail

/// Makes a session as make_decode_session does, and load options with its key.
inline Result<SessionAndOptions<Cache>> make_decode_session_and_options(
    const std::string& backend_id,
    const CacheConfig& config) {
  return detail::with_options(
      backend_id, make_decode_session(backend_id, config));
}

/// Makes a session as make_seq_session does, and load options with its key.
inline Result<SessionAndOptions<SeqCache>> make_seq_session_and_options(
    const std::string& backend_id,
    const CacheConfig& config) {
  return detail::with_options(backend_id, make_seq_session(backend_id, config));
}

/// Makes a session as make_tree_session does, and load options with its key.
inline Result<SessionAndOptions<TreeCache>> make_tree_session_and_options(
    const std::string& backend_id,
    const CacheConfig& config) {
  return detail::with_options(
      backend_id, make_tree_session(backend_id, config));
}

namespace detail {
/// Returns the delegate's own error, or else an error with ExecuTorch's code.
/// `what` is the action that failed.
inline Error executorch_error(
    executorch::runtime::Error code,
    const std::string& what) {
  if (etkv_error* error = etkv_delegate_take_error()) {
    return Error::adopt(etkv_error_status(error), error);
  }
  return Error(
      ETKV_ERROR_PROGRAM, what + ": " + executorch::runtime::to_string(code));
}

/// Opens the program of `module`, unless it is open, and checks all of its
/// tables. By default ExecuTorch checks only their first bytes, so a damaged
/// program can make it read outside the program. `what` names the action in the
/// error.
inline Result<void> open(
    executorch::extension::Module& module,
    const std::string& what) {
  using executorch::runtime::Program;
  const auto code = module.load(Program::Verification::InternalConsistency);
  if (code != executorch::runtime::Error::Ok) {
    return executorch_error(code, what);
  }
  return {};
}

/// Returns whether `n_bytes` bytes are zero.
inline bool is_zero(const void* bytes, size_t n_bytes) {
  const auto* first = static_cast<const unsigned char*>(bytes);
  return n_bytes == 0 ||
         (*first == 0 && std::memcmp(first, first + 1, n_bytes - 1) == 0);
}

/// Releases output memory of a method to the system before its first step.
/// ExecuTorch writes zeros to this memory, and a program that returns all rows
/// has room for the logits of its longest step, most of which are never
/// computed. Memory that is not all zeros, such as that of a constant, stays.
inline void release_outputs(
    executorch::extension::Module& module,
    const std::string& method) {
#if defined(__linux__)
  const auto outputs = module.get_outputs(method);
  if (!outputs.ok()) {
    return;
  }
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  for (const auto& output : *outputs) {
    if (!output.isTensor() || output.toTensor().const_data_ptr() == nullptr) {
      continue;
    }
    const auto& tensor = output.toTensor();
    const auto start =
        reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
    const auto first = (start + page - 1) / page * page;
    const auto end = (start + tensor.nbytes()) / page * page;
    void* const pages = reinterpret_cast<void*>(first);
    if (first < end && is_zero(pages, end - first)) {
      // Released pages read as zeros, as before.
      madvise(pages, end - first, MADV_DONTNEED);
    }
  }
#else
  static_cast<void>(module);
  static_cast<void>(method);
#endif
}
} // namespace detail

/// Loads a method of `module` with `options`. A failure returns the delegate's
/// own error.
///
/// A program that is not open yet is opened, and all of its tables are checked
/// (`Verification::InternalConsistency`). execute() and
/// read_kv_cache_metadata() do so too.
///
/// ETKV_ERROR_INVALID_ARGUMENT for a method that is loaded already: it stays
/// bound to the cache that it has, so unload it first. ETKV_ERROR_UNSUPPORTED
/// for a method on MLXBackend if another backend has that id.
inline Result<void> load_method(
    executorch::extension::Module& module,
    const std::string& method,
    LoadOptions& options) {
  if (module.is_method_loaded(method)) {
    return Error(
        ETKV_ERROR_INVALID_ARGUMENT,
        "the method " + method +
            " is already loaded and bound to its cache; unload it first");
  }
  const std::string cannot = "cannot load the method " + method;
  if (auto opened = detail::open(module, cannot); !opened.ok()) {
    return opened;
  }
  const char* id = delegate_backend_id();
  const auto meta = module.method_meta(method);
  if (meta.ok() && meta->uses_backend(kCPUDelegate) &&
      executorch::runtime::get_backend_class(kCPUDelegate) == nullptr) {
    return Error(
        ETKV_ERROR_UNSUPPORTED,
        "the method " + method + " runs on " + kCPUDelegate +
            ", which is not in this process; link etkv::cpu_backend");
  }
  if (id == nullptr || std::strcmp(id, kMLXBackend) != 0) {
    if (meta.ok() && meta->uses_backend(kMLXBackend)) {
      return Error(
          ETKV_ERROR_UNSUPPORTED,
          "the method " + method + " runs on MLXBackend, and " +
              (id == nullptr
                   ? "etkv's delegate is not in this process; link "
                     "etkv::mlx_backend"
                   : "another backend registered that id first; "
                     "open the program with etkv::open_module, or link or "
                     "load etkv's delegate before the other"));
    }
  }
  // Discard an earlier failure on this thread.
  etkv_error_free(etkv_delegate_take_error());
  const auto map = options.map();
  const auto code = module.load_method(
      method, /*planned_memory=*/nullptr, /*event_tracer=*/nullptr, &map);
  if (code != executorch::runtime::Error::Ok) {
    return detail::executorch_error(code, cannot);
  }
  detail::release_outputs(module, method);
  return {};
}

namespace detail {
/// Returns an error if the step has more tokens than the method accepts, and
/// nullopt otherwise. ExecuTorch itself returns only a code.
inline std::optional<Error> too_long(
    executorch::extension::Module& module,
    const std::string& method,
    const std::vector<executorch::runtime::EValue>& inputs) {
  const auto meta = module.method_meta(method);
  if (!meta.ok() || inputs.empty() || !inputs[0].isTensor() ||
      meta->num_inputs() == 0) {
    return std::nullopt;
  }
  const auto first = meta->input_tensor_meta(0);
  // Only a first input of token ids has one element per token.
  if (inputs[0].toTensor().scalar_type() != kLong) {
    return std::nullopt;
  }
  const auto given = inputs[0].toTensor().sizes();
  if (!first.ok() || given.empty() || first->sizes().size() != given.size()) {
    return std::nullopt;
  }
  const auto n = given[given.size() - 1],
             most = first->sizes()[given.size() - 1];
  if (n <= most) {
    return std::nullopt;
  }
  return Error(
      ETKV_ERROR_INVALID_ARGUMENT,
      "the step has " + std::to_string(n) +
          " tokens, the program takes at most " + std::to_string(most));
}
} // namespace detail

/// Runs a method of `module`. A failure returns the delegate's own error.
/// ETKV_ERROR_INVALID_ARGUMENT for a step of more tokens than the program
/// accepts: run a longer prompt in several steps.
inline Result<std::vector<executorch::runtime::EValue>> execute(
    executorch::extension::Module& module,
    const std::string& method,
    const std::vector<executorch::runtime::EValue>& inputs) {
  etkv_error_free(etkv_delegate_take_error());
  const std::string cannot = "cannot run the method " + method;
  if (auto opened = detail::open(module, cannot); !opened.ok()) {
    return opened.error();
  }
  auto outputs = module.execute(method, inputs);
  if (!outputs.ok()) {
    etkv_delegate_abort_forward();
    if (auto error = detail::too_long(module, method, inputs)) {
      return *std::move(error);
    }
    return detail::executorch_error(outputs.error(), cannot);
  }
  return std::move(outputs.get());
}

/// Facts about a program's caches: its layers, and the step length that it was
/// exported for.
struct ModelCacheParams {
  std::vector<LayerConfig> layers;
  /// The maximum tokens of one step; 0 if the program does not report it.
  int32_t prefill_chunk_size = 0;
  /// The context length that it was exported for; 0 if the program does not
  /// report it.
  int32_t max_context_length = 0;
  /// The backend of sessions for the program: kMLXBackend or kCPUBackend.
  std::string backend_id = kMLXBackend;
  /// The recurrent layers. Their ids begin at 0, as do those of `layers`.
  std::vector<RecurrentLayerConfig> recurrent_layers = {};
};

/// The version of the `kv_cache.*` metadata of programs in which all layers
/// attend.
inline constexpr int32_t kMetadataVersion = 1;

/// The version for programs with recurrent layers.
inline constexpr int32_t kRecurrentMetadataVersion = 2;

/// The version for programs with layers that attend in chunks, with or without
/// recurrent layers.
inline constexpr int32_t kChunkMetadataVersion = 3;

/// Returns the value of the program's constant method with this name: nullopt
/// if there is none, an error if the method cannot run. Tensors live as long as
/// the program.
using ConstantMethods =
    std::function<Result<std::optional<executorch::runtime::EValue>>(
        const std::string&)>;

namespace detail {
/// Reads numbers from constant methods.
class Metadata {
 public:
  explicit Metadata(const ConstantMethods& constants) : constants_(constants) {}

  /// Returns the count with that name; nullopt if there is none.
  Result<std::optional<int32_t>> find(const std::string& name) const {
    auto value = constants_(name);
    if (!value.ok()) {
      return value.error();
    }
    if (!value->has_value()) {
      return std::optional<int32_t>();
    }
    return as_count(name, **value);
  }

  /// Returns whether the program has a constant method of that name.
  Result<bool> has(const std::string& name) const {
    auto value = constants_(name);
    if (!value.ok()) {
      return value.error();
    }
    return value->has_value();
  }

  /// Returns the count with that name; an error if there is none.
  Result<int32_t> get(const std::string& name) const {
    auto found = find(name);
    if (!found.ok()) {
      return found.error();
    }
    if (!found->has_value()) {
      return absent(name);
    }
    return **found;
  }

  /// Returns the first of these counts that the program has; 0 if it has none.
  Result<int32_t> first(const std::vector<const char*>& names) const {
    for (const char* name : names) {
      auto found = find(name);
      if (!found.ok()) {
        return found.error();
      }
      if (found->has_value()) {
        return **found;
      }
    }
    return 0;
  }

  /// Returns one count for each layer, from a tensor of counts or one count for
  /// all.
  Result<std::vector<int32_t>> each(
      const char* name,
      int32_t n_layers,
      std::optional<std::vector<int32_t>> otherwise = std::nullopt) const {
    if (name == nullptr && otherwise) {
      return std::move(*otherwise);
    }
    auto value = constants_(name);
    if (!value.ok()) {
      return value.error();
    }
    if (!value->has_value()) {
      if (otherwise) {
        return std::move(*otherwise);
      }
      return absent(name);
    }
    return as_counts(name, **value, n_layers);
  }

  /// Returns the counts of a tensor with `per_layer` counts for each of 1 to
  /// `max_layers` layers.
  Result<std::vector<int32_t>>
  rows(const char* name, int32_t per_layer, int32_t max_layers) const {
    auto value = constants_(name);
    if (!value.ok()) {
      return value.error();
    }
    if (!value->has_value()) {
      return absent(name);
    }
    const int64_t numel =
        (*value)->isTensor() ? (*value)->toTensor().numel() : 0;
    if (numel < per_layer || numel % per_layer != 0 ||
        numel / per_layer > max_layers) {
      return Error(
          ETKV_ERROR_PROGRAM,
          std::string("`") + name + "` has " + std::to_string(numel) +
              " integers, expected " + std::to_string(per_layer) +
              " for each of 1 to " + std::to_string(max_layers) + " layers");
    }
    return as_counts(name, **value, static_cast<int32_t>(numel));
  }

 private:
  using EValue = executorch::runtime::EValue;

  static Error absent(const std::string& name) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "the program does not report `" + name +
            "`; export it with an off-graph KV cache");
  }

  static Result<std::optional<int32_t>> as_count(
      const std::string& name,
      const EValue& value) {
    if (!value.isInt() || value.toInt() < 0 || value.toInt() > INT32_MAX) {
      return Error(ETKV_ERROR_PROGRAM, "`" + name + "` is not a 32-bit count");
    }
    return std::optional<int32_t>(static_cast<int32_t>(value.toInt()));
  }

  static Result<std::vector<int32_t>>
  as_counts(const std::string& name, const EValue& value, int32_t n_layers) {
    const auto n = static_cast<size_t>(n_layers);
    if (value.isInt()) {
      auto count = as_count(name, value);
      if (!count.ok()) {
        return count.error();
      }
      return std::vector<int32_t>(n, **count);
    }
    using executorch::aten::ScalarType;
    std::vector<int64_t> found;
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      const auto numel = static_cast<size_t>(tensor.numel());
      if (numel == n && tensor.scalar_type() == ScalarType::Int) {
        const auto* data = tensor.const_data_ptr<int32_t>();
        found.assign(data, data + n);
      } else if (numel == n && tensor.scalar_type() == ScalarType::Long) {
        const auto* data = tensor.const_data_ptr<int64_t>();
        found.assign(data, data + n);
      }
    }
    if (found.size() != n) {
      return Error(
          ETKV_ERROR_PROGRAM,
          "`" + name + "` is not one integer for each of " + std::to_string(n) +
              " layers");
    }
    std::vector<int32_t> counts;
    for (const int64_t count : found) {
      if (count < 0 || count > INT32_MAX) {
        return Error(
            ETKV_ERROR_PROGRAM,
            "`" + name + "` has " + std::to_string(count) +
                ", which is not a 32-bit count");
      }
      counts.push_back(static_cast<int32_t>(count));
    }
    return counts;
  }

  const ConstantMethods& constants_;
};

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

/// Returns the dtype of this name; `unknown` where there is no such method.
inline Result<Dtype> read_dtype(const ConstantMethods& constants) {
  constexpr const char* kName = "kv_cache.dtype";
  auto value = constants(kName);
  if (!value.ok()) {
    return value.error();
  }
  if (!value->has_value()) {
    return Dtype::unknown;
  }
  if (!(*value)->isString()) {
    return Error(
        ETKV_ERROR_PROGRAM, std::string("`") + kName + "` is not a string");
  }
  const auto view = (*value)->toString();
  const std::string name(view.data(), view.size());
  if (name == "f32") {
    return Dtype::f32;
  }
  if (name == "f16") {
    return Dtype::f16;
  }
  if (name == "bf16") {
    return Dtype::bf16;
  }
  return Error(
      ETKV_ERROR_PROGRAM,
      std::string("`") + kName + "` is `" + name.substr(0, 32) +
          "`, expected f32, f16 or bf16");
}

/// The names of the constant methods: those of `kv_cache.*`, or those of
/// ExecuTorch's exporter. NULL where there is no such method.
struct MetadataNames {
  const char* n_layers;
  const char* n_kv_heads;
  const char* head_dim;
  const char* v_head_dim;
  const char* window;
  const char* sinks;
  const char* chunk;
  const char* values_in_keys;
  /// Whether a program without the method of windows has no windows.
  bool windows_optional;
};

inline constexpr MetadataNames kVersionedNames = {
    "kv_cache.n_layers",
    "kv_cache.n_kv_heads",
    "kv_cache.head_dim",
    "kv_cache.v_head_dim",
    "kv_cache.window",
    "kv_cache.sinks",
    "kv_cache.chunk",
    "kv_cache.values_in_keys",
    true};
inline constexpr MetadataNames kExporterNames = {
    "get_n_caches",
    "get_kv_heads",
    "get_head_dims",
    nullptr,
    "get_windows",
    nullptr,
    nullptr,
    nullptr,
    false};

/// The maximum layers of a program. A larger number means a damaged program.
inline constexpr int32_t kMaxLayers = 65536;

/// Reads the attention layers. There must be at least `least`.
inline Result<std::vector<LayerConfig>> read_layers(
    const Metadata& metadata,
    const MetadataNames& names,
    Dtype dtype,
    int32_t least) {
  auto n_layers = metadata.get(names.n_layers);
  if (!n_layers.ok()) {
    return n_layers.error();
  }
  if (*n_layers < least || *n_layers > kMaxLayers) {
    return Error(
        ETKV_ERROR_PROGRAM,
        std::string("`") + names.n_layers + "` is " +
            std::to_string(*n_layers) + ", expected " + std::to_string(least) +
            " to " + std::to_string(kMaxLayers));
  }
  auto kv_heads = metadata.each(names.n_kv_heads, *n_layers);
  if (!kv_heads.ok()) {
    return kv_heads.error();
  }
  auto head_dims = metadata.each(names.head_dim, *n_layers);
  if (!head_dims.ok()) {
    return head_dims.error();
  }
  const std::vector<int32_t> zeros(static_cast<size_t>(*n_layers), 0);
  auto v_head_dims =
      metadata.each(names.v_head_dim, *n_layers, head_dims.value());
  if (!v_head_dims.ok()) {
    return v_head_dims.error();
  }
  using Counts = std::optional<std::vector<int32_t>>;
  auto windows = metadata.each(
      names.window,
      *n_layers,
      names.windows_optional ? Counts(zeros) : Counts());
  if (!windows.ok()) {
    return windows.error();
  }
  auto sinks = metadata.each(names.sinks, *n_layers, zeros);
  if (!sinks.ok()) {
    return sinks.error();
  }
  auto chunks = metadata.each(names.chunk, *n_layers, zeros);
  if (!chunks.ok()) {
    return chunks.error();
  }
  auto in_keys = metadata.each(names.values_in_keys, *n_layers, zeros);
  if (!in_keys.ok()) {
    return in_keys.error();
  }
  std::vector<LayerConfig> layers;
  for (size_t i = 0; i < zeros.size(); ++i) {
    if ((*in_keys)[i] > 1) {
      return Error(
          ETKV_ERROR_PROGRAM,
          std::string("`") + names.values_in_keys + "` has " +
              std::to_string((*in_keys)[i]) + ", expected 0 or 1");
    }
    layers.push_back(
        {(*kv_heads)[i],
         (*head_dims)[i],
         (*v_head_dims)[i],
         (*windows)[i],
         (*sinks)[i],
         dtype,
         (*in_keys)[i] == 1,
         (*chunks)[i]});
  }
  return layers;
}

/// Returns the layer that 8 integers of metadata describe: its kind, and the
/// sizes in the order of RecurrentLayerConfig. Returns nullopt for sizes that
/// no layer can have.
inline std::optional<RecurrentLayerConfig> recurrent_layer(
    const std::vector<int32_t>& facts) {
  const auto is_zero = [](int32_t fact) { return fact == 0; };
  const auto channels = facts.begin() + 1, k_heads = channels + 2,
             decay = k_heads + 4;
  if (facts[0] == ETKV_RECURRENT_CONVOLUTION) {
    if (std::none_of(channels, k_heads, is_zero) &&
        std::all_of(k_heads, facts.end(), is_zero)) {
      return RecurrentLayerConfig::convolution(facts[1], facts[2]);
    }
  } else if (facts[0] == ETKV_RECURRENT_RECURRENCE) {
    if (std::all_of(channels, k_heads, is_zero) &&
        std::none_of(k_heads, decay, is_zero) && *decay <= 1 &&
        facts[4] % facts[3] == 0) {
      return RecurrentLayerConfig::recurrence(
          facts[3], facts[4], facts[5], facts[6], *decay == 1);
    }
  }
  return std::nullopt;
}

inline Result<std::vector<RecurrentLayerConfig>> read_recurrent_layers(
    const Metadata& metadata) {
  constexpr const char* kName = "kv_cache.recurrent_layers";
  constexpr int32_t kFacts = 8;
  auto facts = metadata.rows(kName, kFacts, kMaxLayers);
  if (!facts.ok()) {
    return facts.error();
  }
  std::vector<RecurrentLayerConfig> layers;
  for (auto at = facts->begin(); at != facts->end(); at += kFacts) {
    const std::vector<int32_t> row(at, at + kFacts);
    const auto layer = recurrent_layer(row);
    if (!layer) {
      std::string listed;
      for (const int32_t fact : row) {
        listed += (listed.empty() ? "" : ", ") + std::to_string(fact);
      }
      return Error(
          ETKV_ERROR_PROGRAM,
          "layer " + std::to_string(layers.size()) + " of `" + kName +
              "` is [" + listed + "], which describes no recurrent layer");
    }
    layers.push_back(*layer);
  }
  return layers;
}
} // namespace detail

/// Reads the facts of a program's caches from its constant methods.
///
/// With `kv_cache.schema_version`, there are `kv_cache.n_layers` layers that
/// attend. `kv_cache.n_kv_heads`, `head_dim`, `v_head_dim`, `window`, `sinks`,
/// `chunk` and `values_in_keys` describe each: an integer for all layers, or a
/// tensor of one integer per layer. All but the first two are optional.
/// `kv_cache.dtype` is the dtype that the program computes in: f32, f16 or bf16.
/// It is optional.
///
/// In version 1 all layers attend. In version 2, `kv_cache.n_layers` may be 0,
/// and `kv_cache.recurrent_layers` is a tensor of 8 integers per recurrent
/// layer: its kind, as in etkv_recurrent_kind, and the fields of
/// RecurrentLayerConfig in order. Programs with chunks have version 3, with or
/// without recurrent layers. Other versions are refused.
///
/// Without `kv_cache.schema_version`, the layers are those that ExecuTorch's
/// exporter writes: get_n_caches, get_kv_heads, get_head_dims and get_windows.
///
/// The step length is get_prefill_chunk_size. The context length is
/// get_max_ctx_len, or else get_max_context_len, or else get_max_seq_len.
inline Result<ModelCacheParams> read_kv_cache_metadata(
    const ConstantMethods& constants) {
  const detail::Metadata metadata(constants);
  auto version = metadata.find("kv_cache.schema_version");
  if (!version.ok()) {
    return version.error();
  }
  bool is_recurrent = *version == kRecurrentMetadataVersion;
  if (*version == kChunkMetadataVersion) {
    auto has = metadata.has("kv_cache.recurrent_layers");
    if (!has.ok()) {
      return has.error();
    }
    is_recurrent = *has;
  }
  if (version->has_value() &&
      (**version < kMetadataVersion || **version > kChunkMetadataVersion)) {
    return Error(
        ETKV_ERROR_PROGRAM,
        "the program's kv_cache.schema_version is " +
            std::to_string(**version) + "; this etkv reads versions " +
            std::to_string(kMetadataVersion) + " to " +
            std::to_string(kChunkMetadataVersion));
  }
  auto dtype = detail::read_dtype(constants);
  if (!dtype.ok()) {
    return dtype.error();
  }
  auto layers = detail::read_layers(
      metadata,
      version->has_value() ? detail::kVersionedNames : detail::kExporterNames,
      *dtype,
      is_recurrent ? 0 : 1);
  if (!layers.ok()) {
    return layers.error();
  }
  std::vector<RecurrentLayerConfig> recurrent_layers;
  if (is_recurrent) {
    auto read = detail::read_recurrent_layers(metadata);
    if (!read.ok()) {
      return read.error();
    }
    recurrent_layers = std::move(read.value());
  }
  auto chunk = metadata.first({"get_prefill_chunk_size"});
  if (!chunk.ok()) {
    return chunk.error();
  }
  auto context = metadata.first(
      {"get_max_ctx_len", "get_max_context_len", "get_max_seq_len"});
  if (!context.ok()) {
    return context.error();
  }
  return ModelCacheParams{
      std::move(layers.value()),
      *chunk,
      *context,
      kMLXBackend,
      std::move(recurrent_layers)};
}

/// Reads the same facts for one method of a program, which must run on the
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
    if (input.ok() && input->scalar_type() == kLong &&
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
