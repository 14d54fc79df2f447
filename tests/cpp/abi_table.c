/*
 * Calls every function of the C interface with invalid arguments, and checks
 * the layout of every struct. abi_table.py writes the tables of both.
 */
#include <signal.h>
#include <unistd.h>

#include "abi.h"

enum { MAX_ARGUMENTS = 10, ROOM = 512, FOREIGN_HANDLES = 5, UNWRITTEN = 0xA5 };

/* A valid value for the pointer parameter with index `at`. */
typedef struct {
  int at;
  /* ANY is NULL, and ZEROS is an array. */
  enum { ANY, HANDLE, STRUCT, CONFIG, TEXT, ZEROS, PLACE } is;
  int handle;
  size_t size;
  const char* text;
} parameter;

/*
 * A call of a function, with the pointers in `a` as arguments. For a function
 * without a status, `call` returns 0 if the function's value is as documented.
 */
typedef struct {
  const char* name;
  etkv_status (*call)(void* const* a, etkv_error** error);
  bool has_status;
  int n;
  parameter parameters[MAX_ARGUMENTS];
} function;

/* A wrong argument with index `at`, and whether it is refused with `words`. */
typedef struct {
  int function;
  int at;
  /* The index of a second argument that is NULL, or -1. */
  int pair;
  enum { NOTHING, FREED, FOREIGN, OTHER, SIZE } is;
  size_t value;
  bool refused;
  const char* words;
} wrong;

/* A size, an offset or a constant; -1 if it is missing. */
typedef struct {
  const char* name;
  long long found;
  long long expected;
} number;

#include "abi_rows.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static setup config;
static void* live[N_HANDLES];
static void* freed[N_HANDLES];
static _Alignas(16) unsigned char places[MAX_ARGUMENTS][ROOM];
static void* arguments[MAX_ARGUMENTS];
static char in_progress[128];

/* Makes a handle of each type, except those that need a program or rows. The
 * caches have trees. */
