// The parts of MLX's headers and of the standard library that the text of a custom kernel uses.

using int32_t = int;
using uint32_t = unsigned;

namespace cooperative_groups {}

namespace mlx::core::cu {

// The sizes or strides of an array of up to ten axes, as MLX passes them.
template <typename T>
struct Axes {
  T each[10];

  __device__ T operator[](int axis) const { return each[axis]; }
};

using Shape = Axes<int>;
using Strides = Axes<long long>;

}  // namespace mlx::core::cu
