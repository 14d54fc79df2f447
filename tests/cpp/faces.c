/*
 * The faces for sequences and for trees, and the registry, from C: refusals,
 * and values before any program has run.
 */
#include "abi.h"

static const etkv_status INVALID = ETKV_ERROR_INVALID_ARGUMENT;

/* ---- The faces of each kind ---------------------------------------------- */

static void capabilities(void) {
  static const struct {
    const char* kind;
    etkv_status sequences;
    etkv_status trees;
  } kinds[] = {
      {"contiguous", ETKV_ERROR_KIND, ETKV_ERROR_KIND},
      {"seq", ETKV_OK, ETKV_ERROR_KIND},
      {"tree", ETKV_OK, ETKV_OK},
  };
  setup s;
  set_up(&s);
  for (int i = 0; i < 3; ++i) {
    etkv_session* session = new_session_of(kinds[i].kind, &s.config);
    etkv_cache* cache = cache_of(session);
    const etkv_status seq = kinds[i].sequences;
    const etkv_status tree = kinds[i].trees;
#define CHECK_FACE(type, call, wanted)                     \
  do {                                                     \
    type* face = NULL;                                     \
    etkv_error* error = NULL;                              \
    CHECK_INT(call, wanted);                               \
    CHECK((face != NULL) == ((wanted) == ETKV_OK));        \
    CHECK((face != NULL) == (error == NULL));              \
    if (error != NULL) {                                   \
      CHECK_HAS(etkv_error_message(error), kinds[i].kind); \
    }                                                      \
    etkv_error_free(error);                                \
    type##_free(face);                                     \
  } while (0)
    CHECK_FACE(etkv_seq_cache, etkv_session_seq(session, &face, &error), seq);
    CHECK_FACE(etkv_seq_cache, etkv_cache_as_seq(cache, &face, &error), seq);
    CHECK_FACE(
        etkv_tree_cache, etkv_session_tree(session, &face, &error), tree);
    CHECK_FACE(etkv_tree_cache, etkv_cache_as_tree(cache, &face, &error), tree);
#undef CHECK_FACE
    etkv_cache_free(cache);
    etkv_session_free(session);
  }
}

/* ---- Sequences ------------------------------------------------------------ */

static void empty_sequences(void) {
  setup s;
  set_up(&s);
  etkv_session* session = new_session_of("seq", &s.config);
  etkv_seq_cache* c = NULL;
  REQUIRE(etkv_session_seq(session, &c, NULL) == ETKV_OK);

  int32_t number = 7;
  for (int32_t sequence = 0; sequence < 256; sequence += 85) {
    CHECK_OK(etkv_seq_cache_len(c, sequence, &number, NULL));
    CHECK_INT(number, 0);
    CHECK_OK(etkv_seq_cache_next(c, sequence, &number, NULL));
    CHECK_INT(number, 0);
    CHECK_OK(etkv_seq_cache_rewindable_to(c, sequence, &number, NULL));
    CHECK_INT(number, 0);
  }
  /* The number of elements is stored with an array and without. */
  etkv_range range = {7, 7};
  size_t n = 7;
  CHECK_OK(etkv_seq_cache_positions(c, 0, NULL, 0, &n, NULL));
  CHECK_INT(n, 0);
  n = 7;
  CHECK_OK(etkv_seq_cache_positions(c, 0, &range, 1, &n, NULL));
  CHECK_INT(n, 0);
  CHECK(range.begin == 7);
  n = 7;
  CHECK_OK(etkv_seq_cache_sequences(c, NULL, 0, &n, NULL));
  CHECK_INT(n, 0);

  /* Copying or removing nothing is no error. */
  CHECK_OK(etkv_seq_cache_cp(c, 0, 1, 0, INT32_MAX, NULL));
  CHECK_OK(etkv_seq_cache_rm(c, 3, 0, INT32_MAX, NULL));
  CHECK_OK(etkv_seq_cache_rm(c, 3, 5, 5, NULL));
  CHECK_OK(etkv_seq_cache_keep(c, 255, NULL));
  CHECK_OK(etkv_seq_cache_compact(c, NULL));

  static const int32_t tokens[4] = {0, 255, 3, 3};
  static const int32_t counts[3] = {1, 2, 1};
  CHECK_OK(etkv_seq_cache_begin_step(c, tokens, 4, NULL));
  CHECK_OK(etkv_seq_cache_begin_step_shared(c, tokens, 4, counts, 3, NULL));
  CHECK_REFUSED(etkv_seq_cache_begin_step(c, NULL, 0, error), INVALID, "token");
  CHECK_OK(etkv_seq_cache_cancel_step(c, NULL));
  CHECK_OK(etkv_seq_cache_cancel_step(c, NULL));
  etkv_seq_cache_free(c);
  etkv_session_free(session);
}

