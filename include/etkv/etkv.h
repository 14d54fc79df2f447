/*
 * etkv: the KV cache of an ExecuTorch program, as a library.
 *
 * The C interface. `etkv.hpp` wraps it for C++; `executorch.hpp` adds what
 * names ExecuTorch.
 *
 * Conventions
 *   Names     etkv_<type>_<verb>. `_new` makes a handle, `_free` gives it back;
 *             freeing NULL does nothing.
 *   Results   Every function that can fail returns an etkv_status and takes,
 *             last, `etkv_error** error`. On failure it stores an error object
 *             there, which the caller frees; pass NULL to ignore it. Nothing
 *             else changes: out-parameters are written on success only, and the
 *             object acted on is as it was.
 *   Structs   begin with `struct_size`, which the caller sets to the size it was
 *             compiled with. They only ever grow at the end. A field that is
 *             zero has its default, so a struct is set to zero first.
 *   Strings   are UTF-8 and end in a zero byte. Those that functions take are
 *             copied.
 *   Arrays    are a pointer and a number of elements; NULL is fine for none.
 *   Defects   inside become ETKV_ERROR_INTERNAL. A program or a cache that one
 *             happened in refuses everything afterwards but being freed, through
 *             every handle on it, with that status.
 *
 * Ownership
 *   Who gets a pointer to a handle type of this header from a function owns it,
 *   and frees it once, with the function named after its type. Handles are
 *   numbers that only look like pointers: one that was freed, one of another
 *   type and what never was one are refused with ETKV_ERROR_INVALID_ARGUMENT,
 *   and freeing them does nothing. No number is given twice. As memory they are
 *   unknown to leak checkers: etkv_live_handles() counts them.
 *
 *   A cache is not a handle. It is shared by its handles (etkv_cache and the
 *   faces etkv_seq_cache and etkv_tree_cache), its session, its entries in the
 *   registry, and the programs that were loaded with its key, and lives until
 *   the last of them is gone, in any order. Freeing a handle never takes a cache
 *   from others.
 *
 *   A session owns one entry of the process-wide registry, under a key that is
 *   unique in the process. An entry of etkv_registry_install() stays until it is
 *   erased.
 *
 *   Strings that functions return are said to be static, or to live as long as
 *   the handle that they were asked of.
 *
 * Threads
 *   Every function may be called on any thread, also on one handle from several
 *   at a time, and a handle may be freed while another thread uses it: the call
 *   under way ends as if the handle were freed after it. The strings of a handle
 *   are gone then, though.
 *
 *   Calls on one cache are serialised inside, and with the steps of programs: a
 *   call made while a program is in the middle of a step on that cache waits for
 *   the step to end, and sees the cache before or after it, never in between.
 *   Calls that change a cache, and etkv_cache_can_extend(), also wait for MLX,
 *   which works for one thread at a time. What has to go together takes a lock of
 *   the caller's: between etkv_cache_can_extend() and the step, or
 *   etkv_seq_cache_begin_step() and the step that it is about, another thread may
 *   have its turn. The sequences that begin_step names belong to the cache, not to
 *   the thread: without such a lock a step may run under what another thread named,
 *   and where both sequences are at the same position it is written to the other's
 *   sequence without an error.
 *
 *   The callback of etkv_kinds() is called on its thread, within the call,
 *   without locks. Those of an etkv_cache_vtable may be called on any thread, one
 *   at a time for a cache, while that cache and MLX are taken: a call on that
 *   cache from there is refused with ETKV_ERROR_STEP, and waiting there for
 *   another thread's call may have no end. None of them may leave by an exception.
 */
#ifndef ETKV_ETKV_H
#define ETKV_ETKV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ETKV_API __attribute__((visibility("default")))
#else
#define ETKV_API
#endif

/* ---- Version ------------------------------------------------------------ */

/** The interface that this header describes; grows with every addition. */
#define ETKV_ABI_VERSION 4

/** The interface that the linked library has; at least ETKV_ABI_VERSION. */
ETKV_API uint32_t etkv_abi_version(void);

/** The library's version, as "major.minor.patch". Static. */
ETKV_API const char* etkv_version(void);

/** The version of the MLX that the process runs on. Static. */
ETKV_API const char* etkv_mlx_version(void);