static void make_all(void* all[N_HANDLES]) {
  const int32_t root = -1;
#define MAKE(type, call, status) \
  do {                           \
    type* made = NULL;           \
    CHECK_INT(call, status);     \
    all[OF_##type] = made;       \
  } while (0)
  MAKE(
      etkv_session,
      etkv_session_new(BACKEND, "tree", &config.config, &made, NULL),
      ETKV_OK);
  MAKE(
      etkv_cache,
      etkv_cache_new(BACKEND, "tree", &config.config, &made, NULL),
      ETKV_OK);
  void* cache = all[OF_etkv_cache];
  MAKE(etkv_seq_cache, etkv_cache_as_seq(cache, &made, NULL), ETKV_OK);
  MAKE(etkv_tree_cache, etkv_cache_as_tree(cache, &made, NULL), ETKV_OK);
  MAKE(etkv_forwards, etkv_forwards_new(cache, &made, NULL), ETKV_OK);
  MAKE(etkv_prefix_cache, etkv_prefix_cache_new(NULL, &made, NULL), ETKV_OK);
  MAKE(
      etkv_prefix_store,
      etkv_prefix_store_open("abi-table-store", 1, &made, NULL),
      ETKV_OK);
  MAKE(etkv_error, etkv_cache_rewind(cache, -1, &made), ETKV_ERROR_POSITION);
#undef MAKE
  void* trees = all[OF_etkv_tree_cache];
  CHECK_OK(etkv_tree_cache_propose(trees, 2, &root, 1, NULL));
  CHECK_OK(etkv_cache_convert(cache, "bf16", "bf16", NULL));
}

static void free_all(void* all[N_HANDLES]) {
  for (int i = 0; i < N_HANDLES; ++i) {
    FREE[i](&all[i], NULL);
  }
}

static void set_arguments(const function* f, const wrong* w) {
  static char text[] = "not a handle";
  void* const foreign[FOREIGN_HANDLES] = {
      &config, text, text + 1, (void*)(uintptr_t)1, (void*)UINTPTR_MAX};
  memset(places, UNWRITTEN, sizeof(places));
  for (int i = 0; i < f->n; ++i) {
    const parameter* p = &f->parameters[i];
    void* place = places[p->at];
    const size_t size = w->is == SIZE && w->at == p->at ? w->value : p->size;
    arguments[p->at] = place;
    if (p->is == STRUCT || p->is == CONFIG) {
      REQUIRE(p->size + 16 <= ROOM);
      memset(place, 0, p->size);
      memcpy(place, &config.config, p->is == CONFIG ? p->size : 0);
      memcpy(place, &size, sizeof(size));
    } else if (p->is == ZEROS) {
      memset(place, 0, ROOM);
    } else if (p->is != PLACE) {
      arguments[p->at] = p->is == TEXT     ? (void*)p->text
                         : p->is == HANDLE ? live[p->handle]
                                           : NULL;
    }
  }
  if (w->is != SIZE) {
    arguments[w->at] = w->is == FREED     ? freed[w->value]
                       : w->is == OTHER   ? live[w->value]
                       : w->is == FOREIGN ? foreign[w->value]
                                          : NULL;
    REQUIRE(w->is == NOTHING || arguments[w->at] != NULL);
  }
  if (w->pair >= 0) {
    arguments[w->pair] = NULL;
  }
}

/* Writes the state that a refused call must not change. */
static void tell_state(char* state, size_t room) {
  char* cache = NULL;
  char* process = NULL;
  CHECK_OK(etkv_cache_report(live[OF_etkv_cache], &cache, NULL));
  CHECK_OK(etkv_process_report(&process, NULL));
  const size_t n = etkv_live_handles();
  REQUIRE(snprintf(state, room, "%zu %s %s", n, cache, process) < (int)room);
  etkv_string_free(cache);
  etkv_string_free(process);
}

static void check_refused_call(const function* f, const wrong* w) {
  static unsigned char places_before[sizeof(places)];
  static char before[1 << 15];
  static char after[1 << 15];
  memcpy(places_before, places, sizeof(places));
  tell_state(before, sizeof(before));
  const etkv_status expected = f->has_status ? ETKV_ERROR_INVALID_ARGUMENT : 0;
  etkv_error* error = NULL;
  const etkv_status status = f->call(arguments, &error);
  check_int(f->name, w->at, w->words, status, expected);
  if (f->has_status) {
    check_int(f->name, w->at, "error", etkv_error_status(error), expected);
    check_has(f->name, w->at, "error", etkv_error_message(error), w->words);
    etkv_error_free(error);
    check_int(f->name, w->at, w->words, f->call(arguments, NULL), expected);
  }
  tell_state(after, sizeof(after));
  const bool same = memcmp(places, places_before, sizeof(places)) == 0;
  check_holds(f->name, w->at, "nothing is stored", same);
  if (!check_holds(f->name, w->at, "as before", strcmp(before, after) == 0)) {
    printf("before: %s\nafter:  %s\n", before, after);
  }
}

/* A call may fail, but not with these words. */
static void check_accepted_call(const function* f, const wrong* w) {
  etkv_error* error = NULL;
  f->call(arguments, &error);
  const char* message = etkv_error_message(error);
  check_holds(f->name, w->at, message, strstr(message, w->words) == NULL);
  etkv_error_free(error);
  for (int i = 0; i < f->n; ++i) {
    const parameter* p = &f->parameters[i];
    const unsigned char* place = places[p->at];
    if (p->is == PLACE && p->handle >= 0 && place[0] != UNWRITTEN) {
      void* made = NULL;
      memcpy(&made, place, sizeof(made));
      FREE[p->handle](&made, NULL);
    }
    /*
     * Fields that only a newer version of the struct has must not be written.
     */
    if (p->size > 0) {
      check_int(f->name, p->at, "the tail", place[p->size], UNWRITTEN);
    }
  }
}

static void crashed(int signal) {
  static const char words[] = ": the process crashes\n";
  (void)!write(STDOUT_FILENO, in_progress, strlen(in_progress));
  (void)!write(STDOUT_FILENO, words, sizeof(words) - 1);
  _exit(128 + signal);
}

int main(void) {
  for (size_t i = 0; i < COUNT(NUMBERS); ++i) {
    const number* each = &NUMBERS[i];
    check_int("abi_layout.txt", 0, each->name, each->found, each->expected);
  }
  for (size_t i = 0; i < COUNT(STATUSES); ++i) {
    const char* name = etkv_status_name((etkv_status)i);
    CHECK(strcmp(name, STATUSES[i]) == 0);
    CHECK(name == etkv_status_name((etkv_status)i));
  }
  signal(SIGSEGV, crashed);
  set_up(&config);
  make_all(freed);
  free_all(freed);
  make_all(live);
  for (size_t i = 0; i < COUNT(WRONG); ++i) {
    const wrong* w = &WRONG[i];
    const function* f = &FUNCTIONS[w->function];
    snprintf(in_progress, sizeof(in_progress), "%s: %s", f->name, w->words);
    set_arguments(f, w);
    (w->refused ? check_refused_call : check_accepted_call)(f, w);
  }
  CHECK_INT(etkv_delegate_set_load_options(NULL, NULL, NULL, NULL, NULL), 0);
  CHECK_OK(etkv_set_log_callback(NULL, NULL, NULL, NULL));
  free_all(live);
  CHECK(remove("abi-table-store") == 0);
  CHECK_INT(etkv_live_handles(), 0);
  printf(
      "%zu functions, %d of their parameters are pointers, %zu calls\n",
      COUNT(FUNCTIONS),
      N_POINTERS,
      COUNT(WRONG));
  return check_report();
}
