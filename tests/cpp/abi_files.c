/*
 * Files, prefixes and their stores, from C, on empty caches. saving.cpp tests
 * the contents of files.
 */
#include "abi.h"

static const etkv_status INVALID = ETKV_ERROR_INVALID_ARGUMENT;
static const int64_t TOKENS[2] = {7, -1};
static etkv_save_options no_text = {sizeof(no_text), "a model", TOKENS, 0};
static etkv_save_options a_text = {sizeof(a_text), "a model", TOKENS, 2};

static etkv_cache* new_cache(void) {
  setup s;
  set_up(&s);
  etkv_cache* cache = NULL;
  REQUIRE(etkv_cache_new(BACKEND, KIND, &s.config, &cache, NULL) == ETKV_OK);
  return cache;
}

static void files(void) {
  const char* path = "abi-test.safetensors";
  etkv_cache* cache = new_cache();
  int64_t* tokens = UNTOUCHED;
  size_t n = 9;
  CHECK_OK(etkv_cache_save(cache, path, NULL, NULL));
  CHECK_OK(etkv_cache_load(cache, path, NULL, NULL, NULL, NULL));
  CHECK_OK(etkv_cache_load(cache, path, "", &tokens, &n, NULL));
  CHECK_INT(n, 0);
  etkv_tokens_free(tokens, n);
  CHECK_OK(etkv_cache_save(cache, path, &a_text, NULL));
  CHECK_OK(etkv_cache_load(cache, path, "a model", &tokens, &n, NULL));
  REQUIRE(n == 2);
  CHECK(tokens[0] == 7 && tokens[1] == -1);
  etkv_tokens_free(tokens, n);

  tokens = UNTOUCHED;
#define CHECK_LOAD(path, fingerprint, status, words)                     \
  CHECK_REFUSED(                                                         \
      etkv_cache_load(cache, (path), (fingerprint), &tokens, &n, error), \
      status,                                                            \
      words)
  CHECK_LOAD(path, "another", ETKV_ERROR_FILE, "expected `another`");
  CHECK_LOAD("", NULL, INVALID, "path is empty");
  remove(path);
  CHECK_LOAD(path, NULL, ETKV_ERROR_FILE, path);
#undef CHECK_LOAD
  CHECK(tokens == UNTOUCHED && n == 2);
  CHECK_REFUSED(
      etkv_cache_save(cache, "no/such/folder", NULL, error),
      ETKV_ERROR_FILE,
      "no/such/folder");
  char* fingerprint = UNTOUCHED;
  CHECK_REFUSED(
      etkv_fingerprint("no/such/file", &fingerprint, error),
      ETKV_ERROR_FILE,
      "cannot read no/such/file");
  CHECK(fingerprint == UNTOUCHED);
  etkv_cache_free(cache);
}

static void prefixes_and_their_caches(void) {
  etkv_cache* cache = new_cache();
  etkv_prefix* prefix = UNTOUCHED;
  CHECK_REFUSED(
      etkv_cache_freeze(cache, &prefix, error), INVALID, "the cache is empty");
  CHECK(prefix == UNTOUCHED);

  etkv_prefix_cache* made = UNTOUCHED;
  etkv_prefix_cache_options limits = {sizeof(limits), 1 << 20, NULL};
  limits.store = (const etkv_prefix_store*)cache;
  CHECK_REFUSED(
      etkv_prefix_cache_new(&limits, &made, error),
      INVALID,
      "options.store is an etkv_cache");
  CHECK(made == UNTOUCHED);
  limits.store = NULL;
  REQUIRE(etkv_prefix_cache_new(&limits, &made, NULL) == ETKV_OK);

  bool kept = true;
  etkv_prefix_pin* pin = UNTOUCHED;
  CHECK_REFUSED(
      etkv_prefix_cache_keep(made, cache, &no_text, &kept, error),
      INVALID,
      "the text has 0 tokens");
  CHECK_REFUSED(
      etkv_prefix_cache_keep(made, cache, &a_text, &kept, error),
      INVALID,
      "holds 0 positions");
  CHECK_REFUSED(
      etkv_prefix_cache_pin(made, cache, &a_text, &pin, error),
      INVALID,
      "no prefix in memory");
  CHECK(kept && pin == UNTOUCHED);
  /* Without a store there is nothing to prefetch. */
  CHECK_OK(etkv_prefix_cache_prefetch(made, cache, &a_text, &kept, NULL));
  CHECK(!kept);
  etkv_prefix_cache_free(made);
  etkv_cache_free(cache);
}

static void prefix_stores(void) {
  etkv_cache* cache = new_cache();
  etkv_prefix_store* store = UNTOUCHED;
  CHECK_REFUSED(
      etkv_prefix_store_open("", 1, &store, error), INVALID, "folder is empty");
  CHECK(store == UNTOUCHED);
  REQUIRE(etkv_prefix_store_open("abi-store", 1 << 20, &store, NULL) == 0);

  size_t n = 9;
  uint64_t bytes = 9;
  bool written = true;
  CHECK_OK(etkv_prefix_store_usage(store, &n, &bytes, NULL));
  CHECK(n == 0 && bytes == 0);
  CHECK_REFUSED(
      etkv_prefix_store_save(store, cache, &a_text, &written, error),
      INVALID,
      "holds 0 positions, and the text has 2 tokens");
  CHECK(written);
  /* The text of an empty cache is too short to be written. */
  CHECK_OK(etkv_prefix_store_save(store, cache, &no_text, &written, NULL));
  CHECK(!written);
  etkv_prefix_store_free(store);
  CHECK(remove("abi-store") == 0);
  etkv_cache_free(cache);
}

int main(void) {
  files();
  prefixes_and_their_caches();
  prefix_stores();
  CHECK_INT(etkv_live_handles(), 0);
  return check_report();
}
