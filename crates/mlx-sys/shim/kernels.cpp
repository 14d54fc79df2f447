// The text of a custom kernel as MLX compiles it, and its name in the folder where MLX caches kernels. MLX looks for
// custom kernels there too, but never writes one.

#if defined(__linux__)

#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <tuple>

#include "mlx/c/array.h"
#include "mlx/c/error.h"
#include "mlx/c/private/mlx.h"
#include "mlx/c/string.h"
#include "mlx/fast_primitives.h"
#include "mlx/version.h"

static_assert(
    MLX_VERSION_MAJOR == 0 && MLX_VERSION_MINOR == 32 && MLX_VERSION_PATCH == 2,
    "compare the state of CustomKernel, and how jit_module.cpp of this MLX "
    "names files");

// Hidden: used only by the Rust code of this crate, and not exported by libetkv.

/// Stores the name and the text of the custom kernel that computes `made`, and the number after the name in the names
/// of the kernel's files. The array `made` must not be computed yet. For other arrays the strings are empty and the
/// number is 0.
extern "C" __attribute__((visibility("hidden"))) int etkv_mlx_kernel_text(
    mlx_string* name,
    mlx_string* text,
    uint64_t* number,
    const mlx_array made) {
  *number = 0;
  try {
    auto& array = mlx_array_get_(made);
    if (!array.has_primitive() ||
        std::strcmp(array.primitive().name(), "CustomKernel") != 0) {
      return 0;
    }
    const auto state =
        static_cast<const mlx::core::fast::CustomKernel&>(array.primitive())
            .state();
    mlx_string_set_(*name, std::get<0>(state));
    mlx_string_set_(*text, std::get<1>(state));
    *number = std::hash<std::string>{}(std::get<1>(state));
    return 0;
  } catch (const std::exception& error) {
    mlx_error(error.what());
    return 1;
  }
}

#endif
