// Logits in a program's memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include <executorch/runtime/core/exec_aten/exec_aten.h>

#include "etkv/etkv.hpp"

namespace etkv::examples {

/// A view of rows of logits in the program's memory and dtype: float32, float16
/// or bfloat16. Valid until the program runs again.
struct LogitsView {
  const void* data = nullptr;
  executorch::aten::ScalarType type = executorch::aten::ScalarType::Float;
  int64_t rows = 0;
  int64_t vocabulary = 0;

  int64_t last_row() const {
    return rows - 1;
  }
};

/// Returns a view of `tensor`, whose last dimension is the vocabulary.
Result<LogitsView> view_logits(const executorch::aten::Tensor& tensor);

/// Refuses logits without a row for each of `n_tokens` tokens: a program may
/// have been exported with `--logits last`.
Result<void> check_rows(const LogitsView& logits, size_t n_tokens);

/// Returns the index of the greatest logit of a row; the first index if several
/// are equal. Returns an error if all logits are NaN.
Result<int64_t> argmax(const LogitsView& logits, int64_t row);

/// Returns the natural logarithm of the softmax probability of one index of a
/// row.
double log_probability(const LogitsView& logits, int64_t row, int64_t index);

/// Writes a row as float32 to `out`. `out` must have room for the vocabulary.
void copy_row(const LogitsView& logits, int64_t row, float* out);

} // namespace etkv::examples
