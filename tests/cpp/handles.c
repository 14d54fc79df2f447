/*
 * Every function of the C interface with what it cannot take: NULL for each
 * pointer, a handle that was freed, one of another type, and what is none.
 */
#include <sys/wait.h>
#include <unistd.h>

#include "abi.h"

/* ---- Handles -------------------------------------------------------------- */

/* One of each type, on one cache that can do everything. */
typedef struct {
  etkv_session* session;
  etkv_cache* cache;
  etkv_seq_cache* sequences;
  etkv_tree_cache* trees;
  etkv_error* error;
} handles;

static handles make_all(void) {
  setup s;
  set_up(&s);
  handles all = {NULL, NULL, NULL, NULL, NULL};
  all.session = new_session_of("tree", &s.config);
  all.cache = cache_of(all.session);
  CHECK_INT(etkv_session_seq(all.session, &all.sequences, NULL), ETKV_OK);
  CHECK_INT(etkv_session_tree(all.session, &all.trees, NULL), ETKV_OK);
  CHECK_INT(etkv_cache_rewind(all.cache, -1, &all.error), ETKV_ERROR_POSITION);
  REQUIRE(all.sequences != NULL && all.trees != NULL && all.error != NULL);
  return all;
}

static void free_all(handles all) {
  etkv_error_free(all.error);
  etkv_tree_cache_free(all.trees);
  etkv_seq_cache_free(all.sequences);
  etkv_cache_free(all.cache);
  etkv_session_free(all.session);
}

/* ---- Calls ---------------------------------------------------------------- */

/* What every call gets but its handle: fine, and to stay as it is. */
typedef struct {
  bool fits;
  int32_t number;
  size_t size;
  const char* text;
  etkv_memory memory;
  etkv_range range;
  etkv_cache* cache;
  etkv_seq_cache* sequences;
  etkv_tree_cache* trees;
} results;

static const int32_t ZERO[1] = {0};
static const int32_t ONE[1] = {1};
static const int32_t ROOT[1] = {-1};

static const results NOTHING = {
    true,
    7,
    7,
    "",
    {sizeof(etkv_memory), 1, 2, 3, NULL, 0, 0},
    {7, 7},
    NULL,
    NULL,
    NULL};

/* Refused with INVALID_ARGUMENT and these words, and nothing was written. */
#define REFUSES(call, words)                                 \
  do {                                                       \
    results r;                                               \
    memcpy(&r, &NOTHING, sizeof(r));                         \
    CHECK_REFUSED(call, ETKV_ERROR_INVALID_ARGUMENT, words); \
    CHECK(memcmp(&r, &NOTHING, sizeof(r)) == 0);             \
  } while (0)

/* Every function that takes an etkv_cache, and so on. */
static void with_cache(etkv_cache* c, const char* words) {
  REFUSES(etkv_cache_can_extend(c, 1, &r.fits, error), words);
  REFUSES(etkv_cache_length(c, &r.number, error), words);
  REFUSES(etkv_cache_formats(c, &r.text, &r.text, error), words);
  REFUSES(etkv_cache_convert(c, "f32", "f32", error), words);
  REFUSES(etkv_cache_clear(c, true, error), words);
  REFUSES(etkv_cache_rewind(c, 0, error), words);
  REFUSES(etkv_cache_rewindable_to(c, &r.number, error), words);
  REFUSES(etkv_cache_memory(c, &r.memory, error), words);
  REFUSES(etkv_cache_as_seq(c, &r.sequences, error), words);
  REFUSES(etkv_cache_as_tree(c, &r.trees, error), words);
  REFUSES(etkv_registry_install("a key", BACKEND, c, error), words);
  /* Values that no live handle has. */
  CHECK_INT(etkv_cache_capacity(c), 0);
  CHECK_INT(etkv_cache_n_layers(c), 0);
  CHECK_INT(etkv_cache_max_step_tokens(c), 0);
  CHECK(etkv_cache_kind(c) == NULL);
  CHECK(etkv_cache_share(c) == NULL);
}

