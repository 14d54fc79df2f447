#include "examples/common/hidden_states.hpp"

#include <cstring>

#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>

namespace etkv::examples {
namespace {

using executorch::aten::BFloat16;
using executorch::aten::Half;
using executorch::aten::ScalarType;

template <typename T>
std::vector<std::byte> elements(const std::vector<bool>& known) {
  std::vector<std::byte> bytes(known.size() * sizeof(T));
  for (size_t i = 0; i < known.size(); ++i) {
    const T value(known[i] ? 1.0F : 0.0F);
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

} // namespace

size_t HiddenStateType::bytes() const {
  return static_cast<size_t>(width) * executorch::runtime::elementSize(element);
}

std::string HiddenStateType::describe() const {
  return std::to_string(width) + " elements of " +
         executorch::runtime::toString(element);
}

Result<HiddenStateType> hidden_state_type(ScalarType element, int64_t width) {
  const HiddenStateType type{element, width};
  if (element != ScalarType::Float && element != ScalarType::Half &&
      element != ScalarType::BFloat16) {
    return Error(
        ETKV_ERROR_DTYPE,
        "the program's hidden states are " + type.describe() +
            ", not of float32, float16 or bfloat16");
  }
  if (width < 1) {
    return Error(
        ETKV_ERROR_SHAPE, "the program's hidden states are " + type.describe());
  }
  return type;
}

std::vector<std::byte> as_elements(
    const std::vector<bool>& known,
    ScalarType element) {
  switch (element) {
    case ScalarType::Half:
      return elements<Half>(known);
    case ScalarType::BFloat16:
      return elements<BFloat16>(known);
    default:
      return elements<float>(known);
  }
}

} // namespace etkv::examples
