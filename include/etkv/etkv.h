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
 *   Facts     What cannot fail for a live handle is returned as it is: what was
 *             fixed when the object was made, and another handle on the same.
 *             Asked of NULL, of a handle that was freed and of one of another
 *             type, such a function returns a value that no live handle has, 0
 *             or NULL, and says so. What changes, the length for one, is asked
 *             with a status: a defect may have broken the cache.
 *   Structs   begin with `struct_size`, which the caller sets to the size it was
 *             compiled with. They only ever grow at the end. A field that is
 *             zero has its default, so a struct is set to zero first.
 *   Strings   are UTF-8 and end in a zero byte. Those that functions take are
 *             copied.
 *   Arrays    are a pointer and a number of elements; NULL is fine for none.
 *   Defects   inside become ETKV_ERROR_INTERNAL. A program or a cache that one
 *             happened in refuses everything afterwards but being freed and being
 *             asked for facts, through every handle on it, with that status.
 *
 * Ownership
 *   Who gets a pointer to a handle type of this header from a function owns it,
 *   and frees it once, with the function named after its type. Handles are
 *   numbers that only look like pointers: one that was freed, one of another
 *   type and what never was one are refused with ETKV_ERROR_INVALID_ARGUMENT, or
 *   with the value that no live handle has, and freeing them does nothing. No number is given twice. As memory they are
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
 *   Facts are told at once.
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

#include "etkv/cache.h"
#include "etkv/config.h"
#include "etkv/custom.h"
#include "etkv/delegate.h"
#include "etkv/error.h"
#include "etkv/export.h"
#include "etkv/forwards.h"
#include "etkv/kinds.h"
#include "etkv/log.h"
#include "etkv/memory.h"
#include "etkv/process.h"
#include "etkv/registry.h"
#include "etkv/report.h"
#include "etkv/seq.h"
#include "etkv/session.h"
#include "etkv/tree.h"
#include "etkv/version.h"

#include "etkv/log.h"
#include "etkv/report.h"

#endif /* ETKV_ETKV_H */