/**
 * What multiplies matrices for MLX on the CPU: OpenBLAS with its configuration,
 * "MLX's own" or "Accelerate". A static string.
 */
ETKV_API const char* etkv_mlx_blas(void);

/* ---- Errors ------------------------------------------------------------- */

/** What went wrong. Numbers are never reused. */
typedef int32_t etkv_status;
enum {
  ETKV_OK = 0,
  /** An argument cannot be: NULL, negative, of the wrong type or size. */
  ETKV_ERROR_INVALID_ARGUMENT = 1,
  /** The step or the sequence does not fit in the cache's capacity. */
  ETKV_ERROR_CAPACITY = 2,
  /** A position is negative, leaves a gap, or breaks the run of its step. */
  ETKV_ERROR_POSITION = 3,
  /** No cache is known by this key, or the program was loaded without one. */
  ETKV_ERROR_NO_CACHE = 4,
  /** The cache is of a kind that cannot do this. */
  ETKV_ERROR_KIND = 5,
  /** A tensor's shape does not match the cache or the program. */
  ETKV_ERROR_SHAPE = 6,
  /** A tensor's dtype does not match the cache or the program. */
  ETKV_ERROR_DTYPE = 7,
  /** The program is damaged, foreign, or of a newer format. */
  ETKV_ERROR_PROGRAM = 8,
  /** The program needs something that this build does not have. */
  ETKV_ERROR_UNSUPPORTED = 9,
  /** MLX reported an error, out of memory among them. */
  ETKV_ERROR_MLX = 10,
  /** A step is open on this cache, or none is. */
  ETKV_ERROR_STEP = 11,
  /** A defect inside etkv. */
  ETKV_ERROR_INTERNAL = 12,
};

/** An error: a status and a sentence that names the value and the limit. */
typedef struct etkv_error etkv_error;

/** The status of `error`; ETKV_OK if it is NULL. */
ETKV_API etkv_status etkv_error_status(const etkv_error* error);

/** The message of `error`, valid until it is freed; "" if it is NULL. */
ETKV_API const char* etkv_error_message(const etkv_error* error);

ETKV_API void etkv_error_free(etkv_error* error);

/**
 * Makes an error, for a callback to store. NULL where `status` is that of no
 * error, or `message` is NULL or not UTF-8.
 */
ETKV_API etkv_error* etkv_error_new(etkv_status status, const char* message);

/**
 * Takes the error that the delegate last reported on the calling thread, or
 * NULL. A host that runs programs is told a bare code of its own; the sentence
 * behind it is here. The caller frees it.
 */
ETKV_API etkv_error* etkv_delegate_take_error(void);

/* ---- The delegate --------------------------------------------------------- */

/**
 * Sets how the calling thread loads programs from now on, for hosts whose
 * ExecuTorch passes no backend options, as its Python runtime does not. Options
 * that it does pass go before these.
 *
 * @param cache_key  a session's key, or one of the registry; NULL for none.
 * @param logits     "all" or "last": which rows of the logits to compute; NULL
 *                   for "all".
 */
ETKV_API etkv_status etkv_delegate_set_load_options(
    const char* cache_key,
    const char* logits,
    etkv_error** error);

/**
 * Tells whether this build can run a program, from the delegate's payload of
 * `n_bytes` alone: ETKV_ERROR_UNSUPPORTED names every operation that it lacks, and
 * ETKV_ERROR_PROGRAM is for a payload that is damaged or foreign.
 */
ETKV_API etkv_status
etkv_delegate_check(const uint8_t* payload, size_t n_bytes, etkv_error** error);

/* ---- The process ----------------------------------------------------- */

/** Bytes that MLX holds in this process, caches and programs together. */
typedef struct etkv_mlx_memory {
  size_t struct_size;
  /** In use. */
  uint64_t active;
  /** Kept for reuse. */
  uint64_t cached;
  /** The most that was ever in use. */
  uint64_t peak;
} etkv_mlx_memory;

/** Fills `memory`, whose `struct_size` the caller has set. */
ETKV_API etkv_status
etkv_mlx_memory_read(etkv_mlx_memory* memory, etkv_error** error);

/** Handles of every type that were made and not freed: 0 without a leak. */
ETKV_API size_t etkv_live_handles(void);

/* ---- Configuration ------------------------------------------------------ */