static void with_sequences(etkv_seq_cache* c, const char* words) {
  REFUSES(etkv_seq_cache_begin_step(c, ZERO, 1, error), words);
  REFUSES(etkv_seq_cache_begin_step_shared(c, ZERO, 1, ONE, 1, error), words);
  REFUSES(etkv_seq_cache_cancel_step(c, error), words);
  REFUSES(etkv_seq_cache_cp(c, 0, 1, 0, INT32_MAX, error), words);
  REFUSES(etkv_seq_cache_rm(c, 0, 0, INT32_MAX, error), words);
  REFUSES(etkv_seq_cache_keep(c, 0, error), words);
  REFUSES(etkv_seq_cache_len(c, 0, &r.number, error), words);
  REFUSES(etkv_seq_cache_next(c, 0, &r.number, error), words);
  REFUSES(etkv_seq_cache_rewindable_to(c, 0, &r.number, error), words);
  REFUSES(etkv_seq_cache_positions(c, 0, &r.range, 1, &r.size, error), words);
  REFUSES(etkv_seq_cache_sequences(c, &r.number, 1, &r.size, error), words);
  REFUSES(etkv_seq_cache_compact(c, error), words);
}

static void with_trees(etkv_tree_cache* c, const char* words) {
  REFUSES(etkv_tree_cache_propose(c, 0, ROOT, 1, error), words);
  REFUSES(etkv_tree_cache_commit(c, 0, ZERO, 1, error), words);
  REFUSES(etkv_tree_cache_len(c, 0, &r.size, error), words);
}

static void with_session(etkv_session* s, const char* words) {
  REFUSES(etkv_session_seq(s, &r.sequences, error), words);
  REFUSES(etkv_session_tree(s, &r.trees, error), words);
  CHECK(etkv_session_key(s) == NULL);
  CHECK(etkv_session_cache(s) == NULL);
}

/* ---- Tests ---------------------------------------------------------------- */

static void null_handles(void) {
  with_cache(NULL, "cache is NULL");
  with_sequences(NULL, "cache is NULL");
  with_trees(NULL, "cache is NULL");
  with_session(NULL, "session is NULL");
  /* Freeing NULL does nothing. */
  free_all((handles){NULL, NULL, NULL, NULL, NULL});
}

static void null_results(void) {
  handles all = make_all();
  etkv_cache* c = all.cache;
  REFUSES(etkv_cache_can_extend(c, 1, NULL, error), "fits is NULL");
  REFUSES(etkv_cache_length(c, NULL, error), "length is NULL");
  REFUSES(etkv_cache_formats(c, NULL, &r.text, error), "k_format is NULL");
  REFUSES(etkv_cache_formats(c, &r.text, NULL, error), "v_format is NULL");
  REFUSES(etkv_cache_convert(c, NULL, "f32", error), "k_format is NULL");
  REFUSES(etkv_cache_convert(c, "f32", NULL, error), "v_format is NULL");
  REFUSES(etkv_cache_rewindable_to(c, NULL, error), "length is NULL");
  REFUSES(etkv_cache_memory(c, NULL, error), "memory is NULL");
  REFUSES(etkv_cache_as_seq(c, NULL, error), "sequences is NULL");
  REFUSES(etkv_cache_as_tree(c, NULL, error), "trees is NULL");

  etkv_seq_cache* q = all.sequences;
  REFUSES(etkv_seq_cache_begin_step(q, NULL, 1, error), "sequences is NULL");
  REFUSES(
      etkv_seq_cache_begin_step_shared(q, NULL, 1, ONE, 1, error),
      "sequences is NULL");
  REFUSES(
      etkv_seq_cache_begin_step_shared(q, ZERO, 1, NULL, 1, error),
      "counts is NULL");
  REFUSES(etkv_seq_cache_len(q, 0, NULL, error), "length is NULL");
  REFUSES(etkv_seq_cache_next(q, 0, NULL, error), "position is NULL");
  REFUSES(etkv_seq_cache_rewindable_to(q, 0, NULL, error), "length is NULL");
  REFUSES(
      etkv_seq_cache_positions(q, 0, NULL, 1, &r.size, error),
      "ranges is NULL");
  REFUSES(
      etkv_seq_cache_positions(q, 0, &r.range, 1, NULL, error), "n is NULL");
  REFUSES(
      etkv_seq_cache_sequences(q, NULL, 1, &r.size, error),
      "sequences is NULL");
  REFUSES(etkv_seq_cache_sequences(q, &r.number, 1, NULL, error), "n is NULL");

  etkv_tree_cache* t = all.trees;
  REFUSES(etkv_tree_cache_propose(t, 0, NULL, 1, error), "parents is NULL");
  REFUSES(etkv_tree_cache_commit(t, 0, NULL, 1, error), "accepted is NULL");
  REFUSES(etkv_tree_cache_len(t, 0, NULL, error), "n_nodes is NULL");

  REFUSES(etkv_session_seq(all.session, NULL, error), "cache is NULL");
  REFUSES(etkv_session_tree(all.session, NULL, error), "cache is NULL");
  free_all(all);
}

