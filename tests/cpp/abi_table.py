"""Reads the C interface from its headers, and writes the tables with which ``abi_table.c`` tests it.

``abi_table.py INCLUDE CC LAYOUT OUTPUT`` writes OUTPUT. LAYOUT has a line for each type: its size, and the offsets of
its fields or the values of its constants. A number there changes only with the interface.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from pycparser import c_ast, c_parser

# The types of C's standard headers that etkv's headers use.
SYSTEM = {
    "stdbool.h": "typedef _Bool bool;",
    "stddef.h": "typedef unsigned long size_t;",
    "stdint.h": "typedef unsigned char uint8_t; typedef int int32_t; typedef unsigned uint32_t; typedef long int64_t;"
    "typedef unsigned long uint64_t;",
}

# Valid arguments by parameter name; others are "text", and 1 or 0. No path below /dev/null exists.
TEXTS = {"backend_id": "MLXBackend", "kind": "tree", "path": "/dev/null/file", "folder": "/dev/null/folder"}
TEXTS |= {"format": "f32", "k_format": "f32", "v_format": "f32", "filter": "off", "logits": "all", "passes": "none"}
TEXTS |= {"constants": r"{\"get_n_caches\":1,\"get_kv_heads\":1,\"get_head_dims\":8,\"get_windows\":0}"}
NUMBERS = {"head_dim": "8", "target": "1", "end": "1"}

# Types of handles that need a program or rows. This test has neither.
NOT_MADE = {"etkv_generation", "etkv_prefix", "etkv_prefix_pin"}

FOREIGN_HANDLES = 5


def is_pointer(node: c_ast.Node) -> bool:
    return isinstance(node, c_ast.PtrDecl)


def type_name(node: c_ast.Node) -> str:
    """The name of a type without its pointers: `etkv_cache`, `int32_t`."""
    while not isinstance(node, c_ast.IdentifierType):
        node = node.type
    return " ".join(node.names)


class Headers:
    """The declarations of some headers, in order."""

    def __init__(self, include: Path, cc: str, names: Iterable[str]) -> None:
        with tempfile.TemporaryDirectory() as system:
            for name, text in SYSTEM.items():
                (Path(system) / name).write_text(text)
            command = [cc, "-E", "-nostdinc", "-DETKV_STATIC", f"-I{include}", f"-I{system}", "-x", "c", "-"]
            text = "".join(f'#include "etkv/{name}"\n' for name in names)
            run = subprocess.run(command, input=text, check=True, capture_output=True, text=True, timeout=120)
        declared = [n for n in c_parser.CParser().parse(run.stdout).ext if Path(n.coord.file).parent.name == "etkv"]
        self.functions = {n.name: Function(self, n) for n in declared if isinstance(n.type, c_ast.FuncDecl)}
        self.handles: list[str] = []
        self.structs: dict[str, list[str]] = {}
        self.constants: dict[str, list[str]] = {}
        self.callbacks: set[str] = set()
        for node in declared:
            if isinstance(node.type, c_ast.Enum):
                # The constants of the preceding type.
                self.constants[list(self.constants)[-1]] = [each.name for each in node.type.values.enumerators]
            elif not isinstance(node, c_ast.Typedef):
                continue
            elif is_pointer(node.type):
                self.callbacks.add(node.name)
            elif not isinstance(node.type.type, c_ast.Struct):
                self.constants[node.name] = []
            elif node.type.type.decls is None:
                self.handles.append(node.name)
            else:
                self.structs[node.name] = [field.name for field in node.type.type.decls]


class Function:
    """A function, and the facts in its comment."""

    def __init__(self, headers: Headers, node: c_ast.Decl) -> None:
        self.headers, self.name, self.returns = headers, node.name, type_name(node.type.type)
        given = node.type.args.params if node.type.args else []
        given = [each for each in given if is_pointer(each.type) or type_name(each) != "void"]
        self.has_status = bool(given) and given[-1].name == "error" and is_pointer(given[-1].type.type)
        self.parameters = [Parameter(self, at, given) for at in range(len(given) - self.has_status)]
        # The preceding comment, in one line.
        lines = Path(node.coord.file).read_text().splitlines()[: node.coord.line - 1]
        while lines[-1].strip() and not lines[-1].endswith("*/"):
            lines.pop()
        start = max(i for i, line in enumerate(lines) if "/*" in line) if lines[-1].strip() else len(lines)
        self.comment = " ".join(" ".join(line.strip(" /*") for line in lines[start:]).split())

    def said_of(self, parameter: str) -> str:
        """Return the comment's text about a parameter; for `as for f()`, the text in the comment of f."""
        parts = re.split(r"@param (\w+) ", self.comment)
        said = dict(zip(parts[1::2], parts[2::2], strict=True)).get(parameter, "")
        other = re.match(r"as for (\w+)\(\)", said)
        return self.headers.functions[other[1]].said_of(parameter) if other else said

    def call(self) -> str:
        """Return a C function that calls this function with the pointers of `a`."""
        arguments = [each.argument for each in self.parameters] + ["error"] * self.has_status
        made = f"{self.name}({', '.join(arguments)})"
        value = made if self.has_status else f"({made}, 0)" if self.returns == "void" else f"{self.documented(made)}"
        head = f"static etkv_status call_{self.name}(void* const* a, etkv_error** error)"
        return f"{head} {{ (void)a; (void)error; return {value}; }}"

    def documented(self, made: str) -> str:
        """Return C code that checks the documented value for NULL and for a pointer that is no live handle."""
        if not any(each.is_handle for each in self.parameters):
            return f"((void){made}, 0)"
        dead = re.search(r"(\S+) (?:if|where) (?:`\w+`|it) is no live handle", self.comment)
        null = re.search(r'(""|\w+) if (?:`\w+`|it) is NULL', self.comment) or dead
        if dead is None or null is None:
            raise SystemExit(f"{self.name}: its comment does not name what it returns for no live handle")
        differs = {'""': f'strcmp({made}, "") != 0', "so": f'strstr({made}, "not a live etkv_error") == NULL'}
        return f"a[0] == NULL ? {' : '.join(differs.get(each[1], f'{made} != {each[1]}') for each in (null, dead))}"


