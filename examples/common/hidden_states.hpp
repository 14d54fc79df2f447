// Rows of hidden states: outputs of a program, and inputs of a draft.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <executorch/runtime/core/exec_aten/exec_aten.h>

#include "etkv/etkv.hpp"

namespace etkv::examples {

/// The type of a row of hidden states: float32, float16 or bfloat16 elements.
struct HiddenStateType {
  executorch::aten::ScalarType element = executorch::aten::ScalarType::Float;
  int64_t width = 0;

  /// Returns the bytes of a row.
  size_t bytes() const;

  /// Returns the type as text: "576 elements of Float".
  std::string describe() const;

  bool operator==(const HiddenStateType& other) const {
    return element == other.element && width == other.width;
  }
};

/// Returns the type of the rows of a tensor with this dtype and row width.
/// Returns an error for an unsupported dtype.
Result<HiddenStateType> hidden_state_type(
    executorch::aten::ScalarType element,
    int64_t width);

/// A view of rows in the program's memory, one per token. Valid until the
/// program runs again.
struct HiddenStatesView {
  const std::byte* data = nullptr;
  HiddenStateType type;
  int64_t rows = 0;

  const std::byte* row(int64_t i) const {
    return data + static_cast<size_t>(i) * type.bytes();
  }
  /// Returns a view of one row.
  HiddenStatesView only(int64_t i) const {
    return {row(i), type, 1};
  }
};

/// Additional inputs of a draft's step: for each token a row of hidden states,
/// and whether the row belongs to the token or to its parent.
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

/// Returns 1 for true and 0 for false, as elements of this dtype.
std::vector<std::byte> as_elements(
    const std::vector<bool>& known,
    executorch::aten::ScalarType element);

} // namespace etkv::examples
