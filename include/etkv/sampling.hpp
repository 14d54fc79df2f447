// How tokens are chosen from logits. A part of etkv.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "etkv/detail.hpp"
#include "etkv/error.h"
#include "etkv/result.hpp"
#include "etkv/sampling.h"

namespace etkv {

/// A number that is added to the logit of a token.
struct LogitBias {
  int64_t token = 0;
  float bias = 0.0F;
};

/// How a token is chosen; see etkv_sampling. As it is made: the greatest logit.
struct Sampling {
  float temperature = 0.0F;
  int32_t top_k = 0;
  float top_p = 1.0F;
  float min_p = 0.0F;
  float repetition_penalty = 1.0F;
  int32_t repetition_context = 64;
  uint64_t seed = 0;
  std::vector<LogitBias> logit_bias = {};
};

namespace detail {
/// The sampling as the C struct. It points into itself.
class RawSampling {
 public:
  explicit RawSampling(const Sampling& sampling) {
    for (const auto& [token, bias] : sampling.logit_bias) {
      biases_.push_back({token, bias, 0});
    }
    raw_.struct_size = sizeof(raw_);
    raw_.temperature = sampling.temperature;
    raw_.top_p = sampling.top_p;
    raw_.min_p = sampling.min_p;
    raw_.repetition_penalty = sampling.repetition_penalty;
    raw_.top_k = sampling.top_k;
    raw_.repetition_context = sampling.repetition_context;
    raw_.seed = sampling.seed;
    raw_.logit_bias = biases_.data();
    raw_.n_logit_bias = biases_.size();
  }
  RawSampling(const RawSampling&) = delete;
  RawSampling& operator=(const RawSampling&) = delete;

  const etkv_sampling* get() const {
    return &raw_;
  }

 private:
  std::vector<etkv_logit_bias> biases_;
  etkv_sampling raw_{};
};
} // namespace detail

/// Chooses a token from the logits of a step that the host ran; see
/// etkv_sampling_choose. `text` has the `n_text` tokens of the prompt and of the
/// answer so far, and `n` is the number of the token in the answer.
inline Result<int64_t> choose(
    const Sampling& sampling,
    const float* logits,
    size_t n_logits,
    const int64_t* text,
    size_t n_text,
    uint64_t n,
    size_t answer = 0) {
  const detail::RawSampling raw(sampling);
  return detail::ask<int64_t>([&](int64_t* token, etkv_error** error) {
    return etkv_sampling_choose(
        raw.get(), logits, n_logits, text, n_text, answer, n, token, error);
  });
}

} // namespace etkv
