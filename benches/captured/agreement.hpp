// Compares the logits of the same steps on two sides.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "examples/common/logits.hpp"
#include "examples/common/program.hpp"

namespace etkv::benches {

/// All logits of a step, row by row.
inline std::vector<float> rows_of(const examples::LogitsView& logits) {
  std::vector<float> rows(static_cast<size_t>(logits.rows * logits.vocabulary));
  for (int64_t row = 0; row < logits.rows; ++row) {
    examples::copy_row(logits, row, rows.data() + row * logits.vocabulary);
  }
  return rows;
}

/// All hidden states of a program's last step, row by row; empty if the program
/// returns none.
inline std::vector<float> hidden_of(const examples::Program& program) {
  const auto& hidden = program.hidden_states();
  if (!hidden) {
    return {};
  }
  const auto& [element, width] = hidden->type;
  return rows_of({hidden->data, element, hidden->rows, width});
}

/// The argmax of each row; the first one if several logits are equal.
inline std::vector<int64_t> greatest(
    const std::vector<float>& logits,
    size_t rows) {
  const size_t wide = logits.size() / rows;
  std::vector<int64_t> places;
  for (size_t row = 0; row < rows; ++row) {
    const float* from = logits.data() + row * wide;
    places.push_back(std::max_element(from, from + wide) - from);
  }
  return places;
}

/// Returns the number of indices at which two lists are equal.
inline size_t equal(
    const std::vector<int64_t>& a,
    const std::vector<int64_t>& b) {
  size_t same = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    same += a[i] == b[i] ? 1 : 0;
  }
  return same;
}

/// Returns the number of rows whose chosen id has a logit too far below the
/// greatest one: further below than the rounding of bfloat16 explains in steps
/// that sum in different orders.
inline size_t not_greatest(
    const std::vector<float>& logits,
    const std::vector<int64_t>& chosen) {
  const auto best = greatest(logits, chosen.size());
  const size_t wide = logits.size() / chosen.size();
  size_t wrong = 0;
  for (size_t row = 0; row < chosen.size(); ++row) {
    const float* of = logits.data() + row * wide;
    const int64_t id = chosen[row];
    const bool exists = id >= 0 && id < static_cast<int64_t>(wide);
    const float most = of[best[row]];
    wrong += exists && of[id] >= most - 0.02F * std::abs(most) ? 0 : 1;
  }
  return wrong;
}

/// The largest difference of logits or hidden states, and the rows with the
/// same argmax.
class Agreement {
 public:
  void add(
      const std::vector<float>& found,
      const std::vector<float>& expected,
      size_t rows) {
    for (size_t i = 0; i < expected.size(); ++i) {
      const double apart = std::abs(double{found[i]} - double{expected[i]});
      // NaN counts as the largest difference.
      apart_ = std::isnan(apart) || apart > apart_ ? apart : apart_;
      largest_ = std::max(largest_, std::abs(double{expected[i]}));
    }
    rows_ += rows;
    same_ += equal(greatest(found, rows), greatest(expected, rows));
  }

  void print(const char* what, const char* of = "logits") const {
    std::printf(
        "%s: %s differ by %.4f of up to %.3f, %zu of %zu rows have the same "
        "argmax\n",
        what,
        of,
        apart_,
        largest_,
        same_,
        rows_);
    std::fflush(stdout);
  }

  /// Returns whether all differences are at most this share of the largest
  /// logit.
  bool is_within(double part) const {
    return rows_ > 0 && apart_ <= part * largest_;
  }

  /// Returns whether rounding explains the differences. In bfloat16, another
  /// order of summation in 16 layers changes logits by at most a twentieth of
  /// the largest logit, and with packed weights by at most a ninth, because the
  /// largest logits of repeating weights are small. The argmax stays the same
  /// in 19 of 20 rows; in the other rows two logits are close. The check allows
  /// about twice these differences. It detects wrong weights and masks, but not
  /// one wrong key among many. With trained weights, differences in bfloat16
  /// may be larger: for such tokens torch's logits of SmolLM2-135M in bfloat16
  /// differ from those in float32 by 9, where the largest logit is 36.
  bool is_rounding() const {
    return rows_ > 0 && apart_ < 0.2 * largest_ && 10 * same_ >= 9 * rows_;
  }

 private:
  double apart_ = 0.0;
  double largest_ = 0.0;
  size_t rows_ = 0;
  size_t same_ = 0;
};

} // namespace etkv::benches