static void null_others(void) {
  handles all = make_all();
  setup s;
  set_up(&s);
  etkv_session* session = NULL;
  REFUSES(
      etkv_session_new(NULL, KIND, &s.config, &session, error),
      "backend_id is NULL");
  REFUSES(
      etkv_session_new(BACKEND, NULL, &s.config, &session, error),
      "kind is NULL");
  REFUSES(
      etkv_session_new(BACKEND, KIND, NULL, &session, error), "config is NULL");
  REFUSES(
      etkv_session_new(BACKEND, KIND, &s.config, NULL, error),
      "session is NULL");
  CHECK(session == NULL);
  REFUSES(
      etkv_cache_new(NULL, KIND, &s.config, &r.cache, error),
      "backend_id is NULL");
  REFUSES(
      etkv_cache_new(BACKEND, NULL, &s.config, &r.cache, error),
      "kind is NULL");
  REFUSES(
      etkv_cache_new(BACKEND, KIND, NULL, &r.cache, error), "config is NULL");
  REFUSES(
      etkv_cache_new(BACKEND, KIND, &s.config, NULL, error), "cache is NULL");
  REFUSES(
      etkv_cache_config_estimate(NULL, 0, &r.memory, error), "config is NULL");
  REFUSES(
      etkv_cache_config_estimate(&s.config, 0, NULL, error), "memory is NULL");
  REFUSES(
      etkv_cache_config_estimate_shared(NULL, 0, &r.memory, error),
      "config is NULL");
  REFUSES(
      etkv_cache_config_estimate_shared(&s.config, 0, NULL, error),
      "memory is NULL");
  uint64_t bytes = 7;
  REFUSES(etkv_format_row_bytes(NULL, 8, &bytes, error), "format is NULL");
  REFUSES(etkv_format_row_bytes("f16", 8, NULL, error), "bytes is NULL");
  CHECK(bytes == 7);
  etkv_kinds(NULL, NULL);
  REFUSES(etkv_mlx_memory_read(NULL, error), "memory is NULL");

  REFUSES(
      etkv_registry_install(NULL, BACKEND, all.cache, error), "key is NULL");
  REFUSES(
      etkv_registry_install("a key", NULL, all.cache, error),
      "backend_id is NULL");
  REFUSES(etkv_registry_get(NULL, &r.cache, error), "key is NULL");
  REFUSES(etkv_registry_get("a key", NULL, error), "cache is NULL");
  REFUSES(etkv_registry_erase(NULL, error), "key is NULL");
  free_all(all);
}

/* Checks that a value is refused as a handle of every type. */
static void refused_everywhere(void* none, const char* words) {
  with_cache(none, words);
  with_sequences(none, words);
  with_trees(none, words);
  with_session(none, words);
  const size_t live = etkv_live_handles();
  etkv_session_free(none);
  etkv_cache_free(none);
  etkv_seq_cache_free(none);
  etkv_tree_cache_free(none);
  etkv_error_free(none);
  CHECK_INT(etkv_live_handles(), live);
}

static void freed_handles(void) {
  handles all = make_all();
  void* const each[] = {
      all.session, all.cache, all.sequences, all.trees, all.error};
  free_all(all);
  for (size_t i = 0; i < sizeof(each) / sizeof(each[0]); ++i) {
    refused_everywhere(each[i], "it was freed, or is not of etkv");
    CHECK_INT(etkv_error_status(each[i]), ETKV_ERROR_INVALID_ARGUMENT);
    CHECK_HAS(etkv_error_message(each[i]), "no etkv_error");
  }
  /* Their numbers do not come back: a freed handle never means a new object. */
  handles later[16];
  for (int i = 0; i < 16; ++i) {
    later[i] = make_all();
  }
  for (size_t i = 0; i < sizeof(each) / sizeof(each[0]); ++i) {
    refused_everywhere(each[i], "it was freed, or is not of etkv");
  }
  for (int i = 0; i < 16; ++i) {
    free_all(later[i]);
  }
}