/*
 * How keys or values are stored, by name. Independent of what the model computes
 * in; keys and values need not have the same.
 *
 *   "f32", "f16", "bf16"
 *       floats; "f16" where nothing is said
 *   "affine<bits>g<group>", as in "affine4g64"
 *       integers of 2, 3, 4, 5, 6 or 8 bits with a scale and an offset for every
 *       32, 64 or 128 elements; "affine4" is "affine4g64"
 *   "mxfp8", "mxfp4"
 *       OCP microscaling: a scale for every 32 elements
 *   "nvfp4"
 *       NVIDIA's block float: a scale for every 16 elements
 *   "row-int4", "row-fp4"
 *       4 bits an element and one scale a row
 *
 * A row is one position of one KV head. Its head_dim is a multiple of the
 * format's group; of 8 for those with a scale a row.
 */

/**
 * Stores the bytes of one row of `head_dim` elements, its scales among them.
 * Also tells whether there is a format of that name, and whether rows fit it.
 */
ETKV_API etkv_status etkv_format_row_bytes(
    const char* format,
    int32_t head_dim,
    uint64_t* bytes,
    etkv_error** error);

/** What one attention layer stores. An architecture fact, from the program. */
typedef struct etkv_layer_config {
  size_t struct_size;
  /** KV heads, not query heads. */
  int32_t n_kv_heads;
  /** Elements of one key. */
  int32_t k_head_dim;
  /** Elements of one value; 0 for the same as a key. */
  int32_t v_head_dim;
  /**
   * Positions that a query sees, itself among them; 0 for full history. Layers
   * with a window keep little more than that.
   */
  int32_t window;
  /** First positions that a query sees besides its window; 0 without one. */
  int32_t sinks;
  /** 0. */
  int32_t reserved;
} etkv_layer_config;

/** How buffers grow as positions come: up to what the capacity needs. */
typedef int32_t etkv_growth;
enum {
  /** `min_chunk` slots, doubled as needed. */
  ETKV_GROWTH_DOUBLING = 0,
  /** By `min_chunk` slots at a time. */
  ETKV_GROWTH_STEP = 1,
  /** To the slots that a step needs: least memory, a copy at each step. */
  ETKV_GROWTH_EXACT = 2,
  /** To the capacity, when the cache is made. */
  ETKV_GROWTH_UPFRONT = 3,
};

/** What a cache is to be. */
typedef struct etkv_cache_config {
  size_t struct_size;
  /** `n_layers` layers, `layers->struct_size` bytes apart. */
  const etkv_layer_config* layers;
  size_t n_layers;
  /** Storage of keys and of values, by name; NULL for "f16". */
  const char* k_format;
  const char* v_format;
  /** Storage of both before `quantized_kv_start`: a float format. */
  const char* float_format;
  /** The most positions that it holds: the session's context length. */
  int32_t capacity;
  /**
   * The most tokens of one step, where layers have windows: they keep so much
   * more that a step can be rolled back. 0 for 512.
   */
  int32_t max_step_tokens;
  etkv_growth growth;
  /** Slots of a growth that has chunks; 0 for 256. */
  int32_t min_chunk;
  /**
   * Where it is more than 0: positions are stored in `float_format` until there
   * are so many, and are then converted to `k_format` and `v_format`, once.
   */
  int32_t quantized_kv_start;
  /** 0. */
  int32_t reserved;
} etkv_cache_config;

/** Bytes of one layer's buffers. */
typedef struct etkv_layer_memory {
  size_t struct_size;
  uint64_t k_allocated;
  uint64_t k_used;
  uint64_t v_allocated;
  uint64_t v_used;
} etkv_layer_memory;

/** Bytes of a cache's buffers. */
typedef struct etkv_memory {
  size_t struct_size;
  /** Held. */
  uint64_t allocated;
  /** Of these, in use by positions. */
  uint64_t used;
  /** The most that it may come to hold. */
  uint64_t at_capacity;
  /**
   * Where the caller wants the same layer by layer: as many structs as there are
   * layers, `layers->struct_size` bytes apart, and their number. The first has
   * its `struct_size` set. NULL and 0 where not.
   */
  etkv_layer_memory* layers;
  size_t n_layers;
} etkv_memory;

