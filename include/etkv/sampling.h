/*
 * How tokens are chosen from logits. A part of etkv.h, whose conventions hold
 * here.
 */
#ifndef ETKV_SAMPLING_H
#define ETKV_SAMPLING_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A number that is added to the logit of a token; -INFINITY forbids it. */
typedef struct etkv_logit_bias {
  int64_t token;
  float bias;
  /** 0. */
  int32_t reserved;
} etkv_logit_bias;

/**
 * How a token is chosen. With zeros in every field but `struct_size` it is the
 * token with the greatest logit, the first of equals.
 *
 * The bias is added first, then repeated tokens are penalized, then the logits
 * are divided by the temperature; `top_k`, `top_p` and `min_p` then say which
 * tokens are kept, in this order.
 */
typedef struct etkv_sampling {
  size_t struct_size;
  /** At least 0. At 0 the greatest logit is chosen. */
  float temperature;
  /**
   * Keeps the fewest of the most probable tokens that have this share of the
   * probability: more than 0, at most 1. 0 for 1, which keeps all.
   */
  float top_p;
  /** Keeps tokens of at least this share of the greatest probability: 0 to 1.
   */
  float min_p;
  /**
   * Divides positive logits of tokens that are in the text, and multiplies
   * negative ones. 0 for 1, which changes nothing.
   */
  float repetition_penalty;
  /** Keeps the tokens of so many greatest logits; 0 keeps all. */
  int32_t top_k;
  /**
   * The last tokens of the text that count as repeated; 0 for 64. The text of an
   * etkv_generation is its prompt and answer, not what the cache held before.
   */
  int32_t repetition_context;
  /** The same seed chooses the same tokens from the same logits. */
  uint64_t seed;
  /** `n_logit_bias` of them; a token that comes twice has the sum. */
  const etkv_logit_bias* logit_bias;
  size_t n_logit_bias;
} etkv_sampling;

/**
 * Stores the token that `sampling` chooses from the logits of a step that the
 * host ran. Called with the same numbers, it chooses what an etkv_generation
 * does, but for what the last bits of a float decide.
 *
 * @param sampling  NULL for the greatest logit.
 * @param logits    `n_logits` logits, one for each token of the vocabulary.
 * @param text      the prompt's `n_text` tokens, with those of the answer.
 * @param answer    the number of the answer, where several have the same seed.
 * @param n         the number of the token in the answer, from 0.
 *
 * ETKV_ERROR_INVALID_ARGUMENT for logits that are not numbers.
 */
ETKV_API etkv_status etkv_sampling_choose(
    const etkv_sampling* sampling,
    const float* logits,
    size_t n_logits,
    const int64_t* text,
    size_t n_text,
    size_t answer,
    uint64_t n,
    int64_t* token,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_SAMPLING_H */