static void what_never_was_a_handle(void) {
  int here = 0;
  char there[64] = "not a handle";
  refused_everywhere(&here, "not of etkv");
  refused_everywhere(there, "not of etkv");
  refused_everywhere(there + 1, "not of etkv");
  refused_everywhere((void*)(uintptr_t)1, "not of etkv");
  refused_everywhere((void*)UINTPTR_MAX, "not of etkv");
}

static void handles_of_another_type(void) {
  handles all = make_all();
  with_cache((void*)all.session, "cache is an etkv_session, not an etkv_cache");
  with_cache((void*)all.sequences, "an etkv_seq_cache, not an etkv_cache");
  with_cache((void*)all.trees, "an etkv_tree_cache, not an etkv_cache");
  with_cache((void*)all.error, "an etkv_error, not an etkv_cache");
  with_sequences((void*)all.cache, "an etkv_cache, not an etkv_seq_cache");
  with_sequences((void*)all.trees, "not an etkv_seq_cache");
  with_trees((void*)all.sequences, "not an etkv_tree_cache");
  with_trees((void*)all.session, "not an etkv_tree_cache");
  with_session((void*)all.cache, "session is an etkv_cache, not");
  with_session((void*)all.error, "not an etkv_session");
  CHECK_INT(etkv_error_status((void*)all.cache), ETKV_ERROR_INVALID_ARGUMENT);
  CHECK_HAS(etkv_error_message((void*)all.cache), "no etkv_error");

  /* Freed as another type, they stay what they are. */
  etkv_session_free((void*)all.cache);
  etkv_cache_free((void*)all.session);
  etkv_cache_free((void*)all.sequences);
  etkv_seq_cache_free((void*)all.trees);
  etkv_tree_cache_free((void*)all.cache);
  etkv_error_free((void*)all.session);
  int32_t number = -1;
  CHECK_INT(etkv_cache_capacity(all.cache), CAPACITY);
  CHECK_INT(etkv_seq_cache_len(all.sequences, 0, &number, NULL), ETKV_OK);
  size_t n_nodes = 7;
  CHECK_INT(etkv_tree_cache_len(all.trees, 0, &n_nodes, NULL), ETKV_OK);
  CHECK_INT(n_nodes, 0);
  CHECK(etkv_session_key(all.session) != NULL);
  CHECK_INT(etkv_error_status(all.error), ETKV_ERROR_POSITION);
  free_all(all);
}

/* Every handle keeps the cache; none takes it from another. */
static void handles_leave_in_any_order(void) {
  for (int first = 0; first < 4; ++first) {
    handles all = make_all();
    bool trees_live = true;
    for (int i = 0; i < 4; ++i) {
      switch ((first + i) % 4) {
        case 0:
          etkv_session_free(all.session);
          break;
        case 1:
          etkv_cache_free(all.cache);
          break;
        case 2:
          etkv_seq_cache_free(all.sequences);
          break;
        default:
          etkv_tree_cache_free(all.trees);
          trees_live = false;
      }
      if (trees_live) {
        CHECK_INT(
            etkv_tree_cache_propose(all.trees, i, ROOT, 1, NULL), ETKV_OK);
      }
    }
    etkv_error_free(all.error);
  }
}

/* The new process has one thread, and may have locks that another held. */
static void calls_after_a_fork_are_refused(void) {
  handles all = make_all();
  setup s;
  set_up(&s);
  const pid_t child = fork();
  if (child == 0) {
    etkv_session* session = NULL;
    etkv_error* error = NULL;
    CHECK_INT(
        etkv_session_new("cpu", "seq", &s.config, &session, &error),
        ETKV_ERROR_STEP);
    CHECK_INT(etkv_error_status(error), ETKV_ERROR_STEP);
    CHECK_HAS(etkv_error_message(error), "forked");
    etkv_error_free(error);
    CHECK_INT(etkv_cache_clear(all.cache, false, NULL), ETKV_ERROR_STEP);
    CHECK_INT(etkv_cache_capacity(all.cache), 0);
    etkv_cache_free(all.cache);
    _exit(check_report());
  }
  int status = -1;
  CHECK_INT(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK_INT(etkv_cache_clear(all.cache, false, NULL), ETKV_OK);
  free_all(all);
}

int main(void) {
  null_handles();
  null_results();
  null_others();
  freed_handles();
  what_never_was_a_handle();
  handles_of_another_type();
  handles_leave_in_any_order();
  calls_after_a_fork_are_refused();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
