/*
 * Text for etkv's example runners: the tokenizer and the chat template that a
 * model is published with. A part of the examples, not of etkv.
 *
 * Conventions
 *   Errors      A function that can fail returns NULL for success, or a
 * sentence that the caller gives back with etkv_text_error_free().
 *               Out-parameters are written on success only.
 *   Strings     are UTF-8. Where a length is passed they may hold zero bytes.
 *   Threads     A tokenizer may be used from several threads at once, a stream
 *               from one at a time.
 */
#ifndef ETKV_EXAMPLES_TEXT_H
#define ETKV_EXAMPLES_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A tokenizer, and what its folder says about conversations. */
typedef struct etkv_text etkv_text;

/** The text of one answer, made from its ids one at a time. */
typedef struct etkv_text_stream etkv_text_stream;

/** Ids that the caller owns, and gives back with etkv_text_ids_free(). */
typedef struct etkv_text_ids {
  uint32_t* data;
  size_t length;
} etkv_text_ids;

/** What one side of a conversation said. */
typedef struct etkv_text_message {
  /** "system", "user", "assistant", or what else the template knows. */
  const char* role;
  const char* content;
  size_t content_length;
} etkv_text_message;

/** Gives back an error; NULL does nothing. */
void etkv_text_error_free(char* error);

/**
 * Opens a tokenizer.json, or the folder that holds one. Beside it are read, if
 * they are there: chat_template.jinja, tokenizer_config.json and
 * generation_config.json.
 */
char* etkv_text_open(const char* path, etkv_text** text);

/** Closes it; streams made from it live on. NULL does nothing. */
void etkv_text_free(etkv_text* text);

/** Gives ids back, and empties `ids`. */
void etkv_text_ids_free(etkv_text_ids* ids);

/**
 * The ids of a text.
 *
 * @param special  whether to add the tokens that the tokenizer puts around a
 *                 text, such as one that begins it.
 */
char* etkv_text_encode(
    const etkv_text* text,
    const char* utf8,
    size_t length,
    bool special,
    etkv_text_ids* ids);

/** Whether the model has a chat template. */
bool etkv_text_has_chat_template(const etkv_text* text);

/**
 * The ids of a conversation, as the model's chat template writes it.
 *
 * @param add_generation_prompt  whether to end with the beginning of the
 * model's next message.
 */
char* etkv_text_encode_chat(
    const etkv_text* text,
    const etkv_text_message* messages,
    size_t n_messages,
    bool add_generation_prompt,
    etkv_text_ids* ids);

/**
 * The ids that end an answer: `eos_token_id` of generation_config.json, else
 * the `eos_token` of tokenizer_config.json, else none.
 */
char* etkv_text_eos_token_ids(const etkv_text* text, etkv_text_ids* ids);

/** Begins an answer; NULL if `text` is NULL. */
etkv_text_stream* etkv_text_stream_new(const etkv_text* text);

/** NULL does nothing. */
void etkv_text_stream_free(etkv_text_stream* stream);

/**
 * Takes the next id of the answer.
 *
 * @param piece   the text that it completes: whole characters, maybe none. Not
 *                zero-terminated; valid until the next call on the stream.
 * @param length  its bytes.
 */
char* etkv_text_stream_next(
    etkv_text_stream* stream,
    uint32_t id,
    const char** piece,
    size_t* length);

/**
 * Ends the answer: the text that was held back, in which U+FFFD stands for a
 * character that was cut short. The stream is then ready for another answer.
 */
char* etkv_text_stream_finish(
    etkv_text_stream* stream,
    const char** piece,
    size_t* length);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* ETKV_EXAMPLES_TEXT_H */