static void numbers_that_cannot_be(void) {
  setup s;
  set_up(&s);
  etkv_session* session = new_session_of("tree", &s.config);
  etkv_seq_cache* c = NULL;
  etkv_tree_cache* t = NULL;
  REQUIRE(etkv_session_seq(session, &c, NULL) == ETKV_OK);
  REQUIRE(etkv_session_tree(session, &t, NULL) == ETKV_OK);

  static const int32_t none[] = {-1, 256, INT32_MIN, INT32_MAX};
  static const int32_t one = 1;
  static const int32_t root = -1;
  const int32_t zero = 0;
  for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); ++i) {
    const int32_t bad = none[i];
    char words[16];
    snprintf(words, sizeof(words), "%d", bad);
    int32_t number = 7;
    size_t size = 7;
#define CHECK_BAD(call) CHECK_REFUSED(call, INVALID, words)
    CHECK_BAD(etkv_seq_cache_begin_step(c, &bad, 1, error));
    CHECK_BAD(etkv_seq_cache_begin_step_shared(c, &bad, 1, &one, 1, error));
    CHECK_BAD(etkv_seq_cache_cp(c, bad, 0, 0, INT32_MAX, error));
    CHECK_BAD(etkv_seq_cache_cp(c, 0, bad, 0, INT32_MAX, error));
    CHECK_BAD(etkv_seq_cache_rm(c, bad, 0, INT32_MAX, error));
    CHECK_BAD(etkv_seq_cache_keep(c, bad, error));
    CHECK_BAD(etkv_seq_cache_len(c, bad, &number, error));
    CHECK_BAD(etkv_seq_cache_next(c, bad, &number, error));
    CHECK_BAD(etkv_seq_cache_rewindable_to(c, bad, &number, error));
    CHECK_BAD(etkv_seq_cache_positions(c, bad, NULL, 0, &size, error));
    CHECK_BAD(etkv_tree_cache_propose(t, bad, &root, 1, error));
    CHECK_BAD(etkv_tree_cache_commit(t, bad, &zero, 1, error));
    CHECK_BAD(etkv_tree_cache_len(t, bad, &size, error));
#undef CHECK_BAD
    CHECK(number == 7 && size == 7);
  }

  /* Invalid ranges are refused too. */
  CHECK_REFUSED(etkv_seq_cache_rm(c, 0, -1, 3, error), INVALID, "-1");
  CHECK_REFUSED(etkv_seq_cache_rm(c, 0, 3, 2, error), INVALID, "3");
  CHECK_REFUSED(etkv_seq_cache_cp(c, 0, 1, 4, -4, error), INVALID, "-4");

  /* Counts with a wrong sum. */
  static const int32_t members[3] = {0, 1, 2};
  static const int32_t few[2] = {1, 1};
  static const int32_t many[2] = {2, 2};
  static const int32_t negative[2] = {-1, 4};
  static const int32_t no_owner[2] = {3, 0};
  static const int32_t huge[2] = {INT32_MAX, INT32_MAX};
  static const int32_t twice[2] = {1, 1};
  static const int32_t two = 2;
#define SHARED(counts, n) \
  etkv_seq_cache_begin_step_shared(c, members, 3, (counts), (n), error)
  CHECK_REFUSED(SHARED(few, 2), INVALID, "1 of 3 sequences unused");
  CHECK_REFUSED(SHARED(many, 2), INVALID, "token 1 has a count of 2");
  CHECK_REFUSED(SHARED(negative, 2), INVALID, "count of -1");
  CHECK_REFUSED(SHARED(no_owner, 2), INVALID, "token 1");
  CHECK_REFUSED(SHARED(huge, 2), INVALID, "count of 2147483647");
  CHECK_REFUSED(SHARED(NULL, 0), INVALID, "3 of 3 sequences unused");
#undef SHARED
  CHECK_REFUSED(
      etkv_seq_cache_begin_step_shared(c, twice, 2, &two, 1, error),
      INVALID,
      "twice");
  CHECK_REFUSED(
      etkv_seq_cache_begin_step(c, members, SIZE_MAX, error),
      INVALID,
      "no memory can hold");

  etkv_tree_cache_free(t);
  etkv_seq_cache_free(c);
  etkv_session_free(session);
}

/* ---- Trees ---------------------------------------------------------------- */

