// The half-precision accessors that mlx-c omits if the C compiler has no half types. Values are passed as bits.
#include <cstdint>
#include <cstring>

#include "mlx/c/error.h"
#include "mlx/c/private/array.h"

namespace {
template <typename Half>
int item_bits(std::uint16_t* res, const mlx_array arr) {
  try {
    const Half value = mlx_array_get_(arr).item<Half>();
    static_assert(sizeof(value) == sizeof(*res));
    std::memcpy(res, &value, sizeof(*res));
  } catch (std::exception& e) {
    mlx_error(e.what());
    return 1;
  }
  return 0;
}

template <typename Half>
const std::uint16_t* data_bits(const mlx_array arr) {
  try {
    return reinterpret_cast<const std::uint16_t*>(
        mlx_array_get_(arr).data<Half>());
  } catch (std::exception& e) {
    mlx_error(e.what());
    return nullptr;
  }
}
} // namespace

extern "C" int mlx_array_item_float16(std::uint16_t* res, const mlx_array arr) {
  return item_bits<mlx::core::float16_t>(res, arr);
}

extern "C" int mlx_array_item_bfloat16(
    std::uint16_t* res,
    const mlx_array arr) {
  return item_bits<mlx::core::bfloat16_t>(res, arr);
}

extern "C" const std::uint16_t* mlx_array_data_float16(const mlx_array arr) {
  return data_bits<mlx::core::float16_t>(arr);
}

extern "C" const std::uint16_t* mlx_array_data_bfloat16(const mlx_array arr) {
  return data_bits<mlx::core::bfloat16_t>(arr);
}