class Parameter:
    """A parameter of a function, and its index."""

    def __init__(self, function: Function, at: int, given: list[c_ast.Decl]) -> None:
        self.function, self.at, self.name, self.type = function, at, given[at].name, given[at].type
        self.kind = "" if is_pointer(self.type) and isinstance(self.type.type, c_ast.FuncDecl) else type_name(self.type)
        after = given[at + 1] if at + 1 < len(given) else None
        counted = after is not None and not is_pointer(after.type) and type_name(after) == "size_t"
        self.is_array = counted and is_pointer(self.type) and self.kind != "char"

    @property
    def is_callback(self) -> bool:
        return self.kind == "" or self.kind in self.function.headers.callbacks

    @property
    def is_handle(self) -> bool:
        single = is_pointer(self.type) and not is_pointer(self.type.type)
        return single and self.kind in self.function.headers.handles

    @property
    def is_struct(self) -> bool:
        return is_pointer(self.type) and "struct_size" in self.function.headers.structs.get(self.kind, [])

    @property
    def argument(self) -> str:
        """The C expression of the argument: a pointer of `a`, or a valid number."""
        if self.is_callback:
            return "NULL"
        number = "1" if self.kind in {"size_t", "uint64_t"} else "0"
        return f"a[{self.at}]" if is_pointer(self.type) else NUMBERS.get(self.name, number)

    @property
    def passed_on(self) -> bool:
        """Whether NULL is valid: it is for callbacks and their context. The comment of a callback must say so."""
        if self.is_callback and not re.search(
            rf"`{self.name}` is NULL|@param {self.name} .*?NULL", self.function.comment
        ):
            raise SystemExit(f"{self.function.name}: its comment does not say what NULL does as `{self.name}`")
        return self.is_callback or self.name in {"context", "user"}

    def row(self) -> str:
        """A valid value of a pointer."""
        handles, is_const = self.function.headers.handles, "const" in getattr(self.type.type, "quals", [])
        text = TEXTS.get(self.name, "text") if self.kind == "char" and is_const else ""
        handle = handles.index(self.kind) if self.kind in handles else -1
        form = "PLACE"
        if self.passed_on:
            form = "ANY"
        elif self.is_handle:
            form = "ANY" if self.kind in NOT_MADE else "HANDLE"
        elif self.is_struct:
            form = "CONFIG" if self.kind == "etkv_cache_config" else "STRUCT"
        elif is_const:
            form = "TEXT" if text else "ZEROS"
        return f'{{{self.at}, {form}, {handle}, {f"sizeof({self.kind})" if self.is_struct else 0}, "{text}"}}'

    def wrong(self) -> Iterator[str]:
        """Wrong arguments that are refused, and some that are accepted."""
        said, name, handles = self.function.said_of(self.name), self.name, self.function.headers.handles
        name += "[0]" if self.is_array and self.is_struct else ""
        made = [(i, each) for i, each in enumerate(handles) if each not in NOT_MADE]
        if self.is_handle:
            words = f'"{name} is no live handle: it was freed, or is not from etkv"'
            yield from (f"-1, FREED, {i}, true, {words}" for i, _ in made)
            yield from (f"-1, FOREIGN, {i}, true, {words}" for i in range(FOREIGN_HANDLES))
            others = ((i, each) for i, each in made if each != self.kind)
            yield from (f'-1, OTHER, {i}, true, "{name} is an {each}, not an {self.kind}"' for i, each in others)
        if self.is_struct:
            size = f"sizeof({self.kind})"
            for number in ("0", f"{size} - 1", f"{size} + 1", "(size_t)1 << 40"):
                yield f'-1, SIZE, {number}, true, "{name}.struct_size is"'
            yield f'-1, SIZE, {size} + 16, false, "struct_size"'
        # A parameter whose comment has "NULL where `other` is." must be NULL together with `other`.
        pair = re.search(r"NULL where `(\w+)` is\.", said)
        follower = next((p for p in self.function.parameters if f"`{name}` is." in self.function.said_of(p.name)), None)
        # The word NULL also occurs for arrays of 0 elements, and for a stored value: "NULL where there is none".
        allowed = re.search(r"\bNULL (?!where there is none)", said) and not self.is_array and not pair
        if allowed or self.passed_on:
            yield f'{follower.at if follower else -1}, NOTHING, 0, false, "NULL"'
        else:
            yield f'-1, NOTHING, 0, true, "{name}{"" if pair else " is NULL"}"'


