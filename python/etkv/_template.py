"""Renders chat templates within limits of memory and time, because templates are untrusted input.

transformers renders templates in jinja2's sandbox, which hides Python's internals but limits neither memory nor time.
:func:`checked` inserts calls of ``_template_checks.py`` into a parsed template. transformers then renders the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from etkv import _template_checks as checks
from etkv.errors import EtkvError

if TYPE_CHECKING:
    from jinja2 import nodes

_MAX_SOURCE = 128 << 10
"""Maximum length of a template, in characters. Published templates have up to 60,000."""

_MAX_NODES = 30_000
"""Maximum number of nodes in a template's syntax tree."""

_MAX_NESTED = 40
"""Maximum nesting depth of loops, macros and conditions."""

_MAX_NAME = 200
"""Maximum length of a name, in characters."""


class Template:
    """A parsed template that transformers passes to jinja2 in place of a template's text.

    It has the name of jinja2's class, because jinja2 selects the code for a node by its class name.
    """

    def __init__(self, source: str, tree: nodes.Template) -> None:
        self._source = source
        self._tree = tree

    def __getattribute__(self, name: str) -> Any:
        # jinja2 compiles only instances of nodes.Template, and checks that with `__class__`.
        own = name in ("_source", "_tree")
        return object.__getattribute__(self, name) if own else getattr(self._tree, name)

    def __contains__(self, text: str) -> bool:
        """Return whether the source has ``text``. transformers searches a template for names of fields."""
        return text in self._source


@functools.lru_cache(maxsize=32)
def checked(source: str) -> Template:
    """Return the template ``source`` with checks inserted, for transformers' ``chat_template``.

    Raises :class:`EtkvError` for a template that is too long or too deeply nested, and jinja2's errors for a template
    that does not parse.
    """
    if len(source) > _MAX_SOURCE:
        raise EtkvError(f"it has {len(source)} characters, the maximum is {_MAX_SOURCE}")
    from transformers.utils import chat_template_utils

    tree = chat_template_utils._compile_jinja_template("").environment.parse(source)
    _check(tree)
    return Template(source, _transformed(tree))


def _check(tree: nodes.Template) -> None:
    """Refuse a template that is slow to compile or includes other templates."""
    from jinja2 import nodes

    parts = list(tree.find_all(nodes.Node))
    if len(parts) > _MAX_NODES:
        raise EtkvError(f"it has {len(parts)} parts, the maximum is {_MAX_NODES}")
    for node in parts:
        if isinstance(node, (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise EtkvError("it reads other templates")
        if isinstance(node, (nodes.Macro, nodes.Name)) and len(node.name) > _MAX_NAME:
            raise EtkvError(f"it has a name of {len(node.name)} characters, the maximum is {_MAX_NAME}")

    def nested(node: nodes.Node) -> int:
        inner = max(map(nested, node.iter_child_nodes()), default=0)
        return inner + isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.If))

    if nested(tree) > _MAX_NESTED:
        raise EtkvError(f"its loops and conditions are nested more than {_MAX_NESTED} levels deep")


@contextmanager
def rendering(template: Template) -> Iterator[None]:
    """Limit the memory and time of a rendering of ``template``."""
    _prepare(template)
    with checks.rendering():
        yield


def _prepare(template: Template) -> None:
    """Wrap the filters, tests and calls of transformers' environment for ``template`` in checks."""
    from transformers.utils import chat_template_utils

    environment = chat_template_utils._compile_jinja_template(template).environment
    if getattr(environment, "etkv_checks", False):
        return
    environment.filters = {
        name: checks.filtered(name, function)
        for name, function in environment.filters.items()
        if name not in checks.LEFT_OUT
    }
    for name in ("cycler", "joiner", "lipsum"):
        environment.globals.pop(name, None)
    environment.tests = {
        name: checks.filtered(name, function, is_test=True) for name, function in environment.tests.items()
    }
    environment.call = checks.called(environment)
    environment.etkv_checks = True


def _transformed(tree: nodes.Template) -> nodes.Template:
    """Insert the checks into a parsed template."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    def call(function: Callable[..., Any], *arguments: nodes.Expr) -> nodes.Expr:
        name = nodes.ImportedName(f"{function.__module__}.{function.__name__}")
        return nodes.Call(name, list(arguments), [], None, None, lineno=arguments[0].lineno)

    def operand(node: nodes.Expr) -> nodes.Expr:
        return node if isinstance(node, nodes.Const) else call(checks.read, node)

    def binary(function: Callable[..., Any]) -> Callable[[nodes.BinExpr], nodes.Expr]:
        return lambda node: call(function, node.left, node.right)

    def compare(node: nodes.Compare) -> nodes.Expr:
        node.expr = operand(node.expr)
        for compared in node.ops:
            within = compared.op in ("in", "notin") and not isinstance(compared.expr, nodes.Const)
            compared.expr = call(checks.searched, compared.expr) if within else operand(compared.expr)
        return node

    def getitem(node: nodes.Getitem) -> nodes.Expr:
        if isinstance(node.arg, nodes.Slice):
            return call(checks.made, node)
        node.arg = operand(node.arg)
        return node

    def mapping(node: nodes.Dict) -> nodes.Expr:
        for pair in node.items:
            pair.key = operand(pair.key)
        return node

    def output(node: nodes.Output) -> nodes.Output:
        length = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else call(checks.written, part) for part in node.nodes
        ]
        node.nodes.append(call(checks.wrote, nodes.Const(length)))
        return node

    def body(node: Any) -> nodes.Node:
        node.body.insert(0, counted(node.body, node.lineno))
        if getattr(node, "else_", None):
            node.else_.insert(0, counted(node.else_, node.lineno))
        return cast("nodes.Node", node)

    def counted(body: list[nodes.Node], lineno: int) -> nodes.Stmt:
        return nodes.ExprStmt(call(checks.step, nodes.Const(sum(map(parts, body)))), lineno=lineno)

    def parts(node: nodes.Node) -> int:
        """Return the number of nodes under ``node``, without the bodies of loops and macros, which count separately."""
        own = isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
        children = () if own else node.iter_child_nodes()
        return 1 + sum(map(parts, children))

    def loop(node: nodes.For) -> nodes.Node:
        tested = 0 if node.test is None else parts(node.test)
        node.iter = call(checks.looped, cast("nodes.Expr", node.iter), nodes.Const(tested))
        return body(node)

    def filtered(node: nodes.Filter) -> nodes.Expr:
        if node.node is not None:
            node.node = call(checks.same, node.node)
        return node

    rules: dict[type, Callable[[Any], nodes.Node]] = {
        nodes.Add: binary(checks.add),
        nodes.Mul: binary(checks.times),
        nodes.Pow: binary(checks.power),
        nodes.Mod: binary(checks.percent),
        nodes.Concat: lambda node: call(checks.concat, *node.nodes),
        nodes.Compare: compare,
        nodes.Getitem: getitem,
        nodes.Dict: mapping,
        nodes.Output: output,
        nodes.For: loop,
        nodes.Macro: body,
        nodes.CallBlock: body,
        nodes.Block: body,
        nodes.Sub: binary(checks.subtract),
        nodes.Div: binary(checks.divide),
        nodes.FloorDiv: binary(checks.floor),
        nodes.Filter: filtered,
    }

    class Transformer(NodeTransformer):
        def visit(self, node: nodes.Node, *args: Any, **named: Any) -> nodes.Node:
            self.generic_visit(node)
            rule = rules.get(type(node))
            return node if rule is None else rule(node)

    Transformer().visit(tree)
    return tree
