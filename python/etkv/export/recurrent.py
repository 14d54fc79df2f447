"""Makes recurrent layers call the ops of their cache instead of transformers' functions.

In transformers, such a layer is a module with projections and norms. The module calls functions that all families
share: a causal convolution, the gated delta rule (with a decay for each head, or for each channel), and the scan of
Mamba-2. A layer is recognised by the functions that it calls. Only these functions are replaced; the rest of the
module is unchanged. So a family needs no code here, unless its layers call another function. The lightning attention
of MiniMax calls none: its whole ``forward`` is replaced.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from etkv.recurrent_layer import RecurrentLayer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KINDS = ("linear_attention", "conv", "hybrid")
"""The kinds of layers with a state, by their names in configurations. Layers of kind ``hybrid`` also have attention."""

_CONVOLUTION = "causal_conv1d_fn"
_RECURRENCES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
"""The names of the functions of transformers that are replaced."""

_NEEDS = {"update_conv_state": (_CONVOLUTION,), "update_recurrent_state": _RECURRENCES, "set_linear_cache": ()}
"""Method of transformers' caches -> functions. A module that calls the method must also call one of the functions, or
be one of :data:`_FORWARDS`.
"""


class _Ids:
    """The ids of a module's recurrent layers; -1 before a survey."""

    def __init__(self) -> None:
        self.convolution = -1
        self.recurrence = -1


class _Current:
    """The ids of the running module, and the positions of the step's tokens, ``[T]``."""

    ids: _Ids | None = None
    position: torch.Tensor | None = None
    is_transformers: bool = False


_current = _Current()


class _Survey:
    """The recurrent layers that have run, and the ids that each module got for them."""

    def __init__(self) -> None:
        self.layers: list[RecurrentLayer] = []
        self.had: set[tuple[_Ids, str]] = set()

    def note(self, ids: _Ids, layer: RecurrentLayer) -> int:
        """Add ``layer``, and return its id. Raises :class:`ValueError` if the module has such a layer already."""
        if (ids, layer.kind) in self.had:
            raise ValueError(f"one of its layers has more than one {layer.kind}, or runs more than once in a step")
        self.had.add((ids, layer.kind))
        self.layers.append(layer)
        return len(self.layers) - 1


_survey: ContextVar[_Survey | None] = ContextVar("etkv.export.recurrent.survey", default=None)


def mixers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of ``model`` that have a state, in order.

    Raises :class:`ValueError` for a module with a state that no op supports.
    """
    found = []
    for name, module in model.named_modules():
        calls = _calls(type(module))
        needed = [functions for call, functions in _NEEDS.items() if call in calls]
        if needed:
            found.append(module)
        for functions in needed:
            if not calls.intersection(functions) and type(module).__name__ not in _FORWARDS:
                raise ValueError(f"{name}: the cache has no op for the state of {type(module).__name__}")
    return found


def skeleton(config: PreTrainedConfig) -> torch.nn.Module:
    """Return the model of ``config`` without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def is_supported(config: PreTrainedConfig) -> bool:
    """Return whether the ops can compute each layer of ``config`` that has a state."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    try:
        return len(mixers(skeleton(config))) == sum(kind in KINDS for kind in kinds)
    except ValueError:
        return False


def take(model: torch.nn.Module) -> None:
    """Let the modules of ``model`` that have a state call the ops within a step of :func:`etkv.export.attention.run`.

    Raises :class:`ValueError` for a module with a state that no op supports.
    """
    # The import registers the ops.
    import etkv.recurrent_op  # noqa: F401

    # A step of an earlier export may have failed, and so may still be open.
    end()
    for module in mixers(model):
        _replace(sys.modules[type(module).__module__])
        if not hasattr(module, "etkv_recurrent"):
            setattr(module, "etkv_recurrent", _Ids())  # noqa: B010 (a module's types lack it)
            if (own := _FORWARDS.get(type(module).__name__)) is not None:
                module.forward = _either(module.forward, functools.partial(own, module))
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave)


@contextmanager
def surveying() -> Iterator[list[RecurrentLayer]]:
    """Yield a list to which each recurrent layer that runs within the block is added, in order.

    The id of a layer is its index in the list. Layers return zeros.
    """
    survey = _Survey()
    token = _survey.set(survey)
    try:
        yield survey.layers
    finally:
        _survey.reset(token)


@contextmanager
def as_transformers() -> Iterator[None]:
    """Within the block, recurrent layers run transformers' functions on a state of zeros, without the ops."""
    _current.is_transformers = True
    try:
        yield
    finally:
        _current.is_transformers = False


def is_in_step() -> bool:
    """Return whether a model runs in a step with the ops of the cache instead of transformers' functions."""
    return _current.position is not None and not _current.is_transformers


def begin(position: torch.Tensor) -> None:
    """Begin a step of tokens at ``position``, ``[T]``."""
    _current.position = position


def end() -> None:
    """End a step."""
    _current.position = None


def position() -> torch.Tensor | None:
    """Return the positions of the step's tokens, ``[T]``. Not every family passes them to its attention."""
    return _current.position


