#include "examples/common/logits.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
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

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

float to_float(float value) {
  return value;
}

float to_float(BFloat16 value) {
  return static_cast<float>(value);
}

/// Like ExecuTorch's conversion, but without branches, so that the compiler can
/// vectorize a loop over a row.
float to_float(Half value) {
  constexpr uint32_t kSign = 0x8000U;
  constexpr uint32_t kMinNotFinite = 0x7c00U;
  constexpr uint32_t kFloatExponent = 0x7f800000U;
  // Exponents of float16 are biased by 15, exponents of float32 by 127.
  constexpr float kRebias = 0x1p112F;
  const uint32_t magnitude = value.x & ~kSign;
  const float scaled = bits_as<float>(magnitude << 13U) * kRebias;
  const uint32_t not_finite = magnitude >= kMinNotFinite ? kFloatExponent : 0U;
  const uint32_t sign = (value.x & kSign) << 16U;
  return bits_as<float>(bits_as<uint32_t>(scaled) | not_finite | sign);
}

constexpr float kMin = -std::numeric_limits<float>::infinity();

/// Returns the greatest of `n` values that are not NaN; -infinity if all are
/// NaN.
template <typename T>
float greatest(const T* values, int64_t n) {
  // Several independent maxima let the compiler vectorize the comparisons.
  constexpr int64_t kMaxima = 32;
  float maxima[kMaxima];
  for (float& maximum : maxima) {
    maximum = kMin;
  }
  int64_t i = 0;
  for (; i + kMaxima <= n; i += kMaxima) {
    for (int64_t at = 0; at < kMaxima; ++at) {
      const float value = to_float(values[i + at]);
      maxima[at] = value > maxima[at] ? value : maxima[at];
    }
  }
  float best = kMin;
  for (; i < n; ++i) {
    const float value = to_float(values[i]);
    best = value > best ? value : best;
  }
  for (const float maximum : maxima) {
    best = maximum > best ? maximum : best;
  }
  return best;
}

template <typename T>
int64_t first_equal(const T* values, int64_t from, int64_t end, float wanted) {
  for (int64_t i = from; i < end; ++i) {
    if (to_float(values[i]) == wanted) {
      return i;
    }
  }
  return -1;
}

/// Returns the index of the greatest of `n` values; the first index if several
/// are equal, and -1 if all are NaN.
template <typename T>
int64_t first_greatest(const T* values, int64_t n) {
  // The search for the index is not vectorized. So only one block is searched,
  // the first block with the greatest value.
  constexpr int64_t kBlock = 1024;
  float best = kMin;
  int64_t best_start = -1;
  for (int64_t start = 0; start < n; start += kBlock) {
    const float value = greatest(values + start, std::min(kBlock, n - start));
    if (value > best) {
      best = value;
      best_start = start;
    }
  }
  if (best_start < 0) {
    return first_equal(values, 0, n, kMin);
  }
  return first_equal(
      values, best_start, std::min(best_start + kBlock, n), best);
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
      "the program returns logits of " + std::to_string(logits.rows) + " of " +
          std::to_string(n_tokens) +
          " tokens, expected all of them: export it without "
          "`--logits last`");
}

Result<int64_t> argmax(const LogitsView& logits, int64_t row) {
  const int64_t best = visit_row(logits, row, [&](const auto* values) {
    return first_greatest(values, logits.vocabulary);
  });
  if (best < 0) {
    return Error(ETKV_ERROR_PROGRAM, "the program's logits are all NaN");
  }
  return best;
}

double log_probability(const LogitsView& logits, int64_t row, int64_t index) {
  return visit_row(logits, row, [&](const auto* values) {
    const double best = greatest(values, logits.vocabulary);
    double sum = 0.0;
    for (int64_t i = 0; i < logits.vocabulary; ++i) {
      sum += std::exp(double{to_float(values[i])} - best);
    }
    return double{to_float(values[index])} - best - std::log(sum);
  });
}

void copy_row(const LogitsView& logits, int64_t row, float* out) {
  visit_row(logits, row, [&](const auto* values) {
    for (int64_t i = 0; i < logits.vocabulary; ++i) {
      out[i] = to_float(values[i]);
    }
  });
}

} // namespace etkv::examples
