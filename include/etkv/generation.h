/*
 * How tokens are chosen, and answers of a loaded MLX program.
 * A part of etkv.h, whose conventions apply here.
 */
#ifndef ETKV_GENERATION_H
#define ETKV_GENERATION_H

#include <stddef.h>
#include <stdint.h>

#include "etkv/cache.h"
#include "etkv/error.h"
#include "etkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Sampling ---------------------------------------------------------- */

/**
 * A number that is added to the logit of a token; -INFINITY forbids the token.
 */
typedef struct etkv_logit_bias {
  int64_t token;
  float bias;
  /** Must be 0. */
  int32_t reserved;
} etkv_logit_bias;

/**
 * How a token is chosen. A struct that is zero except for `struct_size` is
 * greedy: it chooses the argmax, the first of equal logits.
 *
 * The bias is added first, then repeated tokens are penalized, then the logits
 * are divided by the temperature. Then `top_k`, `top_p` and `min_p` drop
 * tokens, in this order.
 */
typedef struct etkv_sampling {
  size_t struct_size;
  /** At least 0. 0 is greedy. */
  float temperature;
  /**
   * Keeps the smallest set of most probable tokens with at least this total
   * probability: more than 0, at most 1. 0 stands for 1, which keeps all.
   */
  float top_p;
  /** Keeps tokens of at least this share of the greatest probability: 0 to 1.
   */
  float min_p;
  /**
   * For tokens that are already in the text, positive logits are divided by
   * this number, and negative logits are multiplied by it. 0 stands for 1,
   * which changes nothing.
   */
  float repetition_penalty;
  /** Keeps this many tokens with the greatest logits; 0 keeps all. */
  int32_t top_k;
  /**
   * How many of the last tokens of the text count as repeated; 0 means 64. The
   * text of an etkv_generation is its prompt and answer, without the tokens
   * that the cache held before.
   */
  int32_t repetition_context;
  /** The same seed chooses the same tokens from the same logits. */
  uint64_t seed;
  /** `n_logit_bias` biases; a token listed twice gets the sum. */
  const etkv_logit_bias* logit_bias;
  size_t n_logit_bias;
} etkv_sampling;

/**
 * Stores the token that `sampling` chooses from the logits of a step that the
 * host ran. With the same arguments it chooses the same token as an
 * etkv_generation, except where two tokens differ only by float rounding.
 *
 * @param sampling  NULL for greedy.
 * @param logits    `n_logits` logits, one for each token of the vocabulary.
 * @param text      `n_text` tokens: the prompt's, then those of the answer.
 * @param answer    the number of the answer, if several answers have the same
 *                  seed.
 * @param n         the index of the token in the answer, from 0.
 *
 * ETKV_ERROR_INVALID_ARGUMENT for logits that are NaN.
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

/* ---- Answers ----------------------------------------------------------- */

/**
 * A handle for answers that a program generates token by token. The device
 * chooses each token. A GPU starts the next step before the host has read the
 * previous token (async decode).
 *
 * The cache holds only what the host received. After each call of
 * etkv_generation_next() it holds the prompts, and all tokens of each answer
 * except the last. The host rewinds nothing when it stops: a step of async
 * decode is rolled back by etkv_generation_pause(), by etkv_generation_free(),
 * and by any call that changes the cache. Between calls the host may run steps
 * of other sequences. If the host moves the next position of an answer's
 * sequence, the next call returns ETKV_ERROR_POSITION.
 *
 * Calls wait for each other, and for other steps on the cache.
 */
typedef struct etkv_generation etkv_generation;

/** A text to continue. The caller owns what it points to. */
typedef struct etkv_prompt {
  size_t struct_size;
  /**
   * The tokens to append to those that the sequence already holds, at least
   * one.
   */
  const int64_t* tokens;
  size_t n_tokens;
  /** The sequence to continue; 0 in a cache of one sequence. */
  int32_t sequence;
  /** Must be 0. */
  int32_t reserved;
} etkv_prompt;

/** Whether a step starts before the host requests its token. */
typedef int32_t etkv_run_ahead;
enum {
  /**
   * Async decode on a GPU, except for captured steps. A CPU would gain nothing
   * from it, because MLX would copy each buffer that the previous step still
   * reads.
   */
  ETKV_RUN_AHEAD_AUTO = 0,
  /** Each step starts when the host requests its token. */
  ETKV_RUN_AHEAD_NEVER = 1,
  /** Async decode, even on a CPU. */
  ETKV_RUN_AHEAD_ALWAYS = 2,
};

/** The options of answers. The caller owns what the struct points to. */
typedef struct etkv_generation_options {
  size_t struct_size;
  /** How tokens are chosen; NULL for greedy. */
  const etkv_sampling* sampling;
  /** `n_stop` tokens that end an answer. */
  const int64_t* stop;
  size_t n_stop;
  /** The maximum tokens of an answer; 0 only reads the prompts. */
  int32_t max_tokens;
  /** Whether a step starts before the host requests its token. */
  etkv_run_ahead run_ahead;
} etkv_generation_options;

/** Why an answer ended. */
typedef int32_t etkv_end;
enum {
  /** The answer goes on. */
  ETKV_END_NONE = 0,
  /** The token is one of `stop`. */
  ETKV_END_STOP = 1,
  /** The answer has `max_tokens` tokens. */
  ETKV_END_LENGTH = 2,
  /** The cache is full. */
  ETKV_END_CAPACITY = 3,
};