def _calls(cls: type[torch.nn.Module]) -> set[str]:
    """Return the names of the functions and methods that the code of ``forward`` of ``cls`` contains."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return set(code.co_names) if code is not None else set()


def _enter(module: torch.nn.Module, arguments: object) -> None:
    _current.ids = module.etkv_recurrent if is_in_step() else None  # type: ignore[assignment] # `take` has set it.


def _leave(module: torch.nn.Module, arguments: object, output: object) -> None:
    _current.ids = None


def _replace(modeling: Any) -> None:
    """Replace the functions in a module of transformers by functions that call the ops within a step."""
    for name, own in _FUNCTIONS.items():
        theirs = getattr(modeling, name, None)
        if theirs is not None and not hasattr(theirs, "etkv_replaces"):
            setattr(modeling, name, _either(theirs, own))


def _either(theirs: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def run(*arguments: Any, **named: Any) -> Any:
        if _current.ids is None:
            return theirs(*arguments, **named)
        return own(_current.ids, *arguments, **named)

    run.etkv_replaces = theirs  # type: ignore[attr-defined]
    return run


def _convolve(
    ids: _Ids,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> torch.Tensor:
    """Convolve ``[1, channels, T]`` with a weight ``[channels, W]``."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"its convolution has the activation {activation!r}, which the op lacks")
    if (survey := _found()) is not None:
        channels, width = weight.shape
        ids.convolution = survey.note(ids, RecurrentLayer("convolution", channels=channels, width=width))
        return torch.zeros_like(hidden_states)
    convolved: torch.Tensor = torch.ops.kvcache.update_and_convolve(
        hidden_states,
        weight,
        bias,
        _position(),
        layer_id=ids.convolution,
        activation="none" if activation is None else "silu",
        out_dtype=hidden_states.dtype,
    )
    return convolved


def _delta_rule(
    ids: _Ids,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the gated delta rule of tensors ``[1, T, heads, ...]``."""
    if initial_state is not None or output_final_state:
        raise ValueError("its recurrence keeps a state in the graph")
    dtype = query.dtype
    query, key = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        query, key = (rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6) for rows in (query, key))
    made = _scan(ids, query, key, value, g, beta, query.shape[-1] ** -0.5, dtype)
    return made, None


def _mamba2(
    ids: _Ids,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 (transformers' names)
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int,
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Compute the scan of Mamba-2 of ``hidden_states`` ``[1, T, heads, head_dim]``, plus ``D * hidden_states``."""
    if initial_states is not None or return_final_states or z is not None:
        raise ValueError("its recurrence keeps a state in the graph, or has a gate within")
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    if tuple(dt_limit) != (0.0, float("inf")) or not dt_softplus:
        dt = torch.clamp(dt, dt_limit[0], dt_limit[1])
    dt, x = dt.float(), hidden_states.float()
    made = _scan(ids, C, B, x * dt.unsqueeze(-1), A.float() * dt, None, 1.0, torch.float32)
    return made if D is None else made + D.unsqueeze(-1) * x


def _lightning(
    module: Any, ids: _Ids, hidden_states: torch.Tensor, *arguments: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """Compute lightning attention of ``[1, T, hidden]``: linear attention with a constant decay for each head."""
    heads, head_dim = module.num_attention_heads, module.head_dim
    tokens = hidden_states.shape[1]
    rows = module.act_fn(module.qkv_proj(hidden_states)).reshape(1, tokens, heads, 3 * head_dim)
    query, key, value = torch.split(rows, head_dim, dim=-1)
    decay = -module.slope_rate.reshape(1, 1, heads).float().expand(1, tokens, heads)
    made = _scan(ids, query, key, value, decay, None, 1.0, hidden_states.dtype)
    made = module.norm(made.reshape(1, tokens, heads * head_dim))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * made), None


def _scan(
    ids: _Ids,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Call the op with tensors ``[1, T, heads, ...]``, and return its outputs in the same layout."""
    if (survey := _found()) is not None:
        k_heads, k_dim = k.shape[2:]
        heads, v_dim = v.shape[2:]
        layer = RecurrentLayer(
            "recurrence", k_heads=k_heads, heads=heads, k_dim=k_dim, v_dim=v_dim, channel_decay=g.dim() == 4
        )
        ids.recurrence = survey.note(ids, layer)
        return torch.zeros_like(v, dtype=dtype)
    scanned: torch.Tensor = torch.ops.kvcache.update_and_scan(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        g.transpose(1, 2),
        None if beta is None else beta.transpose(1, 2),
        _position(),
        layer_id=ids.recurrence,
        scale=scale,
        out_dtype=dtype,
    )
    return scanned.transpose(1, 2).contiguous()


def _position() -> torch.Tensor:
    if _current.position is None:
        raise ValueError("its recurrent layers run outside of a step of the program")
    return _current.position.reshape(-1, 1)


def _found() -> _Survey | None:
    """Return the current survey, or None."""
    return None if torch.compiler.is_compiling() else _survey.get()


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    _CONVOLUTION: _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    # The delta rule with a decay for each channel.
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}
"""Names of transformers' functions -> their replacements."""

_FORWARDS: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": _lightning}
"""Names of transformers' modules -> the replacements of their ``forward``."""
