// Rows of hidden states: what a program hands on beside its logits, and what a draft is
// fed with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <executorch/runtime/core/exec_aten/exec_aten.h>

#include "etkv/etkv.hpp"

namespace etkv::examples {

/// How a row of hidden states is stored: float32, float16 or bfloat16 elements.
struct HiddenStateType {
  executorch::aten::ScalarType element = executorch::aten::ScalarType::Float;
  int64_t width = 0;

  /// Of a row.
  size_t bytes() const;

  /// "576 elements of Float"
  std::string describe() const;

  bool operator==(const HiddenStateType& other) const {
    return element == other.element && width == other.width;
  }
};

/// The type of rows whose tensor has these sizes and elements; an error for other
/// elements than the three.
Result<HiddenStateType> hidden_state_type(
    executorch::aten::ScalarType element,
    int64_t width);

/// Rows in a program's own memory, one a token. Valid until the program runs
/// again.
struct HiddenStatesView {
  const std::byte* data = nullptr;
  HiddenStateType type;
  int64_t rows = 0;

  const std::byte* row(int64_t i) const {
    return data + static_cast<size_t>(i) * type.bytes();
  }
  /// One row alone.
  HiddenStatesView only(int64_t i) const {
    return {row(i), type, 1};
  }
};

/// What a step of a draft takes besides tokens: a row of hidden states for each, and
/// whether it is the token's own or that of its parent.
struct GivenHiddenStates {
  std::vector<std::byte> rows;
  std::vector<bool> known;

  void clear() {
    rows.clear();
    known.clear();
  }
  void add(const std::byte* row, size_t bytes, bool own) {
    rows.insert(rows.end(), row, row + bytes);
    known.push_back(own);
  }
};

/// 1 and 0 as elements of this type, one for each token.
std::vector<std::byte> as_elements(
    const std::vector<bool>& known,
    executorch::aten::ScalarType element);

} // namespace etkv::examples
