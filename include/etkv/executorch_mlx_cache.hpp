// etkv's caches for ExecuTorch's own MLX backend: a class that implements the
// interfaces of that backend's caches.
//
// For code inside ExecuTorch's tree: `MLXCache.h` and
// `extension/llm/cache/cache.h` are in its repository and not in its wheel. The
// class matches both files on its main branch of 2026-08-22, where a step
// passes its first position. It also matches a version that passes a list of
// positions. It was not tried with release 1.5.1.
//
//   auto session = etkv::make_decode_session("MLXBackend", config);
//   etkv::ExecuTorchMLXCache cache(session->cache());
//   state.cache = &cache;            // what ExecutionState takes
//   cache.as_control()->rewind(12);  // what a runner does
#pragma once

#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <executorch/backends/mlx/runtime/MLXCache.h>
#include <executorch/extension/llm/cache/cache.h>

#include "etkv/mlx_cache.hpp"

namespace etkv {

/// One sequence of an etkv cache, as ExecuTorch's MLX backend and its runners
/// use it. This object shares the cache; the cache may outlive this object.
class ExecuTorchMLXCache
    : public ::executorch::extension::llm::cache::CacheBase,
      public ::executorch::extension::llm::cache::SequenceControl,
      public ::executorch::backends::mlx::MLXCache {
 public:
  /// Throws std::runtime_error if the cache is poisoned, as that backend
  /// does.
  explicit ExecuTorchMLXCache(const Cache& cache)
      : cache_(cache.share()), forwards_(taken(MLXForwards::make(cache))) {}

  ::executorch::extension::llm::cache::SequenceControl* as_control() override {
    return this;
  }
  /// Returns nullptr: etkv plans the rows itself.
  ::executorch::extension::llm::cache::SequencePlanner* as_planner() override {
    return nullptr;
  }

  /// Throws std::runtime_error if the call to the cache fails.
  bool can_extend(int n = 1) const override {
    return taken(cache_.can_extend(n));
  }
  int capacity() const override {
    return cache_.capacity();
  }
  bool rewind(int new_len) override {
    return forwards_.abort().ok() && cache_.rewind(new_len).ok();
  }
  void clear() override {
    static_cast<void>(forwards_.abort());
    static_cast<void>(cache_.clear());
  }

#ifdef __clang__
  // Exactly one of these two functions overrides a function of ExecuTorch,
  // whose sources decide which. So neither can be marked `override`.
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Winconsistent-missing-override"
#endif
  /// Writes a layer's rows and returns what its queries attend to. `position`
  /// is that of the first token. The backend declares either this function or
  /// the next. Throws std::runtime_error with etkv's message if the cache
  /// refuses the rows.
  ::executorch::backends::mlx::AttendSpec update_and_fetch(
      int layer,
      int position,
      const ::mlx::core::array& k,
      const ::mlx::core::array& v,
      ::mlx::core::StreamOrDevice s) {
    std::vector<int32_t> positions(k.ndim() == 4 ? k.shape(2) : 0);
    std::iota(positions.begin(), positions.end(), position);
    return update_and_fetch(layer, positions, k, v, s);
  }

  /// The same, with the positions of all tokens.
  ::executorch::backends::mlx::AttendSpec update_and_fetch(
      int layer,
      const std::vector<int32_t>& positions,
      const ::mlx::core::array& k,
      const ::mlx::core::array& v,
      ::mlx::core::StreamOrDevice s) {
    const auto found = taken(forwards_.update_and_fetch(
        static_cast<std::size_t>(layer), positions, k, v, s));
    using Spec = ::executorch::backends::mlx::AttendSpec;
    const auto kind = [&] {
      switch (found.kind) {
        case AttendSpec::Mask::Causal:
          return Spec::Mask::Causal;
        case AttendSpec::Mask::Explicit:
          return Spec::Mask::Explicit;
        default:
          return Spec::Mask::None;
      }
    }();
    return Spec{found.k, found.v, kind, found.mask};
  }
#ifdef __clang__
#pragma clang diagnostic pop
#endif

 private:
  template <typename T>
  static T taken(Result<T> result) {
    if (!result.ok()) {
      throw std::runtime_error(result.error().message());
    }
    return std::move(result.value());
  }

  Cache cache_;
  MLXForwards forwards_;
};

} // namespace etkv
