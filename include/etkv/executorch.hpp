// etkv for runners on ExecuTorch: load options, and the sizes that a program
// reports. This file and those that it includes use types of ExecuTorch,
// release 1.5.
//
//   Module module("model.pte", Module::LoadMode::Mmap);
//   auto facts = etkv::read_kv_cache_metadata(module);
//   auto made = etkv::make_decode_session_and_options(
//       etkv::kMLXBackend, etkv::make_config(*facts, /*capacity=*/4096));
//   auto& [session, options] = *made;
//   etkv::load_method(module, "forward", options);
#pragma once

#include <cstdint>
#include <cstring>
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
#include "etkv/executorch_detail.hpp"
#include "etkv/executorch_metadata.hpp"

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

  /// Sets which rows of logits the program returns. CPU programs fail to load
  /// with `Logits::proposed`. With `Logits::last`, the last matrix product of a
  /// prompt, which is the widest, computes only one row. A program whose output
  /// is not such a product then fails to load.
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

/// Sets the buffers of the programs that were loaded with this buffer name to
/// zeros. The next call of each program starts afresh.
inline Result<void> reset_buffers(const char* name) {
  return detail::run(etkv_delegate_reset_buffers, name);
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
/// Returns whether `n_bytes` bytes are zero.
inline bool is_zero(const void* bytes, size_t n_bytes) {
  const auto* first = static_cast<const unsigned char*>(bytes);
  return n_bytes == 0 ||
         (*first == 0 && std::memcmp(first, first + 1, n_bytes - 1) == 0);
}

/// Releases output memory of a method to the system before its first step.
/// ExecuTorch fills this memory with zeros. In a program that returns all rows,
/// it has room for the logits of the longest step, and most of these are never
/// computed. Memory that is not all zeros, such as that of a constant, is not
/// released.
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
  if (meta.ok() && meta->uses_backend(kMLXBackend) &&
      (id == nullptr || std::strcmp(id, kMLXBackend) != 0)) {
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
/// nullopt otherwise. ExecuTorch itself returns only an error code.
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

} // namespace etkv
