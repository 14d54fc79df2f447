// Stands in for the header of this name in ExecuTorch's tree, with the
// declarations that etkv's adapter uses.
#pragma once

#include <optional>

#include <mlx/mlx.h>

namespace executorch::backends::mlx {

using Tensor = ::mlx::core::array;
using StreamOrDevice = ::mlx::core::StreamOrDevice;

struct AttendSpec {
  Tensor K;
  Tensor V;
  enum class Mask { None, Causal, Explicit } kind;
  std::optional<Tensor> mask;
};

class MLXCache {
 public:
  virtual ~MLXCache() = default;
  virtual AttendSpec update_and_fetch(
      int layer,
      int position,
      const Tensor& k,
      const Tensor& v,
      StreamOrDevice s) = 0;
};

} // namespace executorch::backends::mlx
