"""Limits the memory and time of a chat template, because templates are untrusted input.

``_template.py`` inserts calls of these functions into a parsed template where it loops, writes and computes.
:func:`rendering` gives one rendering a budget of units and steps. A unit is a byte of text; an item of a list counts as
:data:`_ITEM` units. The runners have the same rule in ``examples/tokenizer/src/template``.
"""

from __future__ import annotations

import functools
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
"""Maximum length of one text, in characters: of a value within a template, and of the output."""

_MAX_UNITS = 256 << 20
"""Maximum number of units that a rendering reads and writes."""

_MAX_STEPS = 20_000_000
"""Maximum number of a template's nodes that a rendering runs. Nodes within a loop count in each iteration."""

_MAX_DEPTH = 100
"""Maximum nesting depth of lists that are printed, compared or hashed."""

_MAX_BITS = 4096
"""Maximum size of a number, in bits."""

_COLLECTIONS = (list, tuple, set, frozenset, range, MappingView)

_SLOW = 100
"""Cost in units of a character, in filters that read characters one by one."""

_ITEM = 8
_NODE = 256
"""Cost in units of an item of a list, and of a value that is read within another value."""


class _Budget:
    """The units and steps that a rendering may still use."""

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
            raise EtkvError(f"it runs more than {_MAX_STEPS} of its parts")


_rendering = threading.local()


@contextmanager
def rendering() -> Iterator[None]:
    """Limit the memory and time of the template that the block renders."""
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
    """Charge the units of a text before it is created."""
    if length > _MAX_TEXT:
        raise EtkvError(f"it makes a text of {length} characters, the maximum is {_MAX_TEXT}")
    _budget().take(length)


