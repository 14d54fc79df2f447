/*
 * The C interface, from C: versions, errors, kinds, and lifetimes of handles
 * and caches. Needs no program. abi_table.c tests invalid arguments,
 * abi_config.c configs, and abi_files.c files.
 */
#include <sys/wait.h>
#include <unistd.h>

#include "abi.h"

static const etkv_status INVALID = ETKV_ERROR_INVALID_ARGUMENT;

static void versions(void) {
  CHECK_INT(etkv_abi_version(), ETKV_ABI_VERSION);
  CHECK(strcmp(etkv_version(), ETKV_TEST_VERSION) == 0);
  CHECK(etkv_version() == etkv_version());
  const char* mlx = etkv_mlx_version();
  CHECK(mlx[0] >= '0' && mlx[0] <= '9' && strchr(mlx, '.') != NULL);
  CHECK(mlx == etkv_mlx_version());
  CHECK(strlen(etkv_mlx_blas()) > 0);
  CHECK(etkv_mlx_blas() == etkv_mlx_blas());
}

static void errors(void) {
  CHECK(strcmp(etkv_status_name(ETKV_OK), "OK") == 0);
  CHECK(strcmp(etkv_status_name(-1), "UNKNOWN") == 0);
  CHECK(strcmp(etkv_status_name(ETKV_ERROR_VERSION + 1), "UNKNOWN") == 0);

  etkv_error* first = NULL;
  etkv_error* second = NULL;
  CHECK_INT(etkv_cache_rewind(NULL, 0, &first), INVALID);
  CHECK_INT(etkv_session_new(NULL, KIND, NULL, UNTOUCHED, &second), INVALID);
  /* Each call stores a separate error object. */
  CHECK(first != second);
  CHECK_HAS(etkv_error_message(first), "cache is NULL");
  CHECK(etkv_error_message(first) == etkv_error_message(first));
  etkv_error_free(first);
  CHECK_HAS(etkv_error_message(second), "backend_id is NULL");
  etkv_error_free(second);

  /*
   * The delegate has reported nothing. Errors of other calls do not count as
   * errors of the delegate.
   */
  CHECK(etkv_delegate_take_error() == NULL);
  etkv_delegate_abort_forward();
  CHECK(etkv_delegate_take_error() == NULL);
}

/* sessions.cpp tests the effect of load options on programs. */
static void the_delegate(void) {
  CHECK_REFUSED(
      etkv_delegate_set_load_options("a", NULL, "some", NULL, error),
      INVALID,
      "some");
  CHECK_REFUSED(etkv_delegate_reset_buffers("b", error), INVALID, "`b`");
}

static void visit(void* context, const char* backend_id, const char* kind) {
  /* Kinds are in order, so each occurs once. */
  char* last = context;
  char place[64];
  snprintf(place, sizeof(place), "%s/%s", backend_id, kind);
  CHECK(strcmp(place, last) > 0);
  memcpy(last, place, sizeof(place));

  /* No lock is held, so the callback can make a cache of the listed kind. */
  setup s;
  set_up(&s);
  etkv_cache* cache = NULL;
  CHECK_OK(etkv_cache_new(backend_id, kind, &s.config, &cache, NULL));
  CHECK(strcmp(etkv_cache_kind(cache), kind) == 0);
  CHECK_INT(etkv_cache_n_layers(cache), LAYERS);
  CHECK_INT(etkv_cache_max_step_tokens(cache), CAPACITY);
  etkv_cache_free(cache);
}

static void kinds(void) {
  setup s;
  set_up(&s);
  CHECK_NO_SESSION(BACKEND, "tapestry", &s.config, ETKV_ERROR_KIND, "tapestry");
  /* The message lists the kinds. */
  CHECK_NO_SESSION(BACKEND, "", &s.config, ETKV_ERROR_KIND, KIND);
  CHECK_NO_SESSION("NoBackend", KIND, &s.config, ETKV_ERROR_KIND, "NoBackend");
  CHECK_NO_SESSION("", KIND, &s.config, ETKV_ERROR_KIND, BACKEND);
  CHECK_NO_SESSION(BACKEND, "\xff\xfe", &s.config, INVALID, "UTF-8");
  CHECK_NO_SESSION("\xc3", KIND, &s.config, INVALID, "UTF-8");

  char last[64] = "";
  etkv_kinds(visit, last);
  CHECK(strcmp(last, "cpu/tree") == 0);
}

