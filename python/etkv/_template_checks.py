"""Bounds what a chat template takes: it can come from anyone, and must not take a process's memory or time.

``_template.py`` puts calls of these functions into a parsed template, where it loops, writes and computes, and
:func:`rendering` gives one rendering a budget. The rule is that of the runners, ``examples/tokenizer/src/template``: a
unit is a byte of text, an item of a list counts as :data:`_ITEM` of them.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from etkv.errors import EtkvError

if TYPE_CHECKING:
    from jinja2 import Environment

_MAX_TEXT = 16 << 20
"""The most characters of one text, within a template and as its output."""

_MAX_UNITS = 256 << 20
"""The most units that a rendering reads and writes."""

_MAX_STEPS = 3_000_000
"""The most parts of a template that a rendering goes through, those within loops each time."""

_MAX_BITS = 100_000
"""The most bits of a number."""

_COLLECTIONS = (list, tuple, set, frozenset, range, MappingView)

_SLOW = 100
"""Units of a character that a filter looks at one by one."""

_ITEM = 32
_NODE = 256
"""Units of an item of a list, and of a value that is looked at within another."""


class _Budget:
    """What a rendering has left."""

    def __init__(self) -> None:
        self.units = _MAX_UNITS
        self.steps = _MAX_STEPS

    def take(self, units: int) -> None:
        self.units -= units
        if self.units < 0:
            raise EtkvError(f"it reads and writes more than {_MAX_UNITS >> 20} MiB")

    def step(self, parts: int = 1) -> None:
        self.steps -= parts
        if self.steps < 0:
            raise EtkvError(f"it goes through more than {_MAX_STEPS} of its parts")


_rendering = threading.local()


@contextmanager
def rendering() -> Iterator[None]:
    """Bound what the template that is rendered within takes."""
    outer = getattr(_rendering, "budget", None)
    _rendering.budget = _Budget()
    try:
        yield
    finally:
        _rendering.budget = outer


def _budget() -> _Budget:
    budget: _Budget = _rendering.budget
    return budget


# ---- Sizes ------------------------------------------------------------------


def _text(length: int) -> None:
    """Take the units of a text before it is made."""
    if length > _MAX_TEXT:
        raise EtkvError(f"it makes a text of {length} characters, the most is {_MAX_TEXT}")
    _budget().take(length)


def _whole(value: Any) -> int:
    """Take the units of reading a value with all that is within it. Return about how long it prints."""
    if isinstance(value, str):
        _budget().take(len(value))
        return len(value)
    if isinstance(value, (bool, int, float)) or value is None:
        return 1 if not isinstance(value, int) else 1 + value.bit_length() // 3
    from jinja2.utils import Namespace

    budget, length, waiting = _budget(), 0, [value]
    while waiting:
        value = waiting.pop()
        length += len(value) + 2 if isinstance(value, str) else 2
        budget.take(_NODE + (len(value) if isinstance(value, str) else 0))
        if isinstance(value, Mapping):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, _COLLECTIONS):
            waiting += cast("Iterable[Any]", value)
        elif isinstance(value, Namespace):
            # It prints what it has.
            waiting += value._Namespace__attrs.values()
    return length


def _result(value: Any) -> None:
    """Take the units of a value that an operation returned."""
    if isinstance(value, str):
        _text(len(value))
    elif isinstance(value, (*_COLLECTIONS, Mapping)):
        _budget().take(len(value) * _ITEM)
    elif isinstance(value, int):
        _number(value.bit_length())


def _listed(value: Any) -> Any:
    """Return the items of an iterator as a list, so that they can be counted; other values as they are."""
    if not isinstance(value, Iterator):
        return value
    items = []
    for item in value:
        _budget().take(_ITEM)
        items.append(item)
    return items


def _number(bits: int) -> None:
    if bits > _MAX_BITS:
        raise EtkvError(f"it makes a number of {bits} bits, the most is {_MAX_BITS}")


# ---- What a checked template calls -------------------------------------------


def step(parts: int) -> None:
    """Go through a loop or a macro once, which has ``parts`` parts."""
    _budget().step(parts)


def looped(iterable: Any) -> Any:
    """Return what a loop goes over."""
    if isinstance(iterable, str):
        _budget().take(len(iterable) * _ITEM)
    else:
        _result(iterable)
    return iterable


def read(value: Any) -> Any:
    """Return an operand that is compared, hashed or searched."""
    _budget().step()
    _whole(value)
    return value


def same(value: Any) -> Any:
    """Return what a filter takes: jinja2 computes filters of constants as it compiles, but not those of calls."""
    return value


def wrote(length: int) -> str:
    """Take the units of the template's own text."""
    _text(length)
    return ""


def written(value: Any) -> Any:
    """Return a value that is printed."""
    _budget().step()
    _text(_whole(value))
    return value


def made(value: Any) -> Any:
    """Return what a slice has made."""
    _budget().step()
    _result(value)
    return value


def concat(*values: Any) -> str:
    """``a ~ b``."""
    from jinja2.runtime import markup_join

    _budget().step()
    _text(sum(map(_whole, values)))
    return markup_join(values)


def add(left: Any, right: Any) -> Any:
    """``a + b``."""
    _budget().step()
    if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        (_text if isinstance(left, str) else _items)(len(left) + len(right))
    return left + right


def times(left: Any, right: Any) -> Any:
    """``a * b``."""
    _budget().step()
    for value, by in ((left, right), (right, left)):
        if isinstance(by, int) and isinstance(value, (str, list, tuple)):
            (_text if isinstance(value, str) else _items)(len(value) * max(by, 1))
    if isinstance(left, int) and isinstance(right, int):
        _number(left.bit_length() + right.bit_length())
    return left * right


