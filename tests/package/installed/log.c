/* Prints the log of a program and the report of its cache, in C. */
#include <stdio.h>

#include <etkv/etkv.h>

static void print(
    etkv_log_level level,
    const char* target,
    const char* message,
    void* user) {
  fprintf((FILE*)user, "%d %s %s\n", (int)level, target, message);
}

int print_log(void) {
  etkv_error* error = NULL;
  if (etkv_set_log_callback("debug", print, stdout, &error) == ETKV_OK) {
    return 0;
  }
  fprintf(stderr, "%s\n", etkv_error_message(error));
  etkv_error_free(error);
  return 1;
}

int end_log(const etkv_cache* cache) {
  char* json = NULL;
  etkv_error* error = NULL;
  if (etkv_set_log_callback(NULL, NULL, NULL, &error) == ETKV_OK &&
      etkv_cache_report(cache, &json, &error) == ETKV_OK) {
    printf("%s\n", json);
    etkv_string_free(json);
    return 0;
  }
  fprintf(stderr, "%s\n", etkv_error_message(error));
  etkv_error_free(error);
  return 1;
}
