/*
 * The log callback and the reports, from C: messages, refusals, and the
 * ownership of strings.
 */
#include "abi.h"

/* The arguments of the callback's last call, and the number of its calls. */
typedef struct {
  int calls;
  etkv_log_level level;
  char target[64];
  char message[512];
  bool sets_itself;
  etkv_status set;
} heard;

static void hear(
    etkv_log_level level,
    const char* target,
    const char* message,
    void* user) {
  heard* into = user;
  ++into->calls;
  into->level = level;
  snprintf(into->target, sizeof(into->target), "%s", target);
  snprintf(into->message, sizeof(into->message), "%s", message);
  if (into->sets_itself) {
    into->set = etkv_set_log_callback("error", hear, user, NULL);
  }
}

/* Makes a call that fails. The failure is logged at `debug`. */
static void fail(etkv_cache* cache) {
  CHECK_INT(etkv_cache_rewind(cache, -3, NULL), ETKV_ERROR_POSITION);
}

static void test_log(etkv_cache* cache) {
  heard first = {0};
  heard second = {0};
  /* Removing a callback that is not set is no error. */
  CHECK_OK(etkv_set_log_callback(NULL, NULL, NULL, NULL));
  fail(cache);
  CHECK_REFUSED(
      etkv_set_log_callback("etkv=loud", hear, &first, error),
      ETKV_ERROR_INVALID_ARGUMENT,
      "filter is `etkv=loud`, expected the syntax of RUST_LOG");
  CHECK_REFUSED(
      etkv_set_log_callback("\xff", hear, &first, error),
      ETKV_ERROR_INVALID_ARGUMENT,
      "filter is not UTF-8");
  fail(cache);
  CHECK_INT(first.calls, 0);

  CHECK_OK(etkv_set_log_callback("debug", hear, &first, NULL));
  fail(cache);
  CHECK_INT(first.calls, 1);
  CHECK_INT(first.level, ETKV_LOG_DEBUG);
  CHECK_HAS(first.target, "etkv::api");
  CHECK_HAS(first.message, "a call fails status=Position error=");
  CHECK_HAS(first.message, "-3");

  /* A conversion logs its span with the duration, and its result. */
  CHECK_OK(etkv_cache_convert(cache, "f32", "f32", NULL));
  CHECK_INT(first.calls, 3);
  CHECK_HAS(first.target, "etkv::core");
  CHECK_HAS(first.message, "convert{k_format=f32 v_format=f32}: done took_us=");

  /* Levels of targets; NULL stands for `info`. */
  CHECK_OK(etkv_set_log_callback("debug,etkv::core=off", hear, &second, NULL));
  CHECK_OK(etkv_cache_convert(cache, "f16", "f16", NULL));
  CHECK_INT(second.calls, 0);
  fail(cache);
  CHECK_INT(second.calls, 1);
  CHECK_OK(etkv_set_log_callback(NULL, hear, &second, NULL));
  fail(cache);
  CHECK_INT(second.calls, 1);
  CHECK_OK(etkv_cache_convert(cache, "f32", "f32", NULL));
  CHECK_INT(second.calls, 2);
  CHECK_INT(second.level, ETKV_LOG_INFO);
  CHECK_HAS(second.message, "the cache is converted k_format=f32 v_format=f32");

  /* An invalid filter leaves the current one in place. */
  CHECK_INT(
      etkv_set_log_callback("=,=", hear, &first, NULL),
      ETKV_ERROR_INVALID_ARGUMENT);
  CHECK_OK(etkv_cache_convert(cache, "f16", "f16", NULL));
  CHECK_INT(second.calls, 3);

  /*
   * Setting a callback inside the callback is refused. The error is not logged:
   * its message would call the callback again, without end.
   */
  second.sets_itself = true;
  CHECK_OK(etkv_set_log_callback("debug", hear, &second, NULL));
  fail(cache);
  CHECK_INT(second.calls, 4);
  CHECK_INT(second.set, ETKV_ERROR_STEP);

  CHECK_OK(etkv_set_log_callback("debug", NULL, NULL, NULL));
  fail(cache);
  CHECK_OK(etkv_cache_convert(cache, "f32", "f32", NULL));
  CHECK_INT(second.calls, 4);
  CHECK_INT(first.calls, 3);

  /* A callback can be set again. */
  CHECK_OK(etkv_set_log_callback("debug", hear, &first, NULL));
  fail(cache);
  CHECK_INT(first.calls, 4);
  CHECK_OK(etkv_set_log_callback(NULL, NULL, NULL, NULL));
}

static void test_kept_log(etkv_cache* cache) {
  char* json = UNTOUCHED;
  CHECK_REFUSED(
      etkv_log_keep("debug", 0, error),
      ETKV_ERROR_INVALID_ARGUMENT,
      "most is 0, the minimum is 1");
  CHECK_REFUSED(
      etkv_log_keep("etkv=loud", 2, error),
      ETKV_ERROR_INVALID_ARGUMENT,
      "the syntax of RUST_LOG");
  /* A refused call keeps no messages. */
  CHECK_OK(etkv_log_take(&json, NULL));
  CHECK(json == NULL);

  CHECK_OK(etkv_log_keep("info", 2, NULL));
  CHECK_OK(etkv_cache_convert(cache, "bf16", "bf16", NULL));
  CHECK_OK(etkv_cache_convert(cache, "f16", "f16", NULL));
  CHECK_OK(etkv_cache_convert(cache, "f32", "f32", NULL));
  CHECK_OK(etkv_log_take(&json, NULL));
  CHECK_HAS(
      json,
      "[{\"level\":3,\"target\":\"etkv::core\",\"message\":"
      "\"the cache is converted k_format=f16 v_format=f16\",\"time\":");
  CHECK_HAS(json, "converted k_format=f32 v_format=f32");
  CHECK(strstr(json, "bf16") == NULL);
  etkv_string_free(json);
  CHECK_OK(etkv_log_take(&json, NULL));
  CHECK(json == NULL);

  /* A callback replaces the kept messages. */
  heard now = {0};
  CHECK_OK(etkv_set_log_callback("info", hear, &now, NULL));
  CHECK_OK(etkv_cache_convert(cache, "f16", "f16", NULL));
  CHECK_INT(now.calls, 1);
  CHECK_OK(etkv_set_log_callback(NULL, NULL, NULL, NULL));
  CHECK_OK(etkv_log_take(&json, NULL));
  CHECK(json == NULL);
}

static void test_cache_report(etkv_cache* cache) {
  char* json = NULL;
  CHECK_OK(etkv_cache_report(cache, &json, NULL));
  CHECK_HAS(json, "{\"kind\":\"contiguous\",\"length\":0,\"capacity\":10,");
  CHECK_HAS(json, "\"step_open\":false,\"poisoned\":null");
  CHECK_HAS(json, "\"n_kv_heads\":3,\"k_head_dim\":8,\"v_head_dim\":4");
  etkv_string_free(json);
}

static void test_program_describe(void) {
  char* json = UNTOUCHED;
  const uint8_t bytes[32] = {0};
  CHECK_REFUSED(
      etkv_program_describe(bytes, sizeof(bytes), &json, error),
      ETKV_ERROR_PROGRAM,
      "its magic is not MLX0");
  CHECK(json == UNTOUCHED);
}

int main(void) {
  setup s;
  set_up(&s);
  etkv_session* session = new_session(&s.config);
  etkv_cache* cache = cache_of(session);
  test_log(cache);
  test_kept_log(cache);
  test_cache_report(cache);
  test_program_describe();
  etkv_cache_free(cache);
  etkv_session_free(session);
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
