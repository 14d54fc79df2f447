"""The C interface. :func:`lib` returns its functions, and :func:`call` raises their errors.

The build generates a cffi module from ``etkv.h``, so signatures are written once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any, Literal, NoReturn, overload

from etkv import _library, _log
from etkv.errors import EtkvError, status_error

ABI_VERSION = 17
"""The minimum ``etkv_abi_version()`` that this package works with."""

INT32_MAX = 2**31 - 1

_loading = threading.Lock()
_loaded: tuple[Any, Any] | None = None
"""cffi's ``ffi`` with the types of the interface, and the library."""

_log_setting = threading.Lock()
_log_filter = ""
"""The log filter that was last set in the library; "" for no messages."""


def lib() -> Any:
    """Return the loaded library, with the functions of ``etkv.h``."""
    return (_loaded or _load())[1]


class _Ffi:
    """cffi's ``ffi``, which loads the library on first use, because an export does not need the library."""

    def __getattr__(self, name: str) -> Any:
        value = getattr((_loaded or _load())[0], name)
        # Later reads find the attribute without __getattr__.
        setattr(self, name, value)
        return value


ffi: Any = _Ffi()


def _load() -> tuple[Any, Any]:
    global _loaded
    with _loading:
        # Another thread may have loaded the library meanwhile.
        if _loaded is None:
            path = str(_library.etkv())
            tables = ModuleType("etkv.capi_tables")
            SourceFileLoader(tables.__name__, str(_library.capi_tables())).exec_module(tables)
            library = tables.ffi.dlopen(path)
            version = library.etkv_abi_version()
            if version < ABI_VERSION:
                raise EtkvError(f"{path} has interface {version}, this package needs {ABI_VERSION}: build it again")
            _loaded = tables.ffi, library
        return _loaded


def call(function: str, *arguments: Any) -> None:
    """Call a function that returns a status and whose last parameter is ``etkv_error**``. Raises its error."""
    library = lib()
    error = ffi.new("etkv_error**")
    status = getattr(library, function)(*arguments, error)
    if _log_filter:
        _deliver_log()
    if status:
        raise _taken(error[0], status)


def ask_text(function: str, *arguments: Any) -> str:
    """Call a function as :func:`call` does. Return the string that it stores in its last parameter before ``error``."""
    out = ask(function, "char*", *arguments)
    try:
        return text(out)
    finally:
        lib().etkv_string_free(out)


@overload
def ask(function: str, kind: Literal["int32_t", "size_t", "uint64_t"], *arguments: Any) -> int: ...


@overload
def ask(function: str, kind: Literal["bool"], *arguments: Any) -> bool: ...


@overload
def ask(function: str, kind: str, *arguments: Any) -> Any: ...


def ask(function: str, kind: str, *arguments: Any) -> Any:
    """Call a function as :func:`call` does. Return the value that it stores in its last parameter before ``error``.

    ``kind`` is the C type of the value.
    """
    out = ffi.new(f"{kind}*")
    call(function, *arguments, out)
    return out[0]


def ask_list(function: str, kind: str, *arguments: Any, of: Callable[[Any], Any] | None = None) -> list[Any]:
    """Call a function with the last parameters ``(array, room, n, error)``. Return the values, converted by ``of``.

    Structs need ``of``, because they point into the array, and this function frees the array.
    """
    n = ffi.new("size_t*")
    call(function, *arguments, ffi.NULL, 0, n)
    while True:
        room = n[0]
        array = ffi.new(f"{kind}[]", room)
        try:
            call(function, *arguments, array, room, n)
        except EtkvError:
            # Another thread may have added values since they were counted. Then count again.
            call(function, *arguments, ffi.NULL, 0, n)
            if n[0] <= room:
                raise
            continue
        values = list(array[0 : n[0]])
        return values if of is None else [of(value) for value in values]


def struct(kind: str, **fields: Any) -> Any:
    """Return a struct of the interface with its ``struct_size`` set."""
    result = ffi.new(f"{kind}*")
    result.struct_size = ffi.sizeof(kind)
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def ask_tokens(function: str, *arguments: Any) -> list[int]:
    """Call a function, and return the token ids that it stores in its last two parameters before ``error``."""
    tokens, n = ffi.new("int64_t**"), ffi.new("size_t*")
    call(function, *arguments, tokens, n)
    try:
        return list(tokens[0][0 : n[0]])
    finally:
        lib().etkv_tokens_free(tokens[0], n[0])


def text_options(tokens: Sequence[int], fingerprint: str) -> tuple[Any, Any]:
    """Return the C options for ``tokens`` and ``fingerprint``, and the objects that must outlive them."""
    model = ffi.new("char[]", encoded(fingerprint, "fingerprint"))
    listed = int64s(tokens, "tokens")
    options = struct("etkv_save_options", fingerprint=model, tokens=listed, n_tokens=len(tokens))
    return options, (model, listed)


