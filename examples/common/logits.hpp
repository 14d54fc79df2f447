// A program's logits, read where it left them.
#pragma once

#include <cstdint>

#include <executorch/runtime/core/exec_aten/exec_aten.h>

#include "etkv/etkv.hpp"

namespace etkv::examples {

/// Rows of logits in the program's own memory and dtype: float32, float16 or
/// bfloat16. Valid until the program runs again.
struct LogitsView {
  const void* data = nullptr;
  executorch::aten::ScalarType type = executorch::aten::ScalarType::Float;
  int64_t rows = 0;
  int64_t vocabulary = 0;

  int64_t last_row() const {
    return rows - 1;
  }
};

/// A view of `tensor`, whose last dimension is the vocabulary.
Result<LogitsView> view_logits(const executorch::aten::Tensor& tensor);

/// The index of the greatest logit of a row, the first of equals. Logits of
/// which none is a number are an error.
Result<int64_t> argmax(const LogitsView& logits, int64_t row);

/// The natural logarithm of the probability that softmax gives to one index of a
/// row.
double log_probability(const LogitsView& logits, int64_t row, int64_t index);

/// Writes a row as float32 to `out`, which has room for the vocabulary.
void copy_row(const LogitsView& logits, int64_t row, float* out);

} // namespace etkv::examples
