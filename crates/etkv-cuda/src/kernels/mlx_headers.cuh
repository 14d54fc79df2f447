// What the text of a custom kernel has of MLX's headers and of the standard library.

using int32_t = int;
using uint32_t = unsigned;

namespace cooperative_groups {}

namespace mlx::core::cu {

// The sizes or the strides of an array, as MLX passes them: those of up to ten axes.
template <typename T>
struct Axes {
  T each[10];

  __device__ T operator[](int axis) const { return each[axis]; }
};

using Shape = Axes<int>;
using Strides = Axes<long long>;

}  // namespace mlx::core::cu
