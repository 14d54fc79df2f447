/*
 * Checks for test programs in C and C++. A failed check is printed and counted;
 * the program goes on. Any thread may check.
 *
 *   CHECK(length == 3);
 *   CHECK_INT(length, 3);            prints both numbers
 *   CHECK_HAS(message, "capacity");  prints the text
 *   REQUIRE(session != NULL);        ends the program at once, also if other
 *                                    threads run
 *   return check_report();           prints "12 passed, 0 failed"
 */
#ifndef ETKV_TESTS_CPP_CHECK_H
#define ETKV_TESTS_CPP_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* In C++ the counts are the whole program's. A program in C has one file. */
#ifdef __cplusplus
inline long check_passed;
inline long check_failed;
#else
static long check_passed;
static long check_failed;
#endif

static inline int check_count(int holds) {
  __atomic_fetch_add(
      holds ? &check_passed : &check_failed, 1, __ATOMIC_RELAXED);
  return holds;
}

static inline int check_report(void) {
  const long passed = __atomic_load_n(&check_passed, __ATOMIC_RELAXED);
  const long failed = __atomic_load_n(&check_failed, __ATOMIC_RELAXED);
  printf("%ld passed, %ld failed\n", passed, failed);
  fflush(stdout);
  return failed == 0 && passed > 0 ? 0 : 1;
}

static inline int
check_holds(const char* file, int line, const char* text, int holds) {
  if (!check_count(holds)) {
    printf("%s:%d: failed: %s\n", file, line, text);
    fflush(stdout);
  }
  return holds;
}

static inline int check_int(
    const char* file,
    int line,
    const char* text,
    long long found,
    long long wanted) {
  if (!check_count(found == wanted)) {
    printf(
        "%s:%d: failed: %s: %lld, not %lld\n", file, line, text, found, wanted);
    fflush(stdout);
  }
  return found == wanted;
}

static inline int check_has(
    const char* file,
    int line,
    const char* text,
    const char* found,
    const char* wanted) {
  const int holds = found != NULL && strstr(found, wanted) != NULL;
  if (!check_count(holds)) {
    printf(
        "%s:%d: failed: %s: \"%s\" does not contain \"%s\"\n",
        file,
        line,
        text,
        found == NULL ? "(null)" : found,
        wanted);
    fflush(stdout);
  }
  return holds;
}

#define CHECK(...) \
  ((void)check_holds(__FILE__, __LINE__, #__VA_ARGS__, (__VA_ARGS__) ? 1 : 0))
#define CHECK_INT(found, wanted) \
  ((void)check_int(              \
      __FILE__, __LINE__, #found, (long long)(found), (long long)(wanted)))
#define CHECK_HAS(found, wanted) \
  ((void)check_has(__FILE__, __LINE__, #found, (found), (wanted)))
#define REQUIRE(...)                                                      \
  ((void)(check_holds(                                                    \
              __FILE__, __LINE__, #__VA_ARGS__, (__VA_ARGS__) ? 1 : 0) || \
          (check_report(), _Exit(1), 0)))

#endif /* ETKV_TESTS_CPP_CHECK_H */