/**
 * Fills `memory` with what a cache of this config will hold when one sequence
 * has grown to `length` positions, to the byte, before any is made.
 *
 * `at_capacity` is that of one sequence, too. Caches of kinds "seq" and "tree"
 * may come to hold more where layers have windows: several sequences have a
 * window each.
 */
ETKV_API etkv_status etkv_cache_config_estimate(
    const etkv_cache_config* config,
    int32_t length,
    etkv_memory* memory,
    etkv_error** error);

/* ---- Kinds ---------------------------------------------------------------- */

/*
 * What a cache can do is its kind, which is fixed when it is made:
 *
 *   "contiguous"  one growing sequence; the shortest way for one
 *   "seq"         up to 256 sequences that share cells: forks, removal, batches
 *   "tree"        the same, with trees of candidates behind sequences
 */

/**
 * Calls `visit` with each kind that caches can be made of, and the backend id
 * that it is registered under, in order. The names live for the call.
 */
ETKV_API etkv_status etkv_kinds(
    void (*visit)(void* context, const char* backend_id, const char* kind),
    void* context,
    etkv_error** error);

/* ---- Caches ------------------------------------------------------------- */

/** A cache: the face that every kind has. */
typedef struct etkv_cache etkv_cache;

/**
 * Makes a cache that no key leads to yet. Most callers want a session.
 *
 * @param backend_id  the backend that will use it: "MLXBackend".
 * @param kind        a name of etkv_kinds().
 * @param config      what it is to be.
 */
ETKV_API etkv_status etkv_cache_new(
    const char* backend_id,
    const char* kind,
    const etkv_cache_config* config,
    etkv_cache** cache,
    etkv_error** error);

/** Gives back the handle; the cache lives on while others hold it. */
ETKV_API void etkv_cache_free(etkv_cache* cache);

/** Makes another handle on the same cache, for another owner. */
ETKV_API etkv_status etkv_cache_share(
    const etkv_cache* cache,
    etkv_cache** shared,
    etkv_error** error);

/** Stores whether `n` (at least 0) more positions fit. */
ETKV_API etkv_status etkv_cache_can_extend(
    const etkv_cache* cache,
    int32_t n,
    bool* fits,
    etkv_error** error);

/** Stores the most positions that it holds. */
ETKV_API etkv_status etkv_cache_capacity(
    const etkv_cache* cache,
    int32_t* capacity,
    etkv_error** error);

/**
 * Stores the positions that it holds now. One that several sequences share
 * counts once.
 */
ETKV_API etkv_status
etkv_cache_length(const etkv_cache* cache, int32_t* length, etkv_error** error);

/** Stores the number of its layers. */
ETKV_API etkv_status etkv_cache_n_layers(
    const etkv_cache* cache,
    size_t* n_layers,
    etkv_error** error);

/** Stores the name of its kind. Static. */
ETKV_API etkv_status
etkv_cache_kind(const etkv_cache* cache, const char** kind, etkv_error** error);

/** Stores the names of the formats that its rows have now. Static. */
ETKV_API etkv_status etkv_cache_formats(
    const etkv_cache* cache,
    const char** k_format,
    const char** v_format,
    etkv_error** error);

/**
 * Stores what is there, and what comes, in other formats, until the cache is
 * cleared. One layer's keys or values at a time: it takes the memory of one of
 * them besides.
 *
 * After ETKV_ERROR_MLX some layers may be converted and others not, all of them
 * whole; call again to go on.
 */
ETKV_API etkv_status etkv_cache_convert(
    etkv_cache* cache,
    const char* k_format,
    const char* v_format,
    etkv_error** error);

/**
 * Forgets every position. The formats are those of the config again.
 *
 * @param release  whether to give the buffers back, too; otherwise the next
 *                 sequence reuses them.
 */
ETKV_API etkv_status
etkv_cache_clear(etkv_cache* cache, bool release, etkv_error** error);

/**
 * Forgets the positions from `length` on, of the one sequence that there is;
 * 0 <= length <= its next position. Where layers have windows, what they have
 * dropped cannot be gone back to: that is refused with ETKV_ERROR_POSITION,
 * naming the least length. Several sequences are ETKV_ERROR_INVALID_ARGUMENT.
 */
ETKV_API etkv_status
etkv_cache_rewind(etkv_cache* cache, int32_t length, etkv_error** error);

