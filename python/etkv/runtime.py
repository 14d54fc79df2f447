"""Programs, run from Python on the installed ExecuTorch's own runtime.

:func:`load` opens a ``.pte`` and binds it to a session. ExecuTorch's ``executorch.runtime`` runs the same programs once
:func:`register_backend` was called: see :meth:`etkv.Session.bound`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from etkv import _capi, _library, pte
from etkv.errors import EtkvError, ProgramError, first_line
from etkv.session import Session

if TYPE_CHECKING:
    import numpy as np
    import torch

    from etkv.metadata import ModelCacheParams

    Ids: TypeAlias = torch.Tensor | np.ndarray | Sequence[int]
    """Integers: a tensor or array of any integer type, or a list."""
    Rows: TypeAlias = torch.Tensor | np.ndarray
    """Rows of logits: a tensor where the ids were one, else an array."""

METHOD = "forward"


def register_backend() -> None:
    """Make ``MLXBackend`` known to the installed ExecuTorch's runtime, in this process; again does nothing.

    Raises :class:`EtkvError` where ExecuTorch, MLX or the native libraries are missing or of another release.
    """
    _library.mlx_backend()


def load(path: str | Path, session: Session | None, *, logits: str = "all", method: str = METHOD) -> Program:
    """Open the program at ``path`` and bind it to the cache of ``session``.

    ``session`` may be ``None`` for a program that keeps no cache. ``logits`` is ``all`` or ``last``: which rows of the
    output are computed. A prompt needs the last one only.

    Raises :class:`EtkvError`: the message names what is missing or does not fit.
    """
    path = Path(path)
    if session is not None and not isinstance(session, Session):
        raise EtkvError(f"session is {session!r}, it is a DecodeSession, SeqSession or TreeSession")
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise EtkvError(f"{path} cannot be read: {error.strerror}") from error
    if head[4:6] != b"ET":
        raise EtkvError(f"{path} is not an ExecuTorch program")
    register_backend()
    return Program(path, session, logits, method)


class Program:
    """A loaded program. :func:`load` makes them. A context manager: leaving it lets go of weights and cache.

    ``session`` is the one that it is bound to. A program runs one step at a time.
    """

    def __init__(self, path: Path, session: Session | None, logits: str, method: str) -> None:
        from executorch.runtime import Runtime, Verification

        self.path = path
        self.session = session
        self._metadata: ModelCacheParams | None = None
        try:
            self._program = Runtime.get().load_program(path, verification=Verification.Minimal)
        except RuntimeError as error:
            raise ProgramError(f"{path} is damaged: {first_line(error)}") from error
        if method not in self._program.method_names:
            names = ", ".join(sorted(self._program.method_names))
            raise EtkvError(f"{path} has no method {method!r}; it has {names}")
        _capi.forget_delegate_error()
        try:
            if session is None:
                self._method = self._program.load_method(method)
            else:
                with session.bound(logits):
                    self._method = self._program.load_method(method)
            self._max_tokens = _max_tokens(self._method.metadata)
        except RuntimeError as error:
            reason = f"the method {method} of {path} cannot be loaded: {first_line(error)}"
            _capi.raise_delegate_error(lambda: ProgramError(reason), error)

    def forward(self, tokens: Ids, positions: Ids, *, copy: bool = True) -> Rows:
        """Run one step: the logits of ``tokens`` [T] or [1, T] at ``positions`` [T] or [T, 1], all of them or the last.

        The rows are [T, vocabulary] or [1, vocabulary]: a torch tensor in the program's dtype where ``tokens`` is one,
        else a numpy array (bfloat16, which numpy lacks, as float32). Without ``copy`` they are the program's own
        memory, valid until its next step.

        The step counts only if it works: otherwise the cache is as it was before.
        """
        as_tensor = _is_tensor(tokens)
        ids = _integers(tokens, "tokens").reshape(1, -1)
        at = _integers(positions, "positions").reshape(-1)
        if ids.numel() != at.numel():
            raise EtkvError(f"there are {at.numel()} positions for {ids.numel()} tokens")
        if self._max_tokens is not None and ids.numel() > self._max_tokens:
            raise EtkvError(f"the step has {ids.numel()} tokens, the program takes at most {self._max_tokens}")
        rows = self.execute(ids, at, copy=copy)[0]
        rows = rows.reshape(rows.shape[-2:])
        return rows if as_tensor else _array(rows)

    def execute(self, *inputs: Any, copy: bool = True) -> list[Any]:
        """Run the method on inputs as it declares them, torch tensors or integers; the outputs as it has them."""
        if self._method is None:
            raise EtkvError(f"the program {self.path.name} is closed: load it again")
        if self.session is not None and self.session.closed:
            raise EtkvError(f"the session of {self.path.name} is closed: make a new one, and load the program with it")
        _capi.forget_delegate_error()
        try:
            # The public execute always copies what it returns.
            return list(self._method._method.call(list(inputs), clone_outputs=copy))
        except RuntimeError as error:
            reason = f"{self.path.name}: {first_line(error)}"
            _capi.raise_delegate_error(lambda: EtkvError(reason), error)

    @property
    def metadata(self) -> ModelCacheParams:
        """What the program says of its caches."""
        if self._metadata is None:
            from etkv.metadata import read_kv_cache_metadata

            wanted = [name for name in self.method_names if name.startswith(("kv_cache.", "get_"))]
            self._metadata = read_kv_cache_metadata({name: self.constant(name) for name in wanted})
        return self._metadata

    @property
    def end_ids(self) -> list[int]:
        """The ids that end an answer, as the program tells them; none where it does not."""
        return self.constant("get_eos_ids") or []

    def constant(self, name: str) -> Any:
        """The value of a constant method, such as ``get_max_ctx_len``; ``None`` where there is none of the name."""
        return pte.constant(self._program, name) if name in self.method_names else None

    @property
    def method_names(self) -> set[str]:
        """The names of its methods."""
        return self._program.method_names if self._program is not None else set()

    def close(self) -> None:
        """Let go of the weights and of the cache. Closing twice does nothing."""
        self._method = None
        self._program = None

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _max_tokens(method: Any) -> int | None:
    """Tokens of one step, at most; None for a method whose first input is not [1, T]."""
    if method.num_inputs() == 0:
        return None
    sizes = method.input_tensor_meta(0).sizes()
    return sizes[1] if len(sizes) == 2 else None


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _integers(values: Ids, name: str) -> torch.Tensor:
    """``values`` as the contiguous int64 tensor that programs take; shares their memory where it can."""
    import numpy as np
    import torch

    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    if tensor.numel() == 0:
        raise EtkvError(f"{name} is empty; a step has at least one token")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise EtkvError(f"{name} has dtype {tensor.dtype}, it has an integer one")
    return tensor.to(torch.int64).contiguous()


def _array(tensor: torch.Tensor) -> np.ndarray:
    import torch

    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