/**
 * Prepares answers to `n_prompts` prompts, each in its own sequence, by the
 * program that was last loaded with the cache. Copies its arguments. Nothing
 * runs yet. The caller frees the handle with etkv_generation_free(). The
 * program stays in memory until then.
 *
 * ETKV_ERROR_INVALID_ARGUMENT if no MLX program is loaded with the cache, and
 * for several prompts if the program was loaded with `logits=last`.
 * ETKV_ERROR_KIND for a cache of another backend: choose tokens with
 * etkv_sampling_choose() there. ETKV_ERROR_UNSUPPORTED for a program whose
 * inputs are not tokens [1, T] and positions [T]. ETKV_ERROR_CAPACITY for
 * prompts that do not fit the cache.
 */
ETKV_API etkv_status etkv_generation_new(
    const etkv_cache* cache,
    const etkv_prompt* prompts,
    size_t n_prompts,
    const etkv_generation_options* options,
    etkv_generation** generation,
    etkv_error** error);

/** Frees the handle, and rolls back a step of async decode. */
ETKV_API void etkv_generation_free(etkv_generation* generation);

/**
 * Runs the next step of the prompts, for hosts that show progress or stop
 * midway. etkv_generation_next() runs the remaining steps.
 *
 * @param waiting  receives the number of prompt tokens that have not run.
 *
 * After an error, earlier steps stay in the cache.
 */
ETKV_API etkv_status etkv_generation_read_prompts(
    const etkv_generation* generation,
    size_t* waiting,
    etkv_error** error);

/**
 * Stores the next token of each answer.
 *
 * @param tokens  receives one token id per prompt; -1 for an answer that ended
 *                earlier.
 * @param ends    receives why an answer ends with this token, if it does.
 * @param room    the length of both arrays, at least the number of prompts.
 * @param n       receives the number of tokens; 0 if all answers have ended or
 *                were cancelled.
 *
 * ETKV_ERROR_POSITION if the host changed a sequence of the answers, and
 * ETKV_ERROR_BACKEND for logits that are NaN.
 */
ETKV_API etkv_status etkv_generation_next(
    const etkv_generation* generation,
    int64_t* tokens,
    etkv_end* ends,
    size_t room,
    size_t* n,
    etkv_error** error);

/**
 * Ends the answers. Any thread may call this function, and the call waits for
 * nothing. A running call of etkv_generation_next() returns when its step is
 * done, even a step of a prompt; that call and later ones store 0 tokens.
 * etkv_generation_read_prompts() runs nothing more, and stores the number of
 * tokens that have not run. The cache holds the steps that were done. Free the
 * handle only when no thread uses it.
 */
ETKV_API etkv_status
etkv_generation_cancel(const etkv_generation* generation, etkv_error** error);

/**
 * Rolls back a step of async decode, if there is one, for a host that will not
 * request the next token soon. The next call of etkv_generation_next() runs
 * that step again.
 */
ETKV_API etkv_status
etkv_generation_pause(const etkv_generation* generation, etkv_error** error);

/**
 * Runs one step of the program that was last loaded with the cache, as its
 * `forward` would, and stores the argmax of each token's logits, the first of
 * equal logits. The logits stay on the device: on a GPU, copying the logits of
 * a few tokens takes longer than verifying the tokens. To verify a tree, call
 * etkv_tree_cache_propose() first, and pass the tokens in the order of the
 * proposed nodes. Declare a step of several sequences first, as for `forward`.
 *
 * @param tokens     `n` token ids, at least one.
 * @param positions  the position of each token.
 * @param chosen     receives `n` token ids: the argmax for each token.
 *
 * ETKV_ERROR_INVALID_ARGUMENT if no MLX program is loaded with the cache, and
 * ETKV_ERROR_KIND for a cache of another backend. ETKV_ERROR_UNSUPPORTED for a
 * program whose inputs are not tokens [1, T] and positions [T], and for several
 * tokens if the program was loaded with `logits=last`. ETKV_ERROR_BACKEND for
 * logits that are NaN, and the errors of a step that the cache refuses. After
 * an error the cache is as it was.
 */
ETKV_API etkv_status etkv_generation_choose(
    const etkv_cache* cache,
    const int64_t* tokens,
    const int32_t* positions,
    size_t n,
    int64_t* chosen,
    etkv_error** error);

/**
 * Warms up the MLX program that was last loaded with the cache, while the cache
 * is empty. On a GPU it runs steps of several lengths and rolls them back, so
 * that the first token takes no longer than later ones. Compiled kernels are
 * kept in the user's cache folder for later processes (docs/performance.md).
 * Does nothing on a CPU, and for a cache that holds positions. Stops without an
 * error before the first step that the memory budget does not allow.
 *
 * @param progress  called before each step and at the end, with the number of
 *                  steps done and the total; NULL for none. The callback must
 *                  not call etkv, wait for another thread that calls etkv, or
 *                  throw.
 */
ETKV_API etkv_status etkv_generation_warm_up(
    const etkv_cache* cache,
    void (*progress)(void* context, size_t done, size_t steps),
    void* context,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_GENERATION_H */