def power(left: Any, right: Any) -> Any:
    """``a ** b``."""
    _budget().step()
    if isinstance(left, int) and isinstance(right, int):
        _number(left.bit_length() * max(right, 0))
    return left**right


def percent(left: Any, right: Any) -> Any:
    """``a % b``."""
    _budget().step()
    if isinstance(left, str):
        _formatting(left, right if isinstance(right, tuple) else (right,))
    return left % right


def _items(count: int) -> None:
    _budget().take(count * _ITEM)


def _formatting(text: str, arguments: Iterable[Any]) -> None:
    """Take the units of a text with values at its places. Numbers in it are widths, or those of arguments."""
    each, numbers = 0, []
    for argument in arguments:
        each = max(each, _whole(argument))
        numbers += [abs(argument)] if isinstance(argument, int) else []
    length = len(text)
    _budget().take(length)
    for spec in _SPEC.findall(text):
        widths = [int(digits[-20:]) for digits in _DIGITS.findall(spec)]
        if "*" in spec or "{" in spec[1:]:
            widths += numbers
        length += each + max(widths, default=0)
    _text(length)


_SPEC = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.*]*|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*")
_DIGITS = re.compile(r"\d+")


# ---- Filters, tests and calls ------------------------------------------------

_SHALLOW = {
    "list",
    "first",
    "last",
    "length",
    "count",
    "default",
    "d",
    "reverse",
    "items",
    "attr",
    "safe",
    "batch",
    "slice",
}
"""Filters that do not look at what is within the items of a list."""

_SHALLOW |= {"map", "select", "reject", "selectattr", "rejectattr"}


def _grown(name: str, value: Any, arguments: list[Any]) -> None:
    """Take the units of what a filter, or a text's method, makes of ``value``."""
    numbers = [abs(argument) for argument in arguments if isinstance(argument, int)]
    texts = [argument for argument in arguments if isinstance(argument, str)]
    longest = max(map(len, texts), default=0)
    most = max(numbers, default=0)
    if name == "replace" and len(texts) >= 2:
        text = value if isinstance(value, str) else str(value)
        _text(len(text) + text.count(texts[0]) * len(texts[1]))
    elif name == "join":
        parts = value if not isinstance(value, str) else (arguments[0] if arguments else ())
        separator = len(value) if isinstance(value, str) and not texts else longest
        _text(_whole(parts) + (len(parts) if hasattr(parts, "__len__") else 0) * separator)
    elif name in ("indent", "expandtabs"):
        text = str(value)
        lines = 1 + text.count("\t" if name == "expandtabs" else "\n")
        _text(len(text) + lines * max(most, longest, 8))
    elif name in ("center", "ljust", "rjust", "zfill"):
        _text(len(str(value)) + most)
    elif name in ("format", "format_map"):
        _formatting(str(value), arguments)
    elif name in ("batch", "slice"):
        _items(most + (len(value) if hasattr(value, "__len__") else 0))
    elif name == "tojson":
        _text(_whole(value) * (1 + most + longest))
    elif name == "wordwrap":
        _text(len(str(value)) * (1 + longest))
        _budget().take(len(str(value)) * _SLOW)
    elif name in ("sort", "unique", "groupby", "min", "max", "sum", "dictsort") and isinstance(value, str):
        _budget().take(len(value) * _SLOW)
    elif name in ("urlize", "pprint", "striptags"):
        _budget().take(_whole(value) * _SLOW)
    elif name in ("round", "truncate", "filesizeformat"):
        _text(most)
    elif name == "lipsum":
        # A paragraph has up to 100 words unless its arguments say more.
        _text(math.prod(numbers) * 800)
        _budget().take(math.prod(numbers) * 800 * _SLOW)


def filtered(name: str, function: Callable[..., Any], *, is_test: bool = False) -> Callable[..., Any]:
    """Return a filter or a test that takes units from the budget."""
    # Tests and these two tell an iterator from a list.
    lists = not is_test and name not in ("length", "count")
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        _budget().step(10)
        if lists:
            args = tuple(map(_listed, args))
        value, arguments = args[first], [*args[first + 1 :], *named.values()]
        if name in _SHALLOW:
            looped(value)
        else:
            _whole(value)
        for argument in arguments:
            _whole(argument)
        _grown(name, value, arguments)
        result = function(*args, **named)
        _result(result)
        return result

    return checked


def called(environment: Environment) -> Callable[..., Any]:
    """Return the environment's rule of calls, with units taken from the budget."""
    inner = environment.call  # type: ignore[attr-defined]

    def call(context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
        if isinstance(function, FunctionType) and function.__module__ == __name__ and function.__name__ in _OWN:
            return function(*args)
        _budget().step(10)
        args = tuple(map(_listed, args))
        # jinja2 puts a function of its own around str.format.
        inside = getattr(function, "__wrapped__", function)
        bound, name = getattr(inside, "__self__", None), getattr(inside, "__name__", "")
        if isinstance(bound, str):
            arguments = [*args, *named.values()]
            for argument in arguments:
                _whole(argument)
            _budget().take(len(bound))
            _grown(name, bound, arguments)
        elif bound is not None or name in ("raise_exception", "strftime_now"):
            for argument in (*args, *named.values()):
                _whole(argument)
        elif name == "generate_lorem_ipsum":
            _grown("lipsum", "", [*args, *named.values()])
        result = inner(context, function, *args, **named)
        _result(result)
        return result

    return call


_OWN = {"step", "looped", "read", "same", "wrote", "written", "made", "concat", "add", "times", "power", "percent"}
"""The functions that a checked template calls."""
