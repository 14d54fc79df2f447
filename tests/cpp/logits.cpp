// The argmax of a row and its conversion to float32, in every dtype that a
// program may return.

#include <cmath>
#include <limits>

#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>

#include "fixture.hpp"

namespace etkv::tests {
namespace {

using ::executorch::aten::BFloat16;
using ::executorch::aten::Half;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename T>
examples::LogitsView view_of(const std::vector<T>& values) {
  examples::LogitsView view;
  view.data = values.data();
  view.type = ::executorch::runtime::CppTypeToScalarType<T>::value;
  view.rows = 1;
  view.vocabulary = static_cast<int64_t>(values.size());
  return view;
}

/// Returns the argmax by a simple search that skips NaN; -1 if all values are
/// NaN.
template <typename T>
int64_t plain_argmax(const std::vector<T>& values) {
  int64_t best = -1;
  for (size_t i = 0; i < values.size(); ++i) {
    const auto value = static_cast<float>(values[i]);
    if (!std::isnan(value) &&
        (best < 0 ||
         value > static_cast<float>(values[static_cast<size_t>(best)]))) {
      best = static_cast<int64_t>(i);
    }
  }
  return best;
}

template <typename T>
void compare(const std::vector<T>& values) {
  const int64_t wanted = plain_argmax(values);
  auto found = examples::argmax(view_of(values), 0);
  if (wanted < 0) {
    CHECK_REFUSED(found, ETKV_ERROR_PROGRAM, "are all NaN");
  } else {
    CHECK_INT(must(std::move(found)), wanted);
  }
}

/// Returns a row of `n` values from a small set, so that the greatest occurs
/// more than once. On average, `special` of every 16 values are NaN, -infinity
/// or zeros of either sign.
template <typename T>
std::vector<T> made_up(size_t n, uint32_t seed, uint32_t special) {
  constexpr float kSpecial[] = {kNan, -kInfinity, -0.0F, 0.0F};
  std::vector<T> values;
  for (size_t i = 0; i < n; ++i) {
    seed = seed * 1664525U + 1013904223U;
    const uint32_t bits = seed >> 8U;
    const float value =
        bits % 16U < special
            ? kSpecial[(bits >> 4U) % 4U]
            : (static_cast<float>((bits >> 4U) % 512U) - 384.0F) / 8.0F;
    values.push_back(static_cast<T>(value));
  }
  return values;
}

template <typename T>
void the_first_of_the_greatest_is_found() {
  // Sizes around the block size of the search.
  for (const size_t n :
       {1, 2, 31, 32, 33, 63, 64, 320, 1023, 1024, 1025, 2047, 2048, 5000}) {
    for (uint32_t seed = 0; seed < 8; ++seed) {
      for (const uint32_t special : {0U, 4U, 15U, 16U}) {
        compare(made_up<T>(n, seed, special));
      }
    }
    // A row with one greatest value, at either end or inside.
    for (const size_t at : {size_t{0}, n / 2, n - 1}) {
      std::vector<T> values(n, static_cast<T>(-2.0F));
      values[at] = static_cast<T>(-1.0F);
      compare(values);
      values[at] = static_cast<T>(kInfinity);
      compare(values);
    }
    std::vector<T> nothing(n, static_cast<T>(kNan));
    compare(nothing);
    nothing[n - 1] = static_cast<T>(-kInfinity);
    compare(nothing);
  }
}

void every_half_becomes_the_float_of_its_value() {
  std::vector<Half> values;
  for (uint32_t bits = 0; bits < 65536U; ++bits) {
    values.emplace_back(static_cast<uint16_t>(bits), Half::from_bits());
  }
  std::vector<float> found(values.size());
  examples::copy_row(view_of(values), 0, found.data());
  long apart = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const auto wanted = static_cast<float>(values[i]);
    const bool same = std::isnan(wanted)
                          ? std::isnan(found[i])
                          : found[i] == wanted &&
                                std::signbit(found[i]) == std::signbit(wanted);
    apart += same ? 0 : 1;
  }
  CHECK_INT(apart, 0);
}

} // namespace
} // namespace etkv::tests

int main() {
  using namespace etkv::tests;
  the_first_of_the_greatest_is_found<float>();
  the_first_of_the_greatest_is_found<Half>();
  the_first_of_the_greatest_is_found<BFloat16>();
  every_half_becomes_the_float_of_its_value();
  return check_report();
}
