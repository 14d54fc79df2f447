"""Refuses graphs in which a token depends on other tokens outside of the ops of the cache.

A program runs a text in steps, and its graph sees only the tokens of one step, except through the ops of the cache. So
only these ops may read other tokens or keep a state. Any other part, such as a mask computed from values, a shift or a
sum over tokens, would be right within a step and wrong across steps.

To check this, the traced graph runs on three tokens, with the ops of the cache replaced by functions of one token. The
outputs of a token must not change when the first or the middle token changes, when the middle token is NaN, and when
the token is alone in its step. Changing a token finds dependence through comparisons and choices. NaN finds dependence
that rounding hides, such as an attention weight near zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from etkv import experts_op, linear_op
from etkv.errors import EtkvError, first_line
from etkv.packed_weights import WeightFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.export import ExportedProgram
    from torch.fx import Node

_MIDDLE = 1
"""The index of the one of three tokens that is changed, NaN or alone: this token has neighbours on both sides."""

_TOLERANCE = 1e-4
"""The maximum difference of a result, as a fraction of its spread. Other rows may change the rounding in float32."""

_PART = 1 << 22
"""Number of weights that are converted at once."""

_BY_ROW = ("aten.linear.default", "etkv.linear.default", "etkv.packed_linear.default")
"""Operators that multiply each row of the first argument by weights."""

_HALF = (torch.float16, torch.bfloat16)


def check(
    traced: ExportedProgram,
    inputs: dict[str, torch.Tensor],
    max_context: int,
    family: str,
    used: Callable[[int], None] = lambda size: None,
) -> None:
    """Raise :class:`EtkvError` unless each token of ``traced`` depends only on itself and its position.

    ``inputs`` are those of three tokens: ids ``[1, 3]``, rows ``[1, 3, ...]``, and positions ``[3]``. Positions are
    replaced by other positions below ``max_context``. The error names the module in which a token reads other tokens.
    ``used`` is called with the bytes of weights that were read.
    """
    if any(free_unbacked_symbols(node.meta.get("val")) for node in traced.graph.nodes):
        raise ValueError("its graph depends on values known only at run time")
    graph = traced.module(check_guards=False)
    length = str(next(node for node in graph.graph.nodes if node.op == "placeholder").meta["val"].shape[1])
    ends = next(reversed(graph.graph.nodes)).all_input_nodes
    # A program that returns only the last row of logits has an output for the last token only.
    alone = _MIDDLE if all(length in _sizes(end) for end in ends) else 2
    # Positions may be neither adjacent nor in order, like those of a tree.
    inputs = {**inputs, "cache_position": torch.tensor([min(4, max_context - 1), max_context - 1, 1])}
    others, places = "reads other tokens", "reads the index of a token in its step, or the number of tokens"
    one = {name: _row(given, alone) for name, given in inputs.items()}
    whole, *variants = (
        _Run(inputs),
        _Run(_changed(inputs, _MIDDLE)),
        # In a graph that must be refused, the last token may read the first token but not the middle one.
        _Run(_changed(inputs, 0)),
        _Run(inputs, poisoned=True),
        _Run(one),
    )
    left = [[0, 2], [1, 2], [0, 2], [alone]]
    try:
        _Runs(graph, [whole, *variants], length, used).compute()
    except IndexError as error:
        # If the model also fails at the first positions, the ids may be invalid, not the positions.
        _Runs(graph, [_Run({**inputs, "cache_position": torch.arange(3)})], length, used).compute()
        raise EtkvError(
            f"max-context {max_context} is above the positions of the model: {first_line(error)}; export it with a "
            "smaller --max-context"
        ) from error
    if any(torch.isnan(whole.values[end]).any() for end in ends):
        raise ValueError(
            "its outputs are NaN, although its weights are finite, so it cannot be checked whether a token reads "
            "others; correct its config.json"
        )
    for run, what, rows in zip(variants, (others, others, others, places), left, strict=True):
        pair = _Pair(whole.values, run.values, length, rows, alone=run is variants[-1], poisoned=run.poisoned)
        if any(pair.differs(end) for end in ends):
            raise EtkvError(
                f"model family {family!r} cannot be exported: {pair.origin(ends)} {what}, outside of the ops of the "
                "cache, so its program would give other answers than the model"
            )


def _row(given: torch.Tensor, token: int) -> torch.Tensor:
    """Return the part of an input that belongs to ``token``."""
    return given.narrow(min(1, given.dim() - 1), token, 1)


def _changed(inputs: dict[str, torch.Tensor], token: int) -> dict[str, torch.Tensor]:
    """Return ``inputs`` with ``token`` changed."""
    changed = {name: given.clone() for name, given in inputs.items()}
    for given in changed.values():
        row = _row(given, token)
        row.copy_(-row if given.is_floating_point() else row // 2)
    return changed


class _Run:
    """A run of the graph on ``inputs``. With ``poisoned``, a token becomes NaN where its id or position becomes a
    float.

    ``values`` are the results of the nodes that depend on the inputs.
    """

    def __init__(self, inputs: dict[str, torch.Tensor], *, poisoned: bool = False) -> None:
        self.inputs, self.poisoned = inputs, poisoned
        self.values: dict[Node, Any] = {}


class _Runs:
    """Runs a graph in float32, with functions of one token in place of the ops of the cache.

    All ``runs`` advance through the graph together, so that each weight is read once. ``length`` is the symbol for the
    number of tokens in the shapes of the graph.
    """

    def __init__(self, graph: torch.fx.GraphModule, runs: list[_Run], length: str, used: Callable[[int], None]) -> None:
        self._graph, self._runs, self._length, self._used = graph, runs, length, used
        self._position = torch.empty(0)
        self._own: dict[str, Any] = {
            "kvcache.update_and_attend.default": self._attend,
            "kvcache.update_and_attend.sinks": self._attend,
            "kvcache.update_and_convolve.default": self._convolve,
            "kvcache.update_and_scan.default": self._scan,
            "etkv.routed_experts.default": _experts,
            "etkv.linear.default": _linear,
            "aten.linear.default": _plain_linear,
            "aten.embedding.default": _embedding,
        }

    @torch.no_grad()
    def compute(self) -> None:
        """Fill in the values of the runs."""
        nodes = list(self._graph.graph.nodes)
        last = {source: node for node in nodes for source in node.all_input_nodes}
        given = [iter(run.inputs.values()) for run in self._runs]
        constants: dict[Node, Any] = {}
        for node in nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                for run, inputs in zip(self._runs, given, strict=True):
                    run.values[node] = self._poisoned(run, node, _float(next(inputs)), [])
            elif node.op == "get_attr":
                constants[node] = torch.fx.graph_module._get_attr(self._graph, node.target)
            elif any(source in self._runs[0].values for source in node.all_input_nodes):
                self._depend(node, constants)
            else:
                constants[node] = self._call(node, *_arguments(node, constants, {}))
            for source in node.all_input_nodes:
                if source in constants and last[source] is node:
                    gone = constants.pop(source)
                    self._used(gone.nbytes if isinstance(gone, torch.Tensor) else 0)

    def _depend(self, node: Node, constants: dict[Node, Any]) -> None:
        """Compute ``node`` for each run."""
        sources = [
            [run.values[source] for source in node.all_input_nodes if source in run.values] for run in self._runs
        ]
        is_by_row = str(node.target) in _BY_ROW and node.args[0] in self._runs[0].values
        if is_by_row and all(len(own) == 1 for own in sources):
            # Compute the rows of all runs at once, because unpacking the weights takes longer than the products.
            ends = [own[0].flatten(0, -2) for own in sources]
            (_, *others), named = _arguments(node, constants, self._runs[0].values)
            rows = self._call(node, (torch.cat(ends), *others), named).split([len(end) for end in ends])
            made = [row.unflatten(0, own[0].shape[:-1]) for row, own in zip(rows, sources, strict=True)]
        else:
            made = []
            for run in self._runs:
                self._position = run.inputs["cache_position"]
                made.append(self._call(node, *_arguments(node, constants, run.values)))
        for run, value, own in zip(self._runs, made, sources, strict=True):
            run.values[node] = self._poisoned(run, node, value, own)

    def _poisoned(self, run: _Run, node: Node, made: Any, sources: list[Any]) -> Any:
        if not run.poisoned or not _is_float(made) or any(map(_is_float, sources)):
            return made
        axis = _token_axis(node, self._length)
        return made if axis is None else made.index_fill(axis, torch.tensor([_MIDDLE]), torch.nan)

    def _call(self, node: Node, args: Any, kwargs: Any) -> Any:
        if node.op == "call_module":
            return self._graph.get_submodule(str(node.target))(*args, **kwargs)
        target: Any = node.target
        own = self._own.get(str(target))
        if target is torch.ops.aten.view.dtype:
            # Packed weights are bytes, which are not converted.
            return target(*args, **kwargs)
        if own is None or own not in _TAKE_HALVES:
            # Convert weights in half precision for one function at a time. All float32 weights together would need too
            # much memory.
            args, kwargs = torch.utils._pytree.tree_map(_in_float32, (args, kwargs))
        if own is not None:
            return own(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        of_quantization = str(target).startswith(("torchao.quantize_affine", "torchao.dequantize_affine"))
        if of_quantization and args[0].is_floating_point():
            # Skip the rounding of activations. It would hide small differences and cause others.
            return args[0]
        return target(*args, **kwargs)

    def _attend(
        self, q: Any, k: Any, v: Any, position: Any, layer_id: int, scale: float, *others: Any, **named: Any
    ) -> Any:
        """Return the values times a factor that depends on queries and keys of the same token."""
        self._check_position(position)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        product = (q * k).sum(-1, keepdim=True) * scale
        return v * (1 + 0.5 * product / (1 + product.abs()))

    def _convolve(
        self, x: Any, weight: Any, bias: Any, position: Any, layer_id: int, activation: str, out_dtype: torch.dtype
    ) -> Any:
        """Return the contribution of a token's own input to the convolution."""
        self._check_position(position)
        made = x * weight[:, -1:] + (0 if bias is None else bias[:, None])
        return torch.nn.functional.silu(made) if activation == "silu" else made

    def _scan(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, position: Any, layer_id: int, scale: float, out_dtype: Any
    ) -> Any:
        """Return the outputs for a previous state of zeros, times the decay."""
        self._check_position(position)
        product = (q * k).sum(-1, keepdim=True).repeat_interleave(v.shape[1] // k.shape[1], dim=1) * scale
        decay = g.mean(-1, keepdim=True) if g.dim() == 4 else g.unsqueeze(-1)
        return product * v * torch.exp(decay) * (1 if beta is None else beta.unsqueeze(-1))

    def _check_position(self, position: torch.Tensor) -> None:
        if not torch.equal(position.reshape(-1), self._position):
            raise ValueError(f"an op of the cache gets the positions {position.reshape(-1).tolist()}, not the step's")


def _experts(*arguments: Any) -> torch.Tensor:
    """Return the outputs of experts without rounding activations: the rounding would cause differences."""
    formats = WeightFormat(*arguments[7:9]), WeightFormat(*arguments[9:11])
    compute: Any = experts_op.compute
    made: torch.Tensor = compute(*arguments[:7], formats, experts_op.Activation(*arguments[11:]), rounds=False)
    return made


def _linear(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, name: str, group_size: int, rows: int
) -> torch.Tensor:
    """Return the products without the rounding of activations."""
    return linear_op.compute(x, weights, bias, WeightFormat(name, group_size), rows, rounds=False)


def _plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the products in float32. The weights are converted in parts."""
    parts = weight.split(max(1, _PART // weight.shape[1]))
    made = torch.cat([x @ part.float().T for part in parts], dim=-1)
    return made if bias is None else made + bias.float()


def _embedding(weight: torch.Tensor, ids: torch.Tensor, *others: object) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten.embedding.default(weight, ids)
    return made.float()


_TAKE_HALVES = (_plain_linear, _embedding)
"""Functions that convert weights in half precision by themselves, in parts."""


def _arguments(node: Node, constants: dict[Node, Any], values: dict[Node, Any]) -> tuple[Any, Any]:
    """Return the arguments of ``node`` in a run."""

    def value(source: Node) -> Any:
        return values[source] if source in values else constants[source]

    return torch.fx.map_arg(node.args, value), torch.fx.map_arg(node.kwargs, value)


def _float(value: Any) -> Any:
    """Return ``value`` in float32 if it is a plain tensor in half precision."""
    return value.float() if type(value) in (torch.Tensor, torch.nn.Parameter) and value.dtype in _HALF else value


def _in_float32(argument: Any) -> Any:
    """Convert a half-precision dtype to float32, and a tensor with :func:`_float`. Return other arguments unchanged."""
    return torch.float32 if isinstance(argument, torch.dtype) and argument in _HALF else _float(argument)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _sizes(node: Node) -> list[str]:
    return [str(size) for size in node.meta["val"].shape]


def _token_axis(node: Node, length: str) -> int | None:
    """Return the axis of tokens of a tensor's node, or None if it has none."""
    sizes = _sizes(node)
    return sizes.index(length) if length in sizes else None


class _Pair:
    """The results of two runs. The first has all tokens unchanged. In the second, a token is changed or poisoned, or
    ``alone``. The results of the tokens ``rows`` must be equal.
    """

    def __init__(
        self,
        first: dict[Node, Any],
        second: dict[Node, Any],
        length: str,
        rows: list[int],
        *,
        alone: bool,
        poisoned: bool,
    ) -> None:
        self._first, self._second, self._length, self._poisoned = first, second, length, poisoned
        self._rows, self._alone = torch.tensor(rows), alone

    def differs(self, node: Node) -> bool:
        """Return whether ``node`` has rows that must be equal but differ; False if this is unknown."""
        if not self._is_known(node):
            return False
        first, second = self._first[node], self._second[node]
        axis = _token_axis(node, self._length)
        if axis is not None:
            first = first.index_select(axis, self._rows)
            second = second if self._alone else second.index_select(axis, self._rows)
        if not first.is_floating_point():
            return not self._poisoned and not torch.equal(first, second)
        if self._poisoned:
            return not torch.equal(first.isnan(), second.isnan())
        finite = first[first.isfinite()].float()
        spread = (float(finite.std(correction=0)) if finite.numel() else 0.0) or 1.0
        return not torch.allclose(first, second, rtol=_TOLERANCE, atol=_TOLERANCE * spread, equal_nan=True)

    def _is_known(self, node: Node) -> bool:
        """Return whether ``node`` is a tensor with at most one dynamic axis, the axis of tokens."""
        if not isinstance(self._first.get(node), torch.Tensor):
            return False
        return [size for size in _sizes(node) if not size.isdigit()] in ([], [self._length])

    def origin(self, ends: list[Node]) -> str:
        """Return the name of the first module with a difference, among those on which the results ``ends`` depend."""
        order = {node: at for at, node in enumerate(self._first)}
        found, seen = ends[0], set()
        stack = [end for end in ends if self.differs(end)]
        while stack:
            node = stack.pop()
            if node in seen or node not in order:
                continue
            seen.add(node)
            differs = self.differs(node)
            if differs and order[node] < order[found]:
                found = node
            if differs or not self._is_known(node):
                stack += node.all_input_nodes
        paths = [path for path, _ in found.meta.get("nn_module_stack", {}).values()]
        # The model is a part of the module that is traced.
        return paths[-1].removeprefix("model.") if paths and paths[-1] else "the model"