/** Stores the least length, apart from 0, that it can be rewound to now. */
ETKV_API etkv_status etkv_cache_rewindable_to(
    const etkv_cache* cache,
    int32_t* length,
    etkv_error** error);

/** Fills `memory`, whose `struct_size` the caller has set. */
ETKV_API etkv_status etkv_cache_memory(
    const etkv_cache* cache,
    etkv_memory* memory,
    etkv_error** error);

/* ---- Several sequences ---------------------------------------------------- */

/**
 * The face of a cache that many sequences share. Sequences have numbers from 0
 * to 255 and need not be made: one that holds nothing is empty.
 *
 * Ranges of positions are from `begin` up to, and without, `end`; INT32_MAX as
 * the end means all that follow. Every change is refused with ETKV_ERROR_STEP
 * while a step is open, and with ETKV_ERROR_INVALID_ARGUMENT for a number or
 * range that cannot be.
 */
typedef struct etkv_seq_cache etkv_seq_cache;

/**
 * Makes a handle for sequences on the same cache; ETKV_ERROR_KIND, naming its
 * kind, where it has one sequence only. The other handle stays.
 */
ETKV_API etkv_status etkv_cache_as_seq(
    const etkv_cache* cache,
    etkv_seq_cache** sequences,
    etkv_error** error);

/** Gives back the handle; the cache lives on while others hold it. */
ETKV_API void etkv_seq_cache_free(etkv_seq_cache* cache);

/**
 * Says which sequence each of the `n_tokens` tokens of the next step belongs to.
 * Without it, the tokens are those of the frontiers that were proposed, by the
 * number of their sequence; and without those, of the only sequence there is.
 * What is said holds until a step has worked, or something else is said. No
 * tokens are ETKV_ERROR_INVALID_ARGUMENT.
 */
ETKV_API etkv_status etkv_seq_cache_begin_step(
    etkv_seq_cache* cache,
    const int32_t* sequences,
    size_t n_tokens,
    etkv_error** error);

/**
 * The same for tokens that belong to several sequences each, which share their
 * cells: the first counts[0] of the `n_sequences` numbers are the first token's,
 * the next counts[1] the second's. Every count is at least 1.
 */
ETKV_API etkv_status etkv_seq_cache_begin_step_shared(
    etkv_seq_cache* cache,
    const int32_t* sequences,
    size_t n_sequences,
    const int32_t* counts,
    size_t n_tokens,
    etkv_error** error);

/**
 * Withdraws what etkv_seq_cache_begin_step() or
 * etkv_seq_cache_begin_step_shared() said, for a step that does not come. Does
 * nothing where nothing was said. ETKV_ERROR_STEP in the middle of a step.
 */
ETKV_API etkv_status
etkv_seq_cache_cancel_step(etkv_seq_cache* cache, etkv_error** error);

/**
 * Lets `target` have the positions of `source` in a range as well, in the same
 * cells: no bytes move.
 *
 * ETKV_ERROR_POSITION where `target` has other cells for some of them, or where
 * layers with windows have dropped what its next query would see.
 */
ETKV_API etkv_status etkv_seq_cache_cp(
    etkv_seq_cache* cache,
    int32_t source,
    int32_t target,
    int32_t begin,
    int32_t end,
    etkv_error** error);

/**
 * Takes the positions in a range from a sequence. A cell that no sequence has is
 * free; a sequence of which nothing is left begins at 0 again. All of them take
 * its tree away as well; a part of a sequence that carries a tree is
 * ETKV_ERROR_STEP.
 *
 * ETKV_ERROR_POSITION where the sequence would go on below what
 * etkv_seq_cache_rewindable_to() says.
 */
ETKV_API etkv_status etkv_seq_cache_rm(
    etkv_seq_cache* cache,
    int32_t sequence,
    int32_t begin,
    int32_t end,
    etkv_error** error);

/** Removes every sequence but one. */
ETKV_API etkv_status etkv_seq_cache_keep(
    etkv_seq_cache* cache,
    int32_t sequence,
    etkv_error** error);

/** Stores how many positions a sequence holds. */
ETKV_API etkv_status etkv_seq_cache_len(
    const etkv_seq_cache* cache,
    int32_t sequence,
    int32_t* length,
    etkv_error** error);

/**
 * Stores the position of a sequence's next token: one past its last. After a
 * removal at the front that is more than it holds.
 */
