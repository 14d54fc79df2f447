"""Runs programs from Python with the runtime of the installed ExecuTorch.

:func:`load` opens a ``.pte`` and binds it to a session. After :func:`register_backend`, ExecuTorch's
``executorch.runtime`` runs the same programs: see :meth:`etkv.Session.bound`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeAlias, TypeVar, overload

from etkv import _capi, _library, pte
from etkv._log import executorchs_lines
from etkv.errors import CapacityError, EtkvError, KindError, ProgramError, UnsupportedError, first_line
from etkv.graph_cache import GraphCache
from etkv.session import Logits, Passes, Session, load_options

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from etkv.metadata import ModelCacheParams

    IdArray: TypeAlias = npt.NDArray[np.integer[Any]] | Sequence[SupportsIndex]
    """Integers without torch: a numpy array of any integer type, or a sequence."""
    Ids: TypeAlias = torch.Tensor | IdArray
    """Integers: a tensor or array of any integer type, or a sequence."""
    RowArray: TypeAlias = npt.NDArray[np.floating[Any]]
    """Rows of logits, as a numpy array."""

_T = TypeVar("_T")

METHOD = "forward"

_process: int | None = None
"""The id of the process that loaded the first program. A process that is forked from it cannot run programs."""


def register_backend() -> str:
    """Register etkv's delegates with the installed ExecuTorch's runtime, in this process. A second call does nothing.

    Returns the id of the backend that runs MLX programs on etkv's caches: ``MLXBackend``, or ``EtkvForMLX`` if
    ExecuTorch's own MLX backend was registered before. On macOS ``import executorch.runtime`` registers ExecuTorch's
    backend. :func:`load` works with both ids.

    Raises :class:`EtkvError` if ExecuTorch, MLX or the native libraries are missing or of another release.
    """
    with _library.EXECUTORCH_CALLS:
        return _library.backends()


def load(
    path: str | Path,
    session: Session | None,
    *,
    logits: Logits = "all",
    passes: Passes = "default",
    method: str = METHOD,
    warm_up: bool = True,
    beyond_context: bool = False,
) -> Program:
    """Open the program at ``path`` and bind it to the cache of ``session``.

    ``session`` may be ``None`` for a program without a cache, or with a cache in its graph. The program is then bound
    to no session, even within :meth:`etkv.Session.bound`.

    ``logits`` selects the rows of logits that a step returns. ``all`` returns all rows. ``last`` returns the last row,
    which is enough for a prompt. ``proposed`` returns all rows in steps of proposed candidates
    (:meth:`TreeSession.propose`) and of declared sequences (:meth:`SeqSession.begin_step`), and the last row in other
    steps. Verifying a tree needs ``all`` or ``proposed``. CPU programs refuse ``proposed``.

    ``passes`` selects the optimization passes of an MLX program: ``default``, ``interpreted`` for no CUDA graphs, or
    ``none`` to run the program as exported, for comparisons. ``method`` is the name of the method to run. On a GPU
    ``warm_up`` runs a few steps and rolls them back, so that the first token takes no longer than later tokens.

    A step beyond the context that the program was exported for is refused, unless ``beyond_context`` is set. An answer
    ends at this context as it does at the end of the cache.

    Raises :class:`EtkvError` if something is missing or does not fit. The message names it.
    """
    path = Path(path)
    if session is not None and not isinstance(session, Session):
        raise EtkvError(f"session is {session!r}, expected a DecodeSession, SeqSession or TreeSession")
    _capi.encoded(str(path), "path")
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise EtkvError(f"{path} cannot be read: {error.strerror}") from error
    pte.check_mark(head, path)
    program = Program(path, session, logits, method, register_backend(), passes, beyond_context)
    if warm_up and session is not None:
        program.warm_up()
    return program


_LONG = 4
"""ExecuTorch's number of the dtype int64."""

_log = logging.getLogger("etkv.program")

_NUMBERS = itertools.count()
"""Numbers of programs, which distinguish their buffers."""


class Closable(Protocol):
    """An object that is closed with a program."""

    def close(self) -> None: ...


