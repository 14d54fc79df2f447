#include "examples/common/logits.hpp"

#include <cmath>
#include <limits>
#include <string>

#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>

namespace etkv::examples {
namespace {

using executorch::aten::BFloat16;
using executorch::aten::Half;
using executorch::aten::ScalarType;

template <typename T>
const T* row_of(const LogitsView& logits, int64_t row) {
  return static_cast<const T*>(logits.data) + row * logits.vocabulary;
}

/// Calls `visit` with a typed pointer to the row.
template <typename Visit>
auto visit_row(const LogitsView& logits, int64_t row, Visit visit) {
  switch (logits.type) {
    case ScalarType::Half:
      return visit(row_of<Half>(logits, row));
    case ScalarType::BFloat16:
      return visit(row_of<BFloat16>(logits, row));
    default:
      return visit(row_of<float>(logits, row));
  }
}

/// Returns the greatest of `n` values that are not NaN; -infinity if all are
/// NaN.
template <typename T>
float greatest(const T* values, int64_t n) {
  // Several maxima let the compiler use vector instructions, which it may not
  // do with one fixed order of comparisons.
  constexpr int64_t kMaxima = 16;
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  float maxima[kMaxima];
  for (float& maximum : maxima) {
    maximum = kLeast;
  }
  int64_t i = 0;
  for (; i + kMaxima <= n; i += kMaxima) {
    for (int64_t at = 0; at < kMaxima; ++at) {
      const float value = static_cast<float>(values[i + at]);
      maxima[at] = value > maxima[at] ? value : maxima[at];
    }
  }
  float best = kLeast;
  for (; i < n; ++i) {
    const float value = static_cast<float>(values[i]);
    best = value > best ? value : best;
  }
  for (const float maximum : maxima) {
    best = maximum > best ? maximum : best;
  }
  return best;
}

template <typename T>
int64_t first_equal(const T* values, int64_t n, float wanted) {
  for (int64_t i = 0; i < n; ++i) {
    if (static_cast<float>(values[i]) == wanted) {
      return i;
    }
  }
  return -1;
}

} // namespace

Result<LogitsView> view_logits(const executorch::aten::Tensor& tensor) {
  LogitsView view;
  view.type = tensor.scalar_type();
  if (view.type != ScalarType::Float && view.type != ScalarType::Half &&
      view.type != ScalarType::BFloat16) {
    return Error(
        ETKV_ERROR_DTYPE,
        std::string("the program's logits are of type ") +
            executorch::runtime::toString(view.type) +
            ", not float32, float16 or bfloat16");
  }
  if (tensor.dim() < 2 || tensor.numel() == 0) {
    return Error(
        ETKV_ERROR_SHAPE,
        "the program's logits have " + std::to_string(tensor.dim()) +
            " dimensions and " + std::to_string(tensor.numel()) +
            " elements, not rows of a vocabulary");
  }
  view.data = tensor.const_data_ptr();
  view.vocabulary = tensor.size(tensor.dim() - 1);
  view.rows = tensor.numel() / view.vocabulary;
  return view;
}

Result<void> check_rows(const LogitsView& logits, size_t n_tokens) {
  if (static_cast<size_t>(logits.rows) == n_tokens) {
    return {};
  }
  return Error(
      ETKV_ERROR_UNSUPPORTED,
      "the program gives logits of " + std::to_string(logits.rows) + " of " +
          std::to_string(n_tokens) +
          " tokens, and this takes all of them: export it without "
          "`--logits last`");
}

Result<int64_t> argmax(const LogitsView& logits, int64_t row) {
  const int64_t best = visit_row(logits, row, [&](const auto* values) {
    return first_equal(
        values, logits.vocabulary, greatest(values, logits.vocabulary));
  });
  if (best < 0) {
    return Error(ETKV_ERROR_PROGRAM, "the program's logits are not numbers");
  }
  return best;
}

double log_probability(const LogitsView& logits, int64_t row, int64_t index) {
  return visit_row(logits, row, [&](const auto* values) {
    const double best = greatest(values, logits.vocabulary);
    double sum = 0.0;
    for (int64_t i = 0; i < logits.vocabulary; ++i) {
      sum += std::exp(static_cast<double>(values[i]) - best);
    }
    return static_cast<double>(values[index]) - best - std::log(sum);
  });
}

void copy_row(const LogitsView& logits, int64_t row, float* out) {
  visit_row(logits, row, [&](const auto* values) {
    for (int64_t i = 0; i < logits.vocabulary; ++i) {
      out[i] = static_cast<float>(values[i]);
    }
  });
}

} // namespace etkv::examples