def _whole(value: Any) -> int:
    """Charge the units of reading a value and all values within it. Return its approximate printed length."""
    if isinstance(value, str):
        _budget().take(len(value))
        return len(value)
    if isinstance(value, (bool, int, float)) or value is None:
        return 1 if not isinstance(value, int) else 1 + value.bit_length() // 3
    from jinja2.utils import Namespace

    budget, length, waiting = _budget(), 0, [(value, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise EtkvError(f"its lists are nested more than {_MAX_DEPTH} levels deep")
        length += len(value) + 2 if isinstance(value, str) else 40
        budget.take(_NODE + (len(value) if isinstance(value, str) else 0))
        inside: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inside = (*value.keys(), *value.values())
        elif isinstance(value, _COLLECTIONS):
            inside = cast("Iterable[Any]", value)
        elif isinstance(value, Namespace):
            # Printing a namespace prints its attributes.
            inside = value._Namespace__attrs.values()
        waiting += ((item, depth + 1) for item in inside)
    return length


def _result(value: Any) -> None:
    """Charge the units of a value that an operation returned."""
    if isinstance(value, str):
        _text(len(value))
    elif isinstance(value, (*_COLLECTIONS, Mapping)):
        _budget().take(len(value) * _ITEM)
    elif isinstance(value, int):
        _number(value.bit_length())


def _listed(value: Any) -> Any:
    """Return an iterator as a list, so that its items can be counted. Return other values unchanged."""
    if not isinstance(value, Iterator):
        return value
    items = []
    for item in value:
        _budget().take(_ITEM)
        items.append(item)
    return items


def _number(bits: int) -> None:
    _budget().take(bits)
    if bits > _MAX_BITS:
        raise EtkvError(f"it makes a number of {bits} bits, the maximum is {_MAX_BITS}")


# ---- Functions that a checked template calls ---------------------------------


def step(parts: int) -> None:
    """Charge one run of the body of a loop or a macro, with its overhead. The body has ``parts`` nodes."""
    _budget().step(parts + 16)


def looped(iterable: Any, tested: int) -> Any:
    """Charge the iterable of a loop, and return it. The condition of the loop has ``tested`` nodes."""
    iterable = _listed(iterable) if tested else iterable
    if tested and hasattr(iterable, "__len__"):
        _budget().step(len(iterable) * tested)
    return _shallow(iterable)


def _shallow(iterable: Any) -> Any:
    if isinstance(iterable, str):
        # Each character becomes a string of its own.
        _budget().take(len(iterable) * 32)
    else:
        _result(iterable)
    return iterable


def read(value: Any) -> Any:
    """Charge an operand that is compared, hashed or searched, and return it."""
    _budget().step()
    _whole(value)
    return value


def searched(value: Any) -> Any:
    """Charge a container that is searched for an operand, and return it. In a mapping a lookup reads one key."""
    return value if isinstance(value, Mapping) else read(value)


def same(value: Any) -> Any:
    """Return the operand of a filter unchanged. jinja2 runs a filter of a constant at compile time, outside of the
    budget. It does not do so for the result of a call, so this call encloses the constant."""
    return value


def wrote(length: int) -> str:
    """Charge the template's own text."""
    _text(length)
    return ""


def written(value: Any) -> Any:
    """Charge a value that is printed, and return it."""
    _budget().step()
    _text(_whole(value))
    return value


def made(value: Any) -> Any:
    """Charge the result of a slice, and return it."""
    _budget().step()
    _result(value)
    return value


def concat(*values: Any) -> str:
    """``a ~ b``."""
    from jinja2.runtime import str_join

    _budget().step()
    _text(sum(map(_whole, values)))
    return str_join(values)


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


def subtract(left: Any, right: Any) -> Any:
    """``a - b``."""
    _numbers(left, right, "-")
    return left - right


def divide(left: Any, right: Any) -> Any:
    """``a / b``."""
    _numbers(left, right, "/")
    return left / right


def floor(left: Any, right: Any) -> Any:
    """``a // b``."""
    _numbers(left, right, "//")
    return left // right


def _numbers(left: Any, right: Any, operator: str) -> None:
    """Refuse operands that are not numbers. Sets, views of mappings and other types have these operators too."""
    _budget().step()
    if not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
        raise EtkvError(f"{type(left).__name__} {operator} {type(right).__name__}: expected numbers")


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
        arguments = right if isinstance(right, tuple) else (right,)
        _formatting(left, arguments, map(_whole, arguments))
    return left % right


def _items(count: int) -> None:
    _budget().take(count * _ITEM)


def _formatting(text: str, arguments: Iterable[Any], sizes: Iterable[int]) -> None:
    """Charge a formatted text. A number in the format is a width or the index of an argument."""
    each, numbers = max(sizes, default=0), [abs(argument) for argument in arguments if isinstance(argument, int)]
    length = len(text)
    _budget().take(length)
    for spec in _SPEC.findall(text):
        _budget().take(_SLOW)
        if "{" in spec[1:]:
            raise EtkvError("a format contains another format")
        widths = [int(digits[-20:]) for digits in _DIGITS.findall(spec)]
        if "*" in spec:
            widths += numbers
        length += each + max(widths, default=0)
    _text(length)


_SPEC = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.*]*|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*")
_DIGITS = re.compile(r"\d+")


# ---- Filters, tests and calls ------------------------------------------------

_CONSTANT = {"attr", "count", "d", "default", "first", "last", "length", "safe"}
"""Filters that do not read all items of a list."""

_SHALLOW = {"batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"}
"""Filters that read all items of a list, but not the values within the items."""


def _grown(name: str, value: Any, arguments: list[Any], sizes: list[int], *, is_method: bool = False) -> None:
    """Charge the result of a filter, or of a string method, on ``value``. ``sizes`` are from :func:`_whole`."""
    numbers = [abs(argument) for argument in arguments if isinstance(argument, int)]
    most = max(numbers, default=0)
    measured = zip(arguments, sizes, strict=True)
    longest = max((size for argument, size in measured if not isinstance(argument, int)), default=0)
    length = len(value) if isinstance(value, str) else 0
    if name == "replace" and len(arguments) >= 2:
        text = str(value)
        _text(len(text) + text.count(str(arguments[0])) * sizes[1])
    elif name == "join":
        parts, separator = (arguments[0] if arguments else (), length) if is_method else (value, longest)
        printed = sum(sizes[:1]) if is_method else _whole(parts)
        _text(printed + (len(parts) if hasattr(parts, "__len__") else 0) * separator)
    elif name in ("indent", "expandtabs"):
        text = str(value)
        lines = 1 + (text.count("\t") if name == "expandtabs" else len(text.splitlines()))
        _text(len(text) + lines * max(most, longest, 8))
    elif name in ("center", "ljust", "rjust", "zfill"):
        _text(len(str(value)) + most)
    elif name in ("format", "format_map"):
        _formatting(str(value), arguments, sizes)
    elif name in ("batch", "slice"):
        _items(most + (len(value) if hasattr(value, "__len__") else 0))
    elif name == "tojson":
        # Each value may begin a line that is indented by its depth.
        _text(_whole(value) * (1 + most + longest))
    elif name in ("round", "truncate"):
        _text(most)
    elif name in _FROM_THE_END:
        # The worst case of a search, and of a strip with many characters.
        _budget().take(length * max(1, longest))
    elif name in ("sort", "unique", "groupby", "min", "max", "sum", "dictsort", "striptags", "wordcount"):
        _budget().take((length or _whole(value)) * (_SLOW if length else 1))
    if name == "sum" and any(not isinstance(argument, (int, float, str)) for argument in arguments[1:]):
        raise EtkvError("the filter sum needs a number as its start")
    if any(isinstance(argument, str) and len(argument) > _MAX_NAME for argument in arguments) and name in _BY_NAME:
        raise EtkvError(f"the filter {name} is called with a name of {longest} characters, the maximum is {_MAX_NAME}")


_FROM_THE_END = {"rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip", "trim"}

_BY_NAME = {
    "attr",
    "groupby",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "select",
    "selectattr",
    "sort",
    "sum",
    "unique",
}

_MAX_NAME = 200
"""Maximum length of the name of an attribute or a macro, in characters."""


def filtered(name: str, function: Callable[..., Any], *, is_test: bool = False) -> Callable[..., Any]:
    """Return a filter or a test that charges the budget."""
    # Tests and these two filters treat an iterator and a list differently.
    lists = not is_test and name not in ("length", "count")
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        _budget().step(30)
        if lists:
            args = tuple(map(_listed, args))
        value, arguments = args[first], [*args[first + 1 :], *named.values()]
        if name in _SHALLOW:
            _shallow(value)
        elif name not in _CONSTANT:
            _whole(value)
        _grown(name, value, arguments, [_whole(argument) for argument in arguments])
        result = function(*args, **named)
        _result(result)
        return result

    return checked


def called(environment: Environment) -> Callable[..., Any]:
    """Return the environment's ``call`` with charges to the budget."""
    inner = environment.call  # type: ignore[attr-defined]

    from jinja2.runtime import Macro

    def call(context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
        if isinstance(function, FunctionType) and function.__module__ == __name__ and function.__name__ in _OWN:
            return function(*args)
        _budget().step(30)
        args = tuple(map(_listed, args))
        # jinja2 wraps str.format in its own function.
        inside = getattr(function, "__wrapped__", function)
        bound, name = getattr(inside, "__self__", None), getattr(inside, "__name__", "")
        # jinja2 also passes the variables of loops and blocks, which are not arguments of the template.
        arguments = [*args, *(value for key, value in named.items() if key not in ("_loop_vars", "_block_vars"))]
        methods = _METHODS.get(type(bound))
        if methods is not None and name not in methods:
            raise EtkvError(f"it calls {name} of a {type(bound).__name__}, which a template may not call")
        sizes = [] if isinstance(function, Macro) else [_whole(argument) for argument in arguments]
        if isinstance(bound, str):
            _budget().take(len(bound))
            _grown(name, bound, arguments, sizes, is_method=True)
        elif isinstance(bound, (list, tuple)):
            _whole(bound)
        elif name == "strftime_now" and args and len(str(args[0])) > _MAX_NAME:
            raise EtkvError(
                f"strftime_now is called with a format of {len(str(args[0]))} characters, the maximum is {_MAX_NAME}"
            )
        result = inner(context, function, *args, **named)
        _result(result)
        return result

    return call


_TESTED = "alnum alpha ascii decimal digit identifier lower numeric printable space title upper"
_OF_TEXTS = "capitalize casefold center count endswith expandtabs find format format_map index join ljust lower lstrip"
_OF_TEXTS += " partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines"
_OF_TEXTS += " startswith strip swapcase title upper zfill"

_METHODS: dict[type, set[str]] = {
    str: {*_OF_TEXTS.split(), *(f"is{name}" for name in _TESTED.split())},
    dict: {"copy", "get", "items", "keys", "values"},
    list: {"copy", "count", "index"},
    tuple: {"count", "index"},
    int: set(),
    float: set(),
    bool: set(),
    bytes: set(),
    range: {"count", "index"},
}
"""The methods of Python's types that a template may call, because their cost is known."""

LEFT_OUT = {"pprint", "random", "urlize", "wordwrap", "xmlattr", "filesizeformat"}
"""Filters of jinja2 that no chat template needs, and whose time is unknown."""

_OWN = {"step", "looped", "read", "same", "wrote", "written", "made", "concat", "add", "times", "power", "percent"}
_OWN |= {"searched", "subtract", "divide", "floor"}
"""The functions that a checked template calls."""
