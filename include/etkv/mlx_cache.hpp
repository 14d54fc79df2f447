// etkv for hosts that compute with MLX themselves: attention on a cache, with
// `mlx::core::array`. Needs C++20, MLX's headers, and the MLX that the library
// is linked to.
//
//   auto cache = etkv::make_decode_session("MLXBackend", config);
//   auto forwards = etkv::MLXForwards::make(cache->cache());
//   for (each layer)
//     x = forwards->update_and_attend(layer, positions, q, k, v, scale);
//
// A forward commits once every layer has been called exactly once; see
// etkv_forwards. Ownership, threads and errors are as etkv.h says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <mlx/mlx.h>

#include "etkv/etkv.hpp"

namespace etkv {

/// The keys and values that a layer's queries attend to, and their mask.
struct AttendSpec {
  /// The forms of a mask that MLX's scaled_dot_product_attention accepts.
  enum class Mask {
    None,    ///< every query sees all keys
    Causal,  ///< the queries are the tail of the keys
    Explicit ///< `mask` has the visible keys
  };
  mlx::core::array k; ///< [1, n_kv_heads, L, k_head_dim]
  mlx::core::array v; ///< [1, n_kv_heads, L, v_head_dim]
  Mask kind = Mask::None;
  std::optional<mlx::core::array> mask; ///< bool, [T, L]; for Explicit only
};

/// The forwards of a host on a cache; see etkv_forwards. This object shares the
/// cache.
class MLXForwards {
 public:
  /// Makes the forwards of `cache`. Fails if the cache is poisoned.
  static Result<MLXForwards> make(const Cache& cache) {
    return detail::ask<etkv_forwards*>(etkv_forwards_new, cache.raw())
        .transform([](etkv_forwards* raw) { return MLXForwards(raw); });
  }

  /// Writes a layer's rows, and returns what its queries attend to, in the
  /// dtypes of `k` and `v`.
  ///
  /// `positions` has one position per token. `k` is [1, n_kv_heads, T,
  /// k_head_dim] and `v` [1, n_kv_heads, T, v_head_dim], both of a float dtype.
  /// The work goes to the stream `s`, or the default stream of the device `s`;
  /// without `s`, to the library's own stream.
  Result<AttendSpec> update_and_fetch(
      std::size_t layer,
      const std::vector<int32_t>& positions,
      const mlx::core::array& k,
      const mlx::core::array& v,
      mlx::core::StreamOrDevice s = {}) {
    const auto stream = stream_of(s);
    const auto rows = rows_of(layer, positions, k, v, stream);
    const mlx::core::array nothing(0.0f);
    AttendSpec spec{nothing, nothing, AttendSpec::Mask::None, std::nullopt};
    mlx::core::array mask = nothing;
    etkv_mask kind = ETKV_MASK_NONE;
    const auto done = detail::run(
        etkv_forwards_update_and_fetch,
        handle_.get(),
        &rows,
        &spec.k,
        &spec.v,
        &kind,
        &mask);
    if (!done.ok()) {
      return done.error();
    }
    if (kind == ETKV_MASK_CAUSAL) {
      spec.kind = AttendSpec::Mask::Causal;
    } else if (kind == ETKV_MASK_EXPLICIT) {
      spec.kind = AttendSpec::Mask::Explicit;
      spec.mask = std::move(mask);
    }
    return spec;
  }

  /// Writes a layer's rows, and attends to the rows that the queries see, in
  /// the format that they are stored in. For few queries, quantized rows are
  /// not unpacked.
  ///
  /// `q` is [1, n_heads, T, k_head_dim]. The result is [1, n_heads, T,
  /// v_head_dim], in the dtype of `q`.
  Result<mlx::core::array> update_and_attend(
      std::size_t layer,
      const std::vector<int32_t>& positions,
      const mlx::core::array& q,
      const mlx::core::array& k,
      const mlx::core::array& v,
      float scale,
      mlx::core::StreamOrDevice s = {}) {
    const auto stream = stream_of(s);
    const auto rows = rows_of(layer, positions, k, v, stream);
    mlx::core::array attended(0.0f);
    const auto done = detail::run(
        etkv_forwards_update_and_attend,
        handle_.get(),
        &rows,
        &q,
        scale,
        &attended);
    if (!done.ok()) {
      return done.error();
    }
    return attended;
  }

  /// Rolls back an unfinished forward. Does nothing without one.
  Result<void> abort() {
    return detail::run(etkv_forwards_abort, handle_.get());
  }

 private:
  explicit MLXForwards(etkv_forwards* raw) : handle_(raw) {}

  static std::optional<mlx::core::Stream> stream_of(
      const mlx::core::StreamOrDevice& s) {
    if (std::holds_alternative<std::monostate>(s)) {
      return std::nullopt;
    }
    return mlx::core::to_stream(s);
  }

  static etkv_mlx_rows rows_of(
      std::size_t layer,
      const std::vector<int32_t>& positions,
      const mlx::core::array& k,
      const mlx::core::array& v,
      const std::optional<mlx::core::Stream>& stream) {
    etkv_mlx_rows rows{};
    rows.struct_size = sizeof(rows);
    rows.layer = layer;
    rows.positions = positions.data();
    rows.n_positions = positions.size();
    rows.k = &k;
    rows.v = &v;
    rows.stream = stream ? &*stream : nullptr;
    return rows;
  }

  detail::Handle<etkv_forwards, etkv_forwards_free> handle_;
};

} // namespace etkv
