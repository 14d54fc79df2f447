// Bytes of caches' buffers, and their limit. A part of etkv.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/memory.h"
#include "etkv/result.hpp"

namespace etkv {

/// Bytes of one layer's buffers.
struct LayerMemory {
  uint64_t k_allocated = 0;
  uint64_t k_used = 0;
  uint64_t v_allocated = 0;
  uint64_t v_used = 0;
};

/// Bytes of a cache's buffers.
struct Memory {
  uint64_t allocated = 0;          ///< bytes of all buffers
  uint64_t used = 0;               ///< bytes of these that positions use
  uint64_t at_capacity = 0;        ///< the most that it can come to hold
  std::vector<LayerMemory> layers; ///< the same layer by layer
  uint64_t shared = 0; ///< rows of a prefix, which are not among the others
};

namespace detail {
/// Calls a C function that fills an etkv_memory for `n_layers` layers.
template <typename Call>
Result<Memory> ask_memory(size_t n_layers, Call call) {
  std::vector<etkv_layer_memory> layers(n_layers);
  etkv_memory raw{};
  raw.struct_size = sizeof(raw);
  if (!layers.empty()) {
    layers[0].struct_size = sizeof(layers[0]);
    raw.layers = layers.data();
    raw.n_layers = layers.size();
  }
  if (auto filled = run([&](etkv_error** error) { return call(&raw, error); });
      !filled.ok()) {
    return filled.error();
  }
  Memory memory{raw.allocated, raw.used, raw.at_capacity, {}, raw.shared};
  memory.layers.reserve(n_layers);
  for (const auto& layer : layers) {
    memory.layers.push_back(
        {layer.k_allocated, layer.k_used, layer.v_allocated, layer.v_used});
  }
  return memory;
}
} // namespace detail

/// Bytes of the buffers of all caches in this process, and their limit.
struct MemoryBudget {
  uint64_t limit = 0;  ///< the most that they may hold, or 0 for no limit
  uint64_t held = 0;   ///< what they hold, while some are replaced both
  uint64_t peak = 0;   ///< the most that they have held or reserved
  size_t n_caches = 0; ///< the caches that there are, empty ones too
};

/// Limits the bytes of the buffers of all caches in this process; 0 removes the
/// limit. What would hold more fails and changes nothing
/// (`etkv_memory_budget_set`).
inline Result<void> set_memory_budget(uint64_t limit) {
  return detail::run(
      [&](etkv_error** error) { return etkv_memory_budget_set(limit, error); });
}

/// Returns what all caches in this process hold, and their limit.
inline Result<MemoryBudget> memory_budget() {
  etkv_memory_budget raw{};
  raw.struct_size = sizeof(raw);
  if (auto filled = detail::run([&](etkv_error** error) {
        return etkv_memory_budget_read(&raw, error);
      });
      !filled.ok()) {
    return filled.error();
  }
  return MemoryBudget{raw.limit, raw.held, raw.peak, raw.n_caches};
}

} // namespace etkv
