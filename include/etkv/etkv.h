/*
 * etkv: the KV cache of an ExecuTorch program, as a library.
 *
 * The C interface. `etkv.hpp` wraps it for C++. `executorch.hpp` adds the
 * functions that use types of ExecuTorch.
 *
 * Conventions
 *   Names     etkv_<type>_<verb>. `_new` makes a handle, and `_free` frees it.
 *             Freeing NULL does nothing.
 *   Results   A function that can fail returns an etkv_status. Its last
 *             parameter is `etkv_error** error`. On failure the function stores
 *             an error object there, and the caller frees that object. Pass
 *             NULL to ignore errors. A failed call changes nothing else: it
 *             writes no other out-parameter, and the object that it was called
 *             on stays as it was. The comment of a function names exceptions.
 *   Facts     A fact is fixed when the object is made, such as the capacity.
 *             The functions that return facts, and those that return another
 *             handle to the same object, have no status. For NULL, for a freed
 *             handle and for a handle of another type they return the value
 *             that their comment names, 0 or NULL. A function that returns a
 *             value that can change, such as the length, has a status, because
 *             the cache may be poisoned.
 *   Structs   begin with `struct_size`. The caller sets it to the `sizeof` of
 *             the struct. Structs only grow, at the end. The library accepts a
 *             struct of its own version or a newer one, and refuses a smaller
 *             one. A field that is zero has its default, so set a struct to
 *             zero first.
 *   Strings   are UTF-8 and end in a zero byte. Functions copy the strings
 *             that they take.
 *   Arrays    are a pointer and a number of elements. NULL is allowed for 0
 *             elements.
 *   Defects   inside etkv become ETKV_ERROR_INTERNAL. After a defect, the
 *             program or the cache in which it happened returns that status
 *             from every call, through every handle. The object can still be
 *             freed, and its facts are still returned.
 *   Poisoned  A cache is poisoned if a failure left its contents unknown. After
 *             ETKV_ERROR_BACKEND, etkv_cache_clear() makes it usable again.
 *             After a defect it can only be freed.
 *
 * Ownership
 *   A caller that receives a pointer to a handle type of this header owns it,
 *   and frees it once, with the function named after its type. Handles are
 *   numbers that look like pointers, and no number is used twice. A freed
 *   handle, one of another type and a foreign pointer are refused with
 *   ETKV_ERROR_INVALID_ARGUMENT, or with the value for no live handle. Freeing
 *   them does nothing. Leak checkers do not see handles; etkv_live_handles()
 *   counts them.
 *
 *   A cache is not a handle. Its owners are its handles (etkv_cache,
 *   etkv_seq_cache, etkv_tree_cache, etkv_forwards and etkv_generation), its
 *   session, its entries in the registry, and the programs that were loaded
 *   with its key. It lives until the last of them is gone, in any order.
 *   Freeing a handle never frees a cache that has other owners.
 *
 *   A session owns one entry of the process-wide registry, under a key that is
 *   unique in the process. An entry of etkv_registry_install() stays until it
 *   is erased.
 *
 *   A string that a function returns is static, or lives as long as the handle
 *   that it belongs to. The comment of the function says which. JSON that a
 *   function stores belongs to the caller: free it with etkv_string_free().
 *
 * Threads
 *   Every function may be called on any thread, and one handle may be used by
 *   several threads at once. A thread may free a handle that another thread
 *   uses: the call in progress ends as if the handle were freed after it.
 *   Strings that belong to the handle are not valid after the free.
 *
 *   Calls on one cache run one at a time, and never during a step of a program.
 *   A call during a step waits for the step to end. It sees the cache before or
 *   after the step, never in between. Functions that return facts do not wait.
 *   On the CPU backend, calls that change the cache do not wait either: they
 *   return ETKV_ERROR_STEP during a step.
 *
 *   Calls that move, convert or free rows also wait for MLX, which accepts work
 *   from one thread at a time. A thread that waits for a cache, for the device,
 *   or for the host to copy outputs lets others use MLX meanwhile.
 *
 *   The caller must lock calls that belong together. Another thread may run
 *   between etkv_cache_can_extend() and the step, or between
 *   etkv_seq_cache_begin_step() and its step. The declaration that
 *   etkv_seq_cache_begin_step() makes belongs to the cache, not to the thread.
 *   Without a lock, a step may run under the declaration of another thread. If
 *   both sequences are at the same position, the step's rows are then written
 *   to the wrong sequence, without an error.
 *
 *   A process that is forked from one with live handles has none of etkv's
 *   threads, and locks that other threads held stay locked. In such a process
 *   every call that can fail returns ETKV_ERROR_STEP, facts are returned as for
 *   a handle that is not live, and nothing is freed. Call exec() after fork(),
 *   or make handles in the new process only. Programs of ExecuTorch and MLX
 *   cannot run there either, but etkv does not refuse them.
 *
 *   The callback of etkv_kinds() runs on the calling thread, within the call,
 *   without locks. The log callback runs on any thread, on several at once, and
 *   must not call etkv: see watch.h. The memory callback runs in the middle of
 *   the call that needs memory, and may call etkv: see memory.h. No callback may
 *   exit by an exception.
 */
#ifndef ETKV_ETKV_H
#define ETKV_ETKV_H

#include "etkv/cache.h"
#include "etkv/config.h"
#include "etkv/delegate.h"
#include "etkv/error.h"
#include "etkv/export.h"
#include "etkv/forwards.h"
#include "etkv/generation.h"
#include "etkv/memory.h"
#include "etkv/metadata.h"
#include "etkv/prefix.h"
#include "etkv/saving.h"
#include "etkv/seq.h"
#include "etkv/session.h"
#include "etkv/version.h"
#include "etkv/watch.h"

#endif /* ETKV_ETKV_H */