static void numbers_at_the_limits(void) {
  setup s;
  set_up(&s);
  etkv_cache* cache = NULL;
  etkv_error* error = UNTOUCHED;
  CHECK_OK(etkv_cache_new(BACKEND, KIND, &s.config, &cache, &error));
  /* The config is copied. */
  memset(&s, 0xff, sizeof(s));
  CHECK_INT(etkv_cache_capacity(cache), CAPACITY);
  bool fits = false;
  CHECK_OK(etkv_cache_can_extend(cache, CAPACITY, &fits, &error));
  CHECK(fits);
  CHECK_OK(etkv_cache_can_extend(cache, INT32_MAX, &fits, &error));
  CHECK(!fits);
  CHECK_OK(etkv_cache_rewind(cache, 0, &error));
  CHECK_OK(etkv_cache_clear(cache, true, &error));
  CHECK_OK(etkv_cache_clear(cache, true, &error));
  /* A call that succeeds writes no error. */
  CHECK(error == UNTOUCHED);
  CHECK_REFUSED(
      etkv_cache_can_extend(cache, INT32_MIN, &fits, error),
      INVALID,
      "n is -2147483648");
  CHECK(!fits);
  const int32_t lengths[] = {1, INT32_MAX, INT32_MIN};
  for (int i = 0; i < 3; ++i) {
    char words[32];
    snprintf(words, sizeof(words), "length %d", lengths[i]);
    CHECK_REFUSED(
        etkv_cache_rewind(cache, lengths[i], error),
        ETKV_ERROR_POSITION,
        words);
  }
  etkv_cache_free(cache);
}

/* Every handle keeps the cache alive. sessions.cpp tests that programs do too.
 * */
static void handles_leave_one_by_one(void) {
  static const int32_t root = -1;
  setup s;
  set_up(&s);
  etkv_session* session = new_session_of("tree", &s.config);
  etkv_cache* cache = cache_of(session);
  etkv_cache* shared = etkv_cache_share(cache);
  etkv_tree_cache* trees = NULL;
  CHECK(shared != NULL && shared != cache);
  CHECK_OK(etkv_session_tree(session, &trees, NULL));
  etkv_session_free(session);
  etkv_cache_free(cache);
  CHECK_INT(etkv_cache_capacity(shared), CAPACITY);
  etkv_cache_free(shared);
  CHECK_OK(etkv_tree_cache_propose(trees, 0, &root, 1, NULL));
  etkv_tree_cache_free(trees);
}

/* The number of a freed handle is never reused. */
static void numbers_do_not_come_back(void) {
  enum { SESSIONS = 64 };
  setup s;
  set_up(&s);
  etkv_session* gone = new_session(&s.config);
  etkv_session_free(gone);
  etkv_session* later[SESSIONS];
  for (int i = 0; i < SESSIONS; ++i) {
    later[i] = new_session(&s.config);
    CHECK(etkv_session_key(later[i]) == etkv_session_key(later[i]));
  }
  CHECK(etkv_session_key(gone) == NULL);
  CHECK_INT(etkv_live_handles(), SESSIONS);
  etkv_session_free(gone);
  CHECK_INT(etkv_live_handles(), SESSIONS);
  for (int i = 0; i < SESSIONS; ++i) {
    etkv_session_free(later[i]);
  }
}

/* The new process has one thread, and perhaps locks that other threads held. */
static void calls_after_a_fork_are_refused(void) {
  setup s;
  set_up(&s);
  etkv_cache* cache = NULL;
  CHECK_OK(etkv_cache_new(BACKEND, KIND, &s.config, &cache, NULL));
  const pid_t child = fork();
  if (child == 0) {
    etkv_session* session = NULL;
    CHECK_REFUSED(
        etkv_session_new("cpu", "seq", &s.config, &session, error),
        ETKV_ERROR_STEP,
        "forked");
    CHECK_INT(etkv_cache_clear(cache, false, NULL), ETKV_ERROR_STEP);
    CHECK_INT(etkv_cache_capacity(cache), 0);
    etkv_cache_free(cache);
    _exit(check_report());
  }
  int status = -1;
  CHECK_INT(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK_OK(etkv_cache_clear(cache, false, NULL));
  etkv_cache_free(cache);
}

int main(void) {
  versions();
  errors();
  the_delegate();
  kinds();
  numbers_at_the_limits();
  handles_leave_one_by_one();
  numbers_do_not_come_back();
  calls_after_a_fork_are_refused();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