ETKV_API etkv_status etkv_seq_cache_next(
    const etkv_seq_cache* cache,
    int32_t sequence,
    int32_t* position,
    etkv_error** error);

/** As etkv_cache_rewindable_to(), for one of several sequences. */
ETKV_API etkv_status etkv_seq_cache_rewindable_to(
    const etkv_seq_cache* cache,
    int32_t sequence,
    int32_t* length,
    etkv_error** error);

/** Positions from `begin` up to, and without, `end`. */
typedef struct etkv_range {
  int32_t begin;
  int32_t end;
} etkv_range;

/**
 * Stores the positions that a sequence holds, as ranges in order, and in `n` how
 * many ranges there are. `ranges` has room for `room`, which is to be enough;
 * NULL and 0 ask for `n` alone.
 */
ETKV_API etkv_status etkv_seq_cache_positions(
    const etkv_seq_cache* cache,
    int32_t sequence,
    etkv_range* ranges,
    size_t room,
    size_t* n,
    etkv_error** error);

/**
 * Stores the numbers of the sequences that hold positions or carry trees, in
 * order, and in `n` how many there are; 256 at most. As above.
 */
ETKV_API etkv_status etkv_seq_cache_sequences(
    const etkv_seq_cache* cache,
    int32_t* sequences,
    size_t room,
    size_t* n,
    etkv_error** error);

/**
 * Makes each sequence one run of cells as far as what they share lets it, so
 * that it is read without a mask again. Moves only what has to.
 *
 * After ETKV_ERROR_MLX, where rows were moved already, the cache is poisoned until
 * it is cleared.
 */
ETKV_API etkv_status
etkv_seq_cache_compact(etkv_seq_cache* cache, etkv_error** error);

/* ---- Trees of candidates -------------------------------------------------- */

/** The face of a cache whose sequences carry trees of candidates. */
typedef struct etkv_tree_cache etkv_tree_cache;

/**
 * Makes a handle for trees on the same cache; ETKV_ERROR_KIND, naming its kind,
 * where it has none. The other handle stays.
 */
ETKV_API etkv_status etkv_cache_as_tree(
    const etkv_cache* cache,
    etkv_tree_cache** trees,
    etkv_error** error);

/** Gives back the handle; the cache lives on while others hold it. */
ETKV_API void etkv_tree_cache_free(etkv_tree_cache* cache);

/**
 * Appends a frontier of candidates to the tree behind a sequence: the queries of
 * its next step. Each sees the sequence, its ancestors and itself. A parent is
 * the number of an earlier node of the tree, over all its frontiers, or -1 for
 * the sequence itself. A node's position is the sequence's next and its depth.
 *
 * ETKV_ERROR_INVALID_ARGUMENT for no nodes or a parent that is no node before,
 * ETKV_ERROR_STEP where the last frontier has not been run, and
 * ETKV_ERROR_CAPACITY.
 */
ETKV_API etkv_status etkv_tree_cache_propose(
    etkv_tree_cache* cache,
    int32_t sequence,
    const int32_t* parents,
    size_t n_nodes,
    etkv_error** error);

/**
 * Makes a chain of candidates, from a child of the sequence down, part of it,
 * and forgets the rest of its tree; no nodes forget all of it.
 *
 * ETKV_ERROR_INVALID_ARGUMENT where there is no tree, or the nodes are no chain
 * of nodes that were run. After ETKV_ERROR_MLX, where rows were moved already,
 * the cache is poisoned until it is cleared.
 */
ETKV_API etkv_status etkv_tree_cache_commit(
    etkv_tree_cache* cache,
    int32_t sequence,
    const int32_t* accepted,
    size_t n_nodes,
    etkv_error** error);

/** Stores the nodes of the tree behind a sequence; 0 where there is none. */
ETKV_API etkv_status etkv_tree_cache_len(
    const etkv_tree_cache* cache,
    int32_t sequence,
    size_t* n_nodes,
    etkv_error** error);

/* ---- Sessions ----------------------------------------------------------- */

/** A cache, and the key under which programs find it. */
typedef struct etkv_session etkv_session;

/** Makes a cache, as etkv_cache_new() does, and registers it under a new key. */
ETKV_API etkv_status etkv_session_new(
    const char* backend_id,
    const char* kind,
    const etkv_cache_config* config,
    etkv_session** session,
    etkv_error** error);