static void trees_that_were_not_run(void) {
  setup s;
  set_up(&s);
  etkv_session* session = new_session_of("tree", &s.config);
  etkv_cache* cache = cache_of(session);
  etkv_seq_cache* c = NULL;
  etkv_tree_cache* t = NULL;
  REQUIRE(etkv_session_seq(session, &c, NULL) == ETKV_OK);
  REQUIRE(etkv_session_tree(session, &t, NULL) == ETKV_OK);

  static const int32_t parents[4] = {-1, 0, 0, 1};
  static const int32_t loop[2] = {-1, 1};
  static const int32_t many[CAPACITY + 1] = {-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  size_t n = 7;
  CHECK_REFUSED(
      etkv_tree_cache_propose(t, 2, NULL, 0, error), INVALID, "1 node");
  CHECK_REFUSED(
      etkv_tree_cache_propose(t, 2, loop, 2, error), INVALID, "got 1");
  CHECK_REFUSED(
      etkv_tree_cache_propose(t, 2, many, CAPACITY + 1, error),
      ETKV_ERROR_CAPACITY,
      "11 nodes");
  CHECK_OK(etkv_tree_cache_len(t, 2, &n, NULL));
  CHECK_INT(n, 0);
  CHECK_REFUSED(
      etkv_tree_cache_commit(t, 2, NULL, 0, error), INVALID, "sequence 2");

  CHECK_OK(etkv_tree_cache_propose(t, 2, parents, 4, NULL));
  CHECK_OK(etkv_tree_cache_len(t, 2, &n, NULL));
  CHECK_INT(n, 4);
  CHECK_REFUSED(
      etkv_tree_cache_propose(t, 2, parents, 4, error),
      ETKV_ERROR_STEP,
      "has not run");
  CHECK_REFUSED(
      etkv_tree_cache_commit(t, 2, parents + 1, 1, error),
      INVALID,
      "0 nodes of");
  /* A sequence with a tree exists, even without positions. */
  int32_t live[2] = {7, 7};
  CHECK_OK(etkv_seq_cache_sequences(c, live, 2, &n, NULL));
  CHECK(n == 1 && live[0] == 2 && live[1] == 7);
  CHECK_REFUSED(
      etkv_seq_cache_sequences(c, live, 0, &n, error), INVALID, "there are 1");
  int32_t length = 7;
  CHECK_OK(etkv_cache_length(cache, &length, NULL));
  CHECK_INT(length, 0);

  CHECK_OK(etkv_tree_cache_commit(t, 2, NULL, 0, NULL));
  CHECK_OK(etkv_tree_cache_len(t, 2, &n, NULL));
  CHECK_INT(n, 0);
  etkv_tree_cache_free(t);
  etkv_seq_cache_free(c);
  etkv_cache_free(cache);
  etkv_session_free(session);
}

/* ---- The registry --------------------------------------------------------- */

static void keys_of_the_callers_own(void) {
  setup s;
  set_up(&s);
  etkv_cache* cache = NULL;
  REQUIRE(etkv_cache_new(BACKEND, "seq", &s.config, &cache, NULL) == ETKV_OK);
  CHECK_REFUSED(
      etkv_registry_get("mine", &cache, error), ETKV_ERROR_NO_CACHE, "`mine`");
  CHECK_REFUSED(
      etkv_registry_erase("mine", error), ETKV_ERROR_NO_CACHE, "`mine`");
  CHECK_REFUSED(
      etkv_registry_install("", BACKEND, cache, error),
      INVALID,
      "expected a cache key of 1 to 255 bytes, got one of 0 bytes");

  CHECK_OK(etkv_registry_install("mine", BACKEND, cache, NULL));
  CHECK_REFUSED(
      etkv_registry_install("mine", BACKEND, cache, error), INVALID, "taken");
  /* The entry keeps the cache alive, and returns the same cache. */
  CHECK_OK(etkv_cache_convert(cache, "f32", "f32", NULL));
  etkv_cache_free(cache);
  cache = NULL;
  CHECK_OK(etkv_registry_get("mine", &cache, NULL));
  const char* k = "";
  const char* v = "";
  CHECK_OK(etkv_cache_formats(cache, &k, &v, NULL));
  CHECK(strcmp(k, "f32") == 0 && strcmp(v, "f32") == 0);
  CHECK_OK(etkv_registry_erase("mine", NULL));
  etkv_cache_free(cache);

  /*
   * A session's key is found like others. If the key is erased and installed
   * again for another cache, it stays the key of that cache even when the
   * session ends.
   */
  etkv_session* session = new_session(&s.config);
  char key[64];
  snprintf(key, sizeof(key), "%s", etkv_session_key(session));
  CHECK_OK(etkv_registry_get(key, &cache, NULL));
  etkv_cache_free(cache);
  CHECK_OK(etkv_registry_erase(key, NULL));
  REQUIRE(etkv_cache_new(BACKEND, "tree", &s.config, &cache, NULL) == ETKV_OK);
  CHECK_OK(etkv_registry_install(key, BACKEND, cache, NULL));
  etkv_cache_free(cache);
  etkv_session_free(session);
  CHECK_OK(etkv_registry_get(key, &cache, NULL));
  CHECK(strcmp(etkv_cache_kind(cache), "tree") == 0);
  etkv_cache_free(cache);
  CHECK_OK(etkv_registry_erase(key, NULL));
}

int main(void) {
  capabilities();
  empty_sequences();
  numbers_that_cannot_be();
  trees_that_were_not_run();
  keys_of_the_callers_own();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
