"""Converts an error within an export to one sentence with the family, the module and the reason."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from etkv.errors import EtkvError, first_line

if TYPE_CHECKING:
    import torch

_OF_THE_TRACER = (
    (r"Constraints violated", "its graph depends on the number of tokens in a step"),
    (r"[Dd]ata-dependent|DataDependent|GuardOnDataDependent", "its graph depends on values known only at run time"),
)
"""Messages of torch's tracer -> their meaning for the model."""


@contextlib.contextmanager
def explained(family: str, doing: str, model: torch.nn.Module | None = None) -> Iterator[None]:
    """Convert an error of the block to :class:`EtkvError`: ``family`` cannot be ``doing``, because of a reason.

    The message also has the name of the failing module of ``model``.
    """
    try:
        yield
    except EtkvError:
        raise
    except Exception as error:
        where = f"{place}: " if (place := _module(error, model)) else ""
        raise EtkvError(f"model family {family!r} cannot be {doing}: {where}{reason(error)}") from error


def _module(error: Exception, model: torch.nn.Module | None) -> str:
    """Return the name of the innermost module of ``model`` that raised an error; empty if there is none."""
    names = {} if model is None else {module: name for name, module in model.named_modules()}
    found = ""
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        # Compare by identity: other objects may define equality.
        found = next((name for known, name in names.items() if known is module), "") or found
        trace = trace.tb_next
    return found


def reason(error: Exception) -> str:
    """Return the reason for an error in one line."""
    began: BaseException = error
    while (earlier := began.__cause__ or (began.__context__ if _is_the_tracers(began) else None)) is not None:
        began = earlier
    line = first_line(began)
    if "found dependency cycles" in line:
        return "its graph cannot be split into delegates that run one after the other"
    if _is_the_tracers(error):
        for pattern, meaning in _OF_THE_TRACER:
            if re.search(pattern, f"{error}\n{line}"):
                return f"{meaning}{_code(error)}"
    return line if isinstance(began, ValueError | NotImplementedError) else f"{type(began).__name__}: {line}"


def _is_the_tracers(error: BaseException) -> bool:
    """Return whether torch's tracer raised ``error``, which then often wraps another error."""
    return type(error).__module__.startswith(("torch._dynamo", "torch.fx", "torch._export", "torch.export"))


def _code(error: Exception) -> str:
    """Return the line of the model's code at which the tracer stopped; empty if the error has none."""
    lines = re.findall(r'File "[^"]*/(modeling_\w+\.py)", line (\d+), in (\w+)', str(error))
    return f" ({lines[-1][0]}, line {lines[-1][1]}, in {lines[-1][2]})" if lines else ""