def encoded(value: str, name: str) -> bytes:
    """Return ``value`` as a C string. Raises :class:`EtkvError` if it is not a string or has a zero byte."""
    if not isinstance(value, str) or "\0" in value:
        raise EtkvError(f"{name} is {value!r}, expected a name")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise EtkvError(
            f"{name} is {value!r}, expected text; UTF-8 cannot encode its character {error.start}"
        ) from error


def encoded_path(path: str | os.PathLike[str], name: str = "path") -> bytes:
    """Return ``path`` as a C string."""
    return encoded(os.fspath(path), name)


def int32s(values: Sequence[int], name: str) -> Any:
    """Return ``values`` as a C array. Raises :class:`EtkvError` for a value that is not a 32-bit integer."""
    try:
        return ffi.new("int32_t[]", [int32(value, name) for value in values])
    except TypeError as error:
        raise EtkvError(f"{name} is {values!r}, expected a list of integers") from error


def int64s(values: Sequence[int], name: str) -> Any:
    """Return ``values`` as a C array. Raises :class:`EtkvError` for a value that is not a 64-bit integer."""
    try:
        return ffi.new("int64_t[]", [value.__index__() for value in values])
    except (AttributeError, OverflowError, TypeError) as error:
        raise EtkvError(f"{name} is {values!r}, expected a list of 64-bit integers") from error


def int32(value: int, name: str) -> int:
    """Return ``value``. Raises :class:`EtkvError` if it is not a 32-bit integer."""
    try:
        number = value.__index__()
    except AttributeError:
        raise EtkvError(f"{name} is {value!r}, expected an integer") from None
    if not -INT32_MAX - 1 <= number <= INT32_MAX:
        raise EtkvError(f"{name} is {number}, expected a 32-bit integer")
    return number


def text(pointer: Any) -> str:
    """Return the text of a C string; "" for NULL."""
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode("utf-8", "replace")


def deliver_log() -> None:
    """Pass the library's messages to the loggers. Call it only on a thread that holds no lock of the library."""
    if _log_filter:
        _deliver_log()


def _deliver_log() -> None:
    library, out = lib(), ffi.new("char**")
    if library.etkv_log_take(out, ffi.NULL) == 0 and out[0] != ffi.NULL:
        messages = text(out[0])
        library.etkv_string_free(out[0])
        _log.deliver(messages)


def follow_log_levels() -> None:
    """Set the library's filter to the levels of the loggers, or to none if no handler accepts a record."""
    new_filter = _log.wanted()
    if new_filter != _log_filter:
        # This fails if Rust code of the process has set its own subscriber. That subscriber then receives the
        # messages.
        with contextlib.suppress(EtkvError):
            _set_log_filter(new_filter)


def set_log_level(level: int | str) -> None:
    """Set the level of the logger ``etkv``, with immediate effect.

    A level that is set with :mod:`logging` takes effect at the next session, program or step.
    """
    logging.getLogger("etkv").setLevel(level)
    _set_log_filter(_log.wanted())


def _set_log_filter(new_filter: str) -> None:
    global _log_filter
    library, error = lib(), ffi.new("etkv_error**")
    with _log_setting:
        if new_filter:
            status = library.etkv_log_keep(new_filter.encode(), _log.KEPT, error)
        else:
            status = library.etkv_set_log_callback(ffi.NULL, ffi.NULL, ffi.NULL, error)
        if not status:
            _log_filter = new_filter
    if status:
        raise _taken(error[0], status)
    # Deliver the messages from before the change.
    _deliver_log()


def raise_delegate_error(otherwise: Callable[[], EtkvError], cause: BaseException) -> NoReturn:
    """Raise the delegate's last error on this thread, or ``otherwise()`` if there is none. ``cause`` becomes its
    cause.
    """
    error = lib().etkv_delegate_take_error()
    if error == ffi.NULL:
        raise otherwise() from cause
    raise _taken(error, lib().etkv_error_status(error)) from cause


def abort_forward() -> None:
    """Roll back this thread's step of a CPU program after an operator of ExecuTorch failed."""
    lib().etkv_delegate_abort_forward()


def forget_delegate_error() -> None:
    """Drop an earlier error of this thread, so that it is not reported as the reason for the next failure."""
    lib().etkv_error_free(lib().etkv_delegate_take_error())


def _taken(error: Any, status: int) -> EtkvError:
    message = text(lib().etkv_error_message(error))
    lib().etkv_error_free(error)
    return status_error(status, message)
