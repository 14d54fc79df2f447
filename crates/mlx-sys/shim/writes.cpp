// Finds the buffer to which MLX has not applied its pending writes yet. mlx-c does not expose the inputs of an array,
// and a buffer that was donated for a write in place has no other reference.

#include <cstring>
#include <exception>

#include "mlx/c/array.h"
#include "mlx/c/error.h"
#include "mlx/c/private/mlx.h"
#include "mlx/primitives.h"

// Hidden: used only by the Rust code of this crate, and not exported by libetkv.
extern "C" __attribute__((visibility("hidden"))) int
etkv_mlx_array_before_writes(
    mlx_array* before,
    bool* found,
    const mlx_array written) {
  try {
    auto array = mlx_array_get_(written);
    while (array.status() == mlx::core::array::Status::unscheduled &&
           array.has_primitive()) {
      const char* name = array.primitive().name();
      if (std::strcmp(name, "SliceUpdate") != 0 &&
          std::strcmp(name, "Scatter") != 0) {
        *found = false;
        return 0;
      }
      // A copy, because `array` owns its inputs and is assigned next.
      auto target = array.inputs().at(0);
      array = target;
    }
    mlx_array_set_(*before, array);
    *found = true;
    return 0;
  } catch (const std::exception& error) {
    mlx_error(error.what());
    return 1;
  }
}
