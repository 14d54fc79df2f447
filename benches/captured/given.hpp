// Generated hidden states for drafts that read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <executorch/runtime/core/exec_aten/exec_aten.h>

#include "examples/common/hidden_states.hpp"

namespace etkv::benches {

/// Returns rows with values from -1 to 1 for the tokens at `n` positions. Every
/// third row is a copy of the previous token's row.
inline examples::GivenHiddenStates
given_rows(const examples::HiddenStateType& type, size_t at, size_t n) {
  examples::GivenHiddenStates given;
  std::vector<std::byte> row(type.bytes());
  const size_t size = row.size() / static_cast<size_t>(type.width);
  for (size_t i = at; i < at + n; ++i) {
    for (size_t j = 0; j < static_cast<size_t>(type.width); ++j) {
      const auto hash = static_cast<uint32_t>(i * 40503 + j) * 2654435761U;
      const float x = static_cast<float>(hash >> 8) / (1 << 23) - 1.0F;
      std::byte* to = row.data() + j * size;
      switch (type.element) {
        case executorch::aten::ScalarType::BFloat16: {
          const executorch::aten::BFloat16 element(x);
          std::memcpy(to, &element, size);
          break;
        }
        case executorch::aten::ScalarType::Half: {
          const executorch::aten::Half element(x);
          std::memcpy(to, &element, size);
          break;
        }
        default:
          std::memcpy(to, &x, size);
      }
    }
    given.add(row.data(), row.size(), i % 3 != 2);
  }
  return given;
}

} // namespace etkv::benches
