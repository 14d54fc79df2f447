// The config of a cache, and estimates of its memory. A part of etkv.hpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "etkv/config.h"
#include "etkv/error.h"
#include "etkv/memory.h"
#include "etkv/memory.hpp"
#include "etkv/result.hpp"

namespace etkv {

/// The dtype that a program computes keys and values in; see etkv_dtype.
enum class Dtype : etkv_dtype {
  unknown = ETKV_DTYPE_UNKNOWN,
  f32 = ETKV_DTYPE_F32,
  f16 = ETKV_DTYPE_F16,
  bf16 = ETKV_DTYPE_BF16,
};

/// The sizes of the rows that one attention layer stores; see
/// etkv_layer_config.
struct LayerConfig {
  int32_t n_kv_heads = 0;
  int32_t k_head_dim = 0;
  int32_t v_head_dim = 0;
  int32_t window = 0;
  int32_t sinks = 0;
  Dtype dtype = Dtype::unknown;
  bool values_in_keys = false;
  int32_t chunk = 0;
};

/// What a recurrent layer computes; see etkv_recurrent_kind.
enum class RecurrentKind : etkv_recurrent_kind {
  convolution = ETKV_RECURRENT_CONVOLUTION,
  recurrence = ETKV_RECURRENT_RECURRENCE,
};

/// The sizes of one recurrent layer; see etkv_recurrent_layer_config. Fields of
/// the other kind of layer are 0.
struct RecurrentLayerConfig {
  RecurrentKind kind = RecurrentKind::convolution;
  int32_t channels = 0;
  int32_t width = 0;
  int32_t k_heads = 0;
  int32_t heads = 0;
  int32_t k_dim = 0;
  int32_t v_dim = 0;
  bool channel_decay = false;

  /// Returns a causal depthwise convolution. Each of its outputs reads `width`
  /// positions.
  static RecurrentLayerConfig convolution(int32_t channels, int32_t width) {
    return {RecurrentKind::convolution, channels, width};
  }
  /// Returns a recurrence: each of `heads` heads keeps a state of `k_dim` times
  /// `v_dim` elements.
  static RecurrentLayerConfig recurrence(
      int32_t k_heads,
      int32_t heads,
      int32_t k_dim,
      int32_t v_dim,
      bool channel_decay = false) {
    return {
        RecurrentKind::recurrence,
        0,
        0,
        k_heads,
        heads,
        k_dim,
        v_dim,
        channel_decay};
  }
};

/// The value of `checkpoints` for a cache that makes no checkpoints.
inline constexpr int32_t kNoCheckpoints = ETKV_NO_CHECKPOINTS;

/// How buffers grow; see etkv_growth.
enum class Growth : etkv_growth {
  doubling = ETKV_GROWTH_DOUBLING,
  step = ETKV_GROWTH_STEP,
  exact = ETKV_GROWTH_EXACT,
  upfront = ETKV_GROWTH_UPFRONT,
};

/// The config of a cache; see etkv_cache_config. Zeros and empty names mean the
/// defaults: rows are stored in the dtype of the layers.
struct CacheConfig {
  std::vector<LayerConfig> layers;
  int32_t capacity = 0;
  int32_t max_step_tokens = 0;
  Growth growth = Growth::doubling;
  int32_t min_chunk = 0;
  std::string k_format = {};
  std::string v_format = {};
  int32_t quantized_kv_start = 0;
  std::string float_format = {};
  std::vector<RecurrentLayerConfig> recurrent_layers = {};
  int32_t anchors = 0;
  int32_t checkpoints = 0; ///< kNoCheckpoints for none
};

namespace detail {
/// The config as the C struct. The struct points into `config`, which must
/// outlive this object.
class RawConfig {
 public:
  explicit RawConfig(const CacheConfig& config) {
    layers_.reserve(config.layers.size());
    for (const auto& layer : config.layers) {
      etkv_layer_config raw{};
      raw.struct_size = sizeof(raw);
      raw.n_kv_heads = layer.n_kv_heads;
      raw.k_head_dim = layer.k_head_dim;
      raw.v_head_dim = layer.v_head_dim;
      raw.window = layer.window;
      raw.sinks = layer.sinks;
      raw.dtype = static_cast<etkv_dtype>(layer.dtype);
      raw.values_in_keys = layer.values_in_keys ? 1 : 0;
      raw.chunk = layer.chunk;
      layers_.push_back(raw);
    }
    recurrent_layers_.reserve(config.recurrent_layers.size());
    for (const auto& layer : config.recurrent_layers) {
      etkv_recurrent_layer_config raw{};
      raw.struct_size = sizeof(raw);
      raw.kind = static_cast<etkv_recurrent_kind>(layer.kind);
      raw.channels = layer.channels;
      raw.width = layer.width;
      raw.k_heads = layer.k_heads;
      raw.heads = layer.heads;
      raw.k_dim = layer.k_dim;
      raw.v_dim = layer.v_dim;
      raw.channel_decay = layer.channel_decay ? 1 : 0;
      recurrent_layers_.push_back(raw);
    }
    const auto name = [](const std::string& format) {
      return format.empty() ? nullptr : format.c_str();
    };
    raw_.struct_size = sizeof(raw_);
    raw_.layers = layers_.data();
    raw_.n_layers = layers_.size();
    raw_.k_format = name(config.k_format);
    raw_.v_format = name(config.v_format);
    raw_.float_format = name(config.float_format);
    raw_.capacity = config.capacity;
    raw_.max_step_tokens = config.max_step_tokens;
    raw_.growth = static_cast<etkv_growth>(config.growth);
    raw_.min_chunk = config.min_chunk;
    raw_.quantized_kv_start = config.quantized_kv_start;
    raw_.recurrent_layers = recurrent_layers_.data();
    raw_.n_recurrent_layers = recurrent_layers_.size();
    raw_.anchors = config.anchors;
    raw_.checkpoints = config.checkpoints;
  }
  RawConfig(const RawConfig&) = delete;
  RawConfig& operator=(const RawConfig&) = delete;

  const etkv_cache_config* get() const {
    return &raw_;
  }

 private:
  std::vector<etkv_layer_config> layers_;
  std::vector<etkv_recurrent_layer_config> recurrent_layers_;
  etkv_cache_config raw_{};
};
} // namespace detail

/// Returns the bytes that a cache of kind "contiguous" and this config holds
/// once it has grown to `length` positions, 0 to the capacity. Exact to the
/// byte; no cache is made.
inline Result<Memory> estimate(const CacheConfig& config, int32_t length) {
  const detail::RawConfig raw(config);
  return detail::ask_memory(
      config.layers.size(),
      config.recurrent_layers.size(),
      etkv_cache_config_estimate,
      raw.get(),
      length);
}

/// Returns the same for caches of the kinds "seq" and "tree" while they hold
/// one sequence.
inline Result<Memory> estimate_shared(
    const CacheConfig& config,
    int32_t length) {
  const detail::RawConfig raw(config);
  return detail::ask_memory(
      config.layers.size(),
      config.recurrent_layers.size(),
      etkv_cache_config_estimate_shared,
      raw.get(),
      length);
}

} // namespace etkv