/** Takes the key out of the registry. Programs bound to the cache keep it. */
ETKV_API void etkv_session_free(etkv_session* session);

/**
 * The key, valid until the session is freed; NULL if `session` is no session. A
 * program is loaded with it as the backend option `cache_key`.
 */
ETKV_API const char* etkv_session_key(const etkv_session* session);

/** Makes a handle on the session's cache. */
ETKV_API etkv_status etkv_session_cache(
    const etkv_session* session,
    etkv_cache** cache,
    etkv_error** error);

/** The same as the face for sequences: see etkv_cache_as_seq(). */
ETKV_API etkv_status etkv_session_seq(
    const etkv_session* session,
    etkv_seq_cache** cache,
    etkv_error** error);

/** The same as the face for trees: see etkv_cache_as_tree(). */
ETKV_API etkv_status etkv_session_tree(
    const etkv_session* session,
    etkv_tree_cache** cache,
    etkv_error** error);

/* ---- The registry --------------------------------------------------------- */

/*
 * Caches by key, for the whole process: where programs find theirs. Sessions do
 * all of this; it is here for hosts that name keys themselves.
 */

/**
 * Makes a cache known under a key, for programs of this backend.
 * ETKV_ERROR_INVALID_ARGUMENT where the key is taken or empty.
 */
ETKV_API etkv_status etkv_registry_install(
    const char* key,
    const char* backend_id,
    const etkv_cache* cache,
    etkv_error** error);

/** Makes a handle on the cache under a key; else ETKV_ERROR_NO_CACHE. */
ETKV_API etkv_status
etkv_registry_get(const char* key, etkv_cache** cache, etkv_error** error);

/** Forgets a key; who shares its cache keeps it. Else ETKV_ERROR_NO_CACHE. */
ETKV_API etkv_status etkv_registry_erase(const char* key, etkv_error** error);

/* ---- Hosts with an MLX of their own --------------------------------------- */

/**
 * The forwards of a host that computes with MLX itself, on a cache. `mlx_cache.hpp`
 * is this for C++.
 *
 * Arrays are pointers to `mlx::core::array`, and a stream is one to
 * `mlx::core::Stream`, of the very MLX that the library is linked to
 * (etkv_mlx_version()). What is passed in is shared, not copied; results are
 * assigned to arrays that the caller has made, of any shape.
 *
 * A forward begins with the call of the first layer, and has been when every layer
 * of the cache was called, once, with the same positions; in any order. A layer
 * that comes again, or with other positions, begins a new one: what was not
 * finished has not been. Where layers of a model share keys and values, the host
 * calls the layer once, and attends to what it gave as often as it likes. It
 * evaluates what it was given when it likes. Where that fails after the last
 * layer was called, the forward's positions are there with rows that nobody
 * knows: rewind them, or clear the cache.
 *
 * A call that is refused, or fails, ends the forward as well: it has not been.
 *
 * MLX works for one thread at a time. These calls wait for each other and for
 * programs; the host keeps its own work in MLX off other threads meanwhile. While a
 * forward is under way, what would change the cache is refused with
 * ETKV_ERROR_STEP rather than kept waiting.
 */
typedef struct etkv_forwards etkv_forwards;

/** Makes a handle; nothing else makes steps on the cache while it is in use. */
ETKV_API etkv_status etkv_forwards_new(
    const etkv_cache* cache,
    etkv_forwards** forwards,
    etkv_error** error);

/** Gives back the handle; a forward that is not finished has not been. */
ETKV_API void etkv_forwards_free(etkv_forwards* forwards);

/** The forward that is not finished, if there is one, has not been. */
ETKV_API etkv_status
etkv_forwards_abort(etkv_forwards* forwards, etkv_error** error);

/** What a layer brings. */
typedef struct etkv_mlx_rows {
  size_t struct_size;
  size_t layer;
  /** One a token, consecutive for each sequence. */
  const int32_t* positions;
  size_t n_positions;
  /** `mlx::core::array`, [1, n_kv_heads, n_positions, k_head_dim], a float. */
  const void* k;
  /** Likewise with v_head_dim. */
  const void* v;
  /** `mlx::core::Stream`; NULL for the library's own. */
  const void* stream;
} etkv_mlx_rows;

