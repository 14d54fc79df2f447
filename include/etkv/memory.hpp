// Bytes of caches' buffers, and their limit. A part of etkv.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/memory.h"
#include "etkv/result.hpp"

namespace etkv {

/// Bytes of one attention layer's buffers.
struct LayerMemory {
  uint64_t k_allocated = 0;
  uint64_t k_used = 0;
  uint64_t v_allocated = 0;
  uint64_t v_used = 0;
};

/// Bytes of one recurrent layer's buffers; see etkv_recurrent_layer_memory.
struct RecurrentLayerMemory {
  uint64_t rows_allocated = 0;
  uint64_t rows_used = 0;
  uint64_t anchors_allocated = 0;
  uint64_t anchors_used = 0;
};

/// Bytes of a cache's buffers.
struct Memory {
  uint64_t allocated = 0;          ///< bytes of all buffers
  uint64_t used = 0;               ///< the part that positions use
  uint64_t at_capacity = 0;        ///< the maximum that it can ever hold
  std::vector<LayerMemory> layers; ///< the same for each attention layer
  uint64_t shared = 0; ///< bytes of a prefix's rows; not in other fields
  /// The bytes of each recurrent layer's buffers.
  std::vector<RecurrentLayerMemory> recurrent_layers = {};
};

namespace detail {
/// Calls a C function that fills an etkv_memory for `n_layers` attention layers
/// and `n_recurrent_layers` recurrent layers.
template <typename Function, typename... Arguments>
Result<Memory> ask_memory(
    size_t n_layers,
    size_t n_recurrent_layers,
    Function function,
    Arguments... arguments) {
  std::vector<etkv_layer_memory> layers(n_layers);
  std::vector<etkv_recurrent_layer_memory> recurrent_layers(n_recurrent_layers);
  etkv_memory raw{};
  raw.struct_size = sizeof(raw);
  if (!layers.empty()) {
    layers[0].struct_size = sizeof(layers[0]);
    raw.layers = layers.data();
    raw.n_layers = layers.size();
  }
  if (!recurrent_layers.empty()) {
    recurrent_layers[0].struct_size = sizeof(recurrent_layers[0]);
    raw.recurrent_layers = recurrent_layers.data();
    raw.n_recurrent_layers = recurrent_layers.size();
  }
  if (auto filled = run(function, arguments..., &raw); !filled.ok()) {
    return filled.error();
  }
  Memory memory{raw.allocated, raw.used, raw.at_capacity, {}, raw.shared};
  memory.layers.reserve(n_layers);
  for (const auto& layer : layers) {
    memory.layers.push_back(
        {layer.k_allocated, layer.k_used, layer.v_allocated, layer.v_used});
  }
  memory.recurrent_layers.reserve(n_recurrent_layers);
  for (const auto& layer : recurrent_layers) {
    memory.recurrent_layers.push_back(
        {layer.rows_allocated,
         layer.rows_used,
         layer.anchors_allocated,
         layer.anchors_used});
  }
  return memory;
}
} // namespace detail

/// Bytes of the buffers of all caches in this process, and their limit.
struct MemoryBudget {
  uint64_t limit = 0;  ///< the maximum that they may hold; 0: no limit
  uint64_t held = 0;   ///< bytes that they hold, old and new in a replacement
  uint64_t peak = 0;   ///< the maximum that they have held or reserved
  size_t n_caches = 0; ///< the number of caches, including empty ones
};

/// Limits the bytes of the buffers of all caches in this process; 0 removes the
/// limit. A call that would exceed the limit fails and changes nothing
/// (`etkv_memory_budget_set`).
inline Result<void> set_memory_budget(uint64_t limit) {
  return detail::run(etkv_memory_budget_set, limit);
}

/// Returns the bytes that all caches in this process hold, and their limit.
inline Result<MemoryBudget> memory_budget() {
  etkv_memory_budget raw{};
  raw.struct_size = sizeof(raw);
  if (auto filled = detail::run(etkv_memory_budget_read, &raw); !filled.ok()) {
    return filled.error();
  }
  return MemoryBudget{raw.limit, raw.held, raw.peak, raw.n_caches};
}

/// Frees memory of the host's choice, as etkv_memory_callback does: in the
/// middle of the call that needs `bytes` more, on any thread and on several at
/// once. Returns the bytes that it freed. If it throws, it counts as having
/// freed none.
using MemoryCallback = std::function<uint64_t(uint64_t bytes)>;

namespace detail {
struct MemoryState {
  std::mutex mutex;
  std::unique_ptr<MemoryCallback> callback;
};
inline MemoryState& memory_state() {
  // Never destroyed: other threads may need memory while the process ends.
  static MemoryState* state = new MemoryState;
  return *state;
}
/// Whether this thread is in the callback.
inline bool& in_memory_callback() {
  thread_local bool inside = false;
  return inside;
}
inline uint64_t free_memory(uint64_t bytes, void* user) noexcept {
  in_memory_callback() = true;
  uint64_t freed = 0;
#if defined(__cpp_exceptions)
  try {
    freed = (*static_cast<const MemoryCallback*>(user))(bytes);
  } catch (...) {
  }
#else
  freed = (*static_cast<const MemoryCallback*>(user))(bytes);
#endif
  in_memory_callback() = false;
  return freed;
}
} // namespace detail

/// Sets the callback that may free memory before the memory budget refuses a
/// call. It replaces the earlier callback, which is destroyed before this call
/// returns. An empty callback removes the earlier one. See
/// etkv_memory_budget_set_callback for the errors.
inline Result<void> set_memory_callback(MemoryCallback callback) {
  auto& state = detail::memory_state();
  std::unique_ptr<MemoryCallback> next;
  const auto set = [&] {
    return detail::run(
        etkv_memory_budget_set_callback,
        next ? detail::free_memory : nullptr,
        next.get());
  };
  if (detail::in_memory_callback()) {
    // This call is refused. It takes no lock: the thread that has the lock may
    // wait for this one.
    return set();
  }
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (callback) {
    next = std::make_unique<MemoryCallback>(std::move(callback));
  }
  auto done = set();
  if (done.ok()) {
    state.callback = std::move(next);
  }
  return done;
}

} // namespace etkv