def numbers(headers: Headers, layout: Path) -> Iterator[str]:
    """Each size, offset and constant, with its value in the file."""
    known: dict[str, str] = {}
    for line in layout.read_text().splitlines():
        head, _, members = line.partition(": ")
        kind, size = head.split()
        known[f"sizeof({kind})"] = size
        for name, number in (each.split() for each in members.split(", ")):
            known[f"offsetof({kind}, {name})" if kind in headers.structs else name] = number
    found = [f"sizeof({kind})" for kind in [*headers.structs, *headers.constants]]
    found += [f"offsetof({kind}, {field})" for kind, fields in headers.structs.items() for field in fields]
    found += [constant for constants in headers.constants.values() for constant in constants]
    for value in found:
        yield f'{{"{value}", (long long){value}, {known.pop(value, "-1")}}}'
    yield from (f'{{"{value}", -1, {number}}}' for value, number in known.items())


def main(include: Path, cc: str, layout: Path, output: Path) -> None:
    headers = Headers(include, cc, sorted(path.name for path in (include / "etkv").glob("*.h")))
    functions = list(headers.functions.values())
    calls, rows, wrong, n_pointers = [], [], [], 0
    for number, function in enumerate(functions):
        pointers = [each for each in function.parameters if is_pointer(each.type) or each.is_callback]
        parameters = ", ".join(each.row() for each in pointers) or "{0}"
        n_pointers += len(pointers) + function.has_status
        calls.append(function.call())
        status = "true" if function.has_status else "false"
        rows.append(f'{{"{function.name}", call_{function.name}, {status}, {len(pointers)}, {{{parameters}}}}}')
        wrong += [f"{{{number}, {each.at}, {one}}}" for each in pointers for one in each.wrong()]
    statuses = (f'[{each}] = "{re.sub("ETKV_(ERROR_)?", "", each)}"' for each in headers.constants["etkv_status"])
    handles = ", ".join(f"OF_{each}" for each in headers.handles)
    tables = {
        "function FUNCTIONS": rows,
        "wrong WRONG": wrong,
        "number NUMBERS": numbers(headers, layout),
        "char* const STATUSES": statuses,
    }
    text = [*calls, f"enum {{ {handles}, N_HANDLES, N_POINTERS = {n_pointers} }};"]
    text += ["\n".join([f"static const {name}[] = {{", ",\n".join(table), "};"]) for name, table in tables.items()]
    frees = ", ".join(f"call_{each}_free" for each in headers.handles)
    text.append(f"static etkv_status (*const FREE[])(void* const*, etkv_error**) = {{{frees}}};\n")
    output.write_text("\n".join(text))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