/** Which keys a query sees. */
typedef int32_t etkv_mask;
enum {
  /** All. */
  ETKV_MASK_NONE = 0,
  /** Query i of T all but the last T - 1 - i. */
  ETKV_MASK_CAUSAL = 1,
  /** Those that are true in an array of booleans. */
  ETKV_MASK_EXPLICIT = 2,
};

/**
 * Writes a layer's rows, and gives what its queries attend to.
 *
 * @param k          [1, n_kv_heads, L, k_head_dim], in the dtype of `rows->k`:
 *                   all of it unpacked where the cache stores it otherwise.
 * @param v          likewise.
 * @param mask_kind  how to mask.
 * @param mask       [n_positions, L], where that is ETKV_MASK_EXPLICIT; as it was
 *                   otherwise.
 */
ETKV_API etkv_status etkv_forwards_update_and_fetch(
    etkv_forwards* forwards,
    const etkv_mlx_rows* rows,
    void* k,
    void* v,
    etkv_mask* mask_kind,
    void* mask,
    etkv_error** error);

/**
 * Writes a layer's rows, and attends to what is there, as it is stored.
 *
 * @param q         `mlx::core::array`, [1, n_heads, n_positions, k_head_dim].
 * @param scale     of the scores.
 * @param attended  [1, n_heads, n_positions, v_head_dim], in the dtype of `q`.
 */
ETKV_API etkv_status etkv_forwards_update_and_attend(
    etkv_forwards* forwards,
    const etkv_mlx_rows* rows,
    const void* q,
    float scale,
    void* attended,
    etkv_error** error);

/* ---- Kinds of the host's own ---------------------------------------------- */

/**
 * A kind that the host makes of one that is there: the inner cache keeps rows and
 * positions, and the host's callbacks are around it. That is enough to ration, to
 * evict, to write down what happens, or to refuse; not to store rows another way.
 *
 * `inner` is the host's handle on the inner cache: every function of this header
 * takes it, etkv_cache_as_seq() and others among them. It lives from `create`
 * until `destroy` has returned, and is not to be freed. While a step is open, the
 * inner cache refuses to be changed.
 *
 * A callback that fails returns its status and stores an error of
 * etkv_error_new(), or none; it is taken over, and told to who made the call. One
 * that is NULL leaves the inner cache to it.
 */
typedef struct etkv_cache_vtable {
  size_t struct_size;
  /** A cache of the kind is made: stores in `state` what the others get. */
  etkv_status (*create)(
      void* context,
      etkv_cache* inner,
      void** state,
      etkv_error** error);
  /** The last owner of the cache is gone. Not called where `create` failed. */
  void (*destroy)(void* state);
  /**
   * In place of the inner cache's, which it may change; `n` is at least 0. Where it
   * fails they do not fit, and nobody is told why.
   */
  etkv_status (*can_extend)(
      void* state,
      etkv_cache* inner,
      int32_t n,
      bool* fits,
      etkv_error** error);
  /**
   * A program is about to make a step of `n` tokens with these positions. The
   * inner cache can still be changed, to make room for them.
   */
  etkv_status (*begin_step)(
      void* state,
      etkv_cache* inner,
      const int32_t* positions,
      size_t n,
      etkv_error** error);
  /** The step has been, or has not: once for each `begin_step` that worked. */
  void (*end_step)(void* state, etkv_cache* inner, bool committed);
  /** In place of the inner cache's. */
  etkv_status (
      *clear)(void* state, etkv_cache* inner, bool release, etkv_error** error);
  /** In place of the inner cache's. */
  etkv_status (*rewind)(
      void* state,
      etkv_cache* inner,
      int32_t length,
      etkv_error** error);
} etkv_cache_vtable;

/**
 * Makes a kind known, for as long as the process lives. Its caches have the faces
 * that those of `base` have.
 *
 * @param backend_id  the backend that will use it: "MLXBackend".
 * @param kind        its name, which no kind of that backend has yet.
 * @param base        the kind of "MLXBackend" that it is made of.
 * @param vtable      copied; its functions, and `context`, are to live as long.
 */
ETKV_API etkv_status etkv_builder_register(
    const char* backend_id,
    const char* kind,
    const char* base,
    const etkv_cache_vtable* vtable,
    void* context,
    etkv_error** error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#include "etkv/log.h"
#include "etkv/report.h"

#endif /* ETKV_ETKV_H */