class Program:
    """A loaded program, from :func:`load`. It is a context manager: leaving it releases weights and cache.

    ``session`` is the session that the program is bound to. ``cache`` is the cache that its steps extend: the session,
    the :class:`GraphCache` of a program with its cache in its graph, or ``None``. ``max_step_tokens`` is the maximum
    tokens of a step; ``None`` if the first input is not token ids. Any thread may run the program. A process runs one
    step at a time. A process that was forked after a program was loaded lacks the threads of ExecuTorch and MLX:
    loading and running raise :class:`EtkvError` there.
    """

    def __init__(
        self,
        path: Path,
        session: Session | None,
        logits: Logits,
        method: str,
        backend: str,
        passes: Passes = "default",
        beyond_context: bool = False,
    ) -> None:
        _require_one_process()
        _capi.follow_log_levels()
        self.path = path
        self.session = session
        self._buffers = f"etkv program {next(_NUMBERS)}"
        self.context: int | None = None
        """Number of positions that steps may use, if the session has more positions; None otherwise."""
        self._metadata: ModelCacheParams | None = None
        self._parts: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._closing = False
        self.cache: Session | GraphCache | None = session
        try:
            with _library.EXECUTORCH_CALLS, executorchs_lines():
                self._open(method, backend)
                self._load(logits, passes, method, beyond_context)
        finally:
            _capi.deliver_log()

    def _open(self, method: str, backend: str) -> None:
        from executorch.runtime import Runtime, Verification

        path = self.path
        try:
            # For another backend id, load a copy of the file in memory with that id.
            data = path if backend == _library.MLX_BACKEND else pte.for_backend(path, backend)
            self._program = Runtime.get().load_program(data, verification=Verification.InternalConsistency)
        except pte.DAMAGE as error:
            raise ProgramError(f"{path} is damaged: {first_line(error)}") from error
        if method not in self._program.method_names:
            names = ", ".join(sorted(self._program.method_names))
            raise EtkvError(f"{path} has no method {method!r}; it has {names}")

    def check_context(self, position: int) -> None:
        """Raise :class:`CapacityError` if ``position`` is beyond the context that the program was exported for."""
        if self.context is not None and position >= self.context:
            raise CapacityError(
                f"position {position} is beyond the context of {self.context} tokens that {self.path.name} was "
                "exported for: export it with a larger --max-context, or load it with beyond_context=True"
            )

    def _limit_context(self, capacity: int) -> None:
        context = self._context_length()
        if 0 < context < capacity:
            self.context = context
            _log.warning(
                "the session has a capacity of %d, and %s was exported for a context of %d: steps beyond that are "
                "refused",
                capacity,
                self.path,
                context,
            )

    def _context_length(self) -> int:
        from etkv.metadata import CONTEXT_NAMES, context_length

        return context_length({name: self.constant(name) for name in self.method_names.intersection(CONTEXT_NAMES)})

    def _load(self, logits: Logits, passes: Passes, method: str, beyond_context: bool) -> None:
        path, session = self.path, self.session
        _capi.forget_delegate_error()
        try:
            if session is not None and not beyond_context:
                self._limit_context(session.capacity)
            key = None if session is None else session.key
            with load_options(key, logits, passes, self._buffers):
                self._method = self._program.load_method(method)
            self.max_step_tokens = _max_tokens(self._method.metadata)
            if session is None:
                self.cache = self._graph_cache()
        except pte.DAMAGE as error:
            reason = f"the method {method} of {path} cannot be loaded: {first_line(error)}"
            _capi.raise_delegate_error(lambda: ProgramError(reason), error)

    def _graph_cache(self) -> GraphCache | None:
        """Return the cache in the graph; None if there is none, or if the inputs are not tokens and positions."""
        from etkv.metadata import describes_layers

        if not _takes_text(self._method.metadata) or describes_layers(self._program.method_names):
            return None
        context = self._context_length()
        with contextlib.suppress(EtkvError):
            return GraphCache(self._buffers, context) if context else None
        # The program keeps no buffers between calls.
        return None

    def reset_buffers(self) -> None:
        """Zero the buffers that the program keeps between calls, such as a cache in its graph.

        Raises :class:`EtkvError` if it has no such buffers.
        """
        if isinstance(self.cache, GraphCache):
            self.cache.clear()
            return
        _capi.call("etkv_delegate_reset_buffers", _capi.ffi.new("char[]", self._buffers.encode()))

    @overload
    def forward(self, tokens: torch.Tensor, positions: Ids, *, copy: bool = True) -> torch.Tensor: ...

    @overload
    def forward(self, tokens: IdArray, positions: Ids, *, copy: bool = True) -> RowArray: ...

    def forward(self, tokens: Ids, positions: Ids, *, copy: bool = True) -> torch.Tensor | RowArray:
        """Run one step of ``tokens`` [T] or [1, T] at ``positions`` [T], [T, 1] or [1, T]. Return the logits.

        The logits are [T, vocabulary], or [1, vocabulary] if the program computes only the last row. They are a torch
        tensor in the program's dtype if ``tokens`` is a torch tensor, else a numpy array. Numpy lacks bfloat16, so
        bfloat16 rows become float32. Without ``copy`` the rows are memory of the program, valid until its next step.

        Raises :class:`EtkvError` if the inputs do not fit or the step fails. The cache is then unchanged, unless the
        last product of a CPU program fails: see docs/cpu.md.
        """
        ids, at = self._step_inputs(tokens, positions)
        rows = self.execute(ids, at, copy=copy)[0]
        rows = rows.reshape(rows.shape[-2:])
        if not copy:
            # The rows are memory of the program, so they keep the program alive.
            rows.owners = (self._method, self._program)
        return rows if _is_tensor(tokens) else _array(rows)

    def last_row(self, tokens: Ids, positions: Ids) -> RowArray:
        """Run one step as :meth:`forward` does, and return a copy of the last row of the logits, [vocabulary]."""
        ids, at = self._step_inputs(tokens, positions)

        def last(outputs: list[Any]) -> RowArray:
            rows = outputs[0]
            return _array(rows.reshape(rows.shape[-2:])[-1].clone())

        return self._run((ids, at), False, last)

    def _step_inputs(self, tokens: Ids, positions: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of a step, [1, T] and [T]. Raises :class:`EtkvError` if they do not fit."""
        ids, at = _integers(tokens, "tokens"), _integers(positions, "positions")
        if ids.numel() != ids.shape[-1:].numel():
            raise EtkvError(f"tokens has shape {list(ids.shape)}, expected [T] or [1, T]")
        if at.numel() != max(at.shape, default=1):
            raise EtkvError(f"positions has shape {list(at.shape)}, expected [T], [T, 1] or [1, T]")
        ids, at = ids.reshape(1, -1), at.reshape(-1)
        if ids.numel() != at.numel():
            raise EtkvError(f"expected a position for each of {ids.numel()} tokens, got {at.numel()}")
        if self.max_step_tokens is not None and ids.numel() > self.max_step_tokens:
            raise EtkvError(f"the step has {ids.numel()} tokens, the program takes at most {self.max_step_tokens}")
        return ids, at

    def execute(self, *inputs: Any, copy: bool = True) -> list[Any]:
        """Run the method on its declared inputs, which are torch tensors or integers, and return its outputs.

        Raises :class:`EtkvError` if the inputs do not fit or the step fails, or if the program or session is closed.
        """
        return self._run(inputs, copy, list)

    def _run(self, inputs: tuple[Any, ...], copy: bool, take: Callable[[list[Any]], _T]) -> _T:
        """Run the method, and return ``take(outputs)``. No other thread runs or closes the program before ``take``
        returns.
        """
        self.check_open()
        _capi.follow_log_levels()
        try:
            with _library.EXECUTORCH_CALLS:
                return take(self._call(inputs, copy))
        finally:
            _capi.deliver_log()

    def check_open(self) -> None:
        """Raise :class:`EtkvError` if the program or its session is closed, or if the process was forked."""
        _require_one_process()
        self._opened(None if self._closing else self._method)
        if self.session is not None and self.session.closed:
            raise EtkvError(f"the session of {self.path.name} is closed: load the program with an open session")

    def warm_up(self) -> None:
        """Run a few steps on a GPU, if the session is empty, and roll them back. Does nothing on a CPU."""
        self.check_open()
        assert self.session is not None
        # A CPU program needs no warm-up.
        with contextlib.suppress(KindError, UnsupportedError):
            _capi.call("etkv_generation_warm_up", self.session._raw(), _capi.ffi.NULL, _capi.ffi.NULL)

    def choose(self, tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Run a step as :meth:`forward` does, and return the argmax of each token's logits.

        The device computes the argmax, so the logits are not copied. A GPU verifies a few tokens in less time than the
        copy would take. Needs an MLX program that was loaded with ``logits`` ``all`` or ``proposed``; raises
        :class:`UnsupportedError` or :class:`KindError` for other programs. After an error the cache is unchanged.
        """
        self.check_open()
        if self.session is None:
            raise EtkvError(f"{self.path.name} was loaded without a session: pass one to etkv.load")
        if len(tokens) == 0 or len(tokens) != len(positions):
            given = f"{len(tokens)} tokens at {len(positions)} positions"
            raise EtkvError(f"{given}; expected at least 1 token, and a position for each")
        for what, numbers, bits in (("token", tokens, 63), ("position", positions, 31)):
            for number in numbers:
                if not -(2**bits) <= number < 2**bits:
                    raise EtkvError(f"{what} {number}; expected 0 to {2**bits - 1}")
        self.check_context(max(positions))
        chosen = _capi.ffi.new("int64_t[]", len(tokens))
        ids, at = _capi.ffi.new("int64_t[]", list(tokens)), _capi.ffi.new("int32_t[]", list(positions))
        _capi.call("etkv_generation_choose", self.session._raw(), ids, at, len(tokens), chosen)
        return list(chosen)

    def ends_with(self, part: Closable) -> None:
        """Close ``part``, which uses the program, when the program is closed."""
        self._parts.add(part)

    def _call(self, inputs: tuple[Any, ...], copy: bool) -> list[Any]:
        loaded = self._opened(self._method)
        _check_inputs(inputs, loaded.metadata, self.path.name)
        if self.context is not None and _takes_text(loaded.metadata) and inputs[1].numel():
            self.check_context(int(inputs[1].max()))
        _capi.forget_delegate_error()
        try:
            # The public `execute` always copies the outputs.
            outputs = list(loaded._method.call(list(inputs), clone_outputs=copy))
        except RuntimeError as error:
            _capi.abort_forward()
            reason = f"{self.path.name}: {first_line(error)}"
            _capi.raise_delegate_error(lambda: EtkvError(reason), error)
        if isinstance(self.cache, GraphCache):
            self.cache.ran_to(int(inputs[1][-1]) + 1)
        return outputs

    @property
    def metadata(self) -> ModelCacheParams:
        """Return the cache metadata of the program. Raises :class:`EtkvError` if it is absent or not valid."""
        if self._metadata is None:
            from etkv.metadata import read_kv_cache_metadata, with_dtype

            names = [name for name in self.method_names if name.startswith(("kv_cache.", "get_"))]
            constants = with_dtype({name: self.constant(name) for name in names}, self.path)
            self._metadata = read_kv_cache_metadata(constants)
        return self._metadata

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Return the ids that end an answer; empty if the program does not contain them."""
        return frozenset(self.constant("get_eos_ids") or ())

    def constant(self, name: str) -> Any:
        """Return the value of a constant method, such as ``get_max_ctx_len``; ``None`` if there is none."""
        return pte.constant(self._opened(self._program), name) if name in self.method_names else None

    @property
    def method_names(self) -> set[str]:
        """Return the names of the program's methods."""
        return set(self._opened(self._program).method_names)

    @property
    def closed(self) -> bool:
        """Return whether :meth:`close` was called."""
        return self._program is None

    def _opened(self, part: Any) -> Any:
        if part is None:
            raise EtkvError(f"the program {self.path.name} is closed: load it again")
        return part

    def close(self) -> None:
        """Release the weights and the cache, and end answers: requests for further tokens raise an error.

        Waits for a step on another thread. Closing twice does nothing.
        """
        # Set first, so that a step that fails because its answer was released can report the reason.
        self._closing = True
        for part in list(self._parts):
            part.close()
        with _library.EXECUTORCH_CALLS:
            self._method = None
            self._program = None

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"bound to {self.cache!r}" if self.cache else "without a session"
        return f"<{type(self).__name__}: {self.path.name}, {state}>"


def _require_one_process() -> None:
    """Raise :class:`EtkvError` in a forked process, where a call would wait forever for the parent's threads."""
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise EtkvError(
            f"cannot run a program in process {os.getpid()}: it was forked from process {_process} after a program was "
            "loaded there; start it with multiprocessing's spawn method"
        )


def _check_inputs(inputs: Sequence[Any], method: Any, name: str) -> None:
    """Raise :class:`EtkvError` for a wrong number or rank of inputs, or sizes above the declared sizes.

    ExecuTorch's own error is only a code.
    """
    import torch

    if len(inputs) != method.num_inputs():
        raise EtkvError(f"{name} has {method.num_inputs()} inputs, {len(inputs)} are given")
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            continue
        try:
            most = list(method.input_tensor_meta(index).sizes())
        except pte.DAMAGE as error:
            raise EtkvError(f"input {index} of {name} is not a tensor: {first_line(error)}") from error
        sizes = list(value.shape)
        if len(sizes) != len(most) or any(size > limit for size, limit in zip(sizes, most, strict=True)):
            raise EtkvError(f"input {index} of {name} has shape {sizes}, expected at most {most}")


def _max_tokens(method: Any) -> int | None:
    """Return the maximum tokens of one step; None for a method whose first input is not [1, T]."""
    if method.num_inputs() == 0:
        return None
    sizes = method.input_tensor_meta(0).sizes()
    return sizes[1] if len(sizes) == 2 else None


def _takes_text(method: Any) -> bool:
    """Return whether the inputs of a method are token ids [1, T] and positions [T], both int64."""
    if method.num_inputs() != 2:
        return False
    inputs = [method.input_tensor_meta(index) for index in range(2)]
    shapes = [list(each.sizes()) for each in inputs]
    return all(each.dtype() == _LONG for each in inputs) and [len(shape) for shape in shapes] == [2, 1]


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _integers(values: Ids, name: str) -> torch.Tensor:
    """Return ``values`` as a contiguous int64 tensor, which shares their memory if possible.

    Raises :class:`EtkvError` for values that are not integers, and for empty ``values``.
    """
    import numpy as np
    import torch

    if isinstance(values, torch.Tensor):
        tensor = values
    else:
        try:
            array = np.asarray(values)
            # Torch supports neither foreign byte orders nor negative strides.
            array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
            with warnings.catch_warnings():
                # Torch warns about a read-only array, but nothing writes to the tensor.
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                tensor = torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise EtkvError(f"{name} is {_short(values)}, expected 64-bit integers: {first_line(error)}") from error
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise EtkvError(f"{name} is a {tensor.layout} tensor on {tensor.device}, expected a dense tensor in memory")
    if tensor.numel() == 0:
        raise EtkvError(f"{name} is empty, expected at least one token")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise EtkvError(f"{name} has dtype {tensor.dtype}, expected an integer dtype")
    return tensor.to(torch.int64).contiguous()


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}…"


class _Memory:
    """A tensor's memory, and the objects that own it. An array of this memory keeps the owners alive, which an array
    that torch returns would not do."""

    def __init__(self, array: npt.NDArray[Any], owners: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self._held = array, owners


def _array(tensor: torch.Tensor) -> RowArray:
    import numpy as np
    import torch

    array: RowArray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    owners = getattr(tensor, "owners", None)
    return array if owners is None else np.asarray(_Memory(array, owners))
