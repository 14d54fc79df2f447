"""Attention that calls the KV cache op, and refuses features that the op lacks.

A model runs twice in an export. The first run, :func:`survey`, is plain PyTorch: it records the cache, the sizes, the
window and the mask of each attention module. The second run is the trace.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from etkv._mlx_serialization import ensure_available
from etkv.export import recurrent
from etkv.recurrent_layer import RecurrentLayer

NAME = "etkv_offgraph"
"""The name under which transformers finds this attention."""

_LACKED = {
    "position_bias": "a bias by position",
    "head_mask": "a mask of heads",
    "block_indices": "a selection of blocks",
    "indices": "a selection of tokens",
}
"""Arguments of attention functions that the op lacks -> their names in messages."""

_WITHOUT_EFFECT = {
    # The cache is outside of the graph. Positions come from the step.
    "cache_position",
    "position_ids",
    "position_embeddings",
    "past_key_values",
    "use_cache",
    # These select outputs in addition to the logits.
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    # These are for training.
    "deterministic",
    "labels",
    "num_items_in_batch",
}
"""Arguments of attention functions that do not change the result here. Values of None and False never change it."""

_SINKS = ("s_aux", "sinks")
"""Arguments of attention functions that are learned sinks; the name depends on the family."""

_USED = {"dropout", "is_causal", "scaling", "sliding_window", "softcap", *_SINKS}
"""Arguments of attention functions that :func:`_attend` reads."""


@dataclass(frozen=True)
class CacheLayout:
    """One entry for each KV cache of the program, in the order of their ids, and one for each recurrent layer.

    ``kv_heads`` counts heads, ``head_dims`` and ``v_head_dims`` count elements of a head's keys and values, and
    ``windows`` and ``chunks`` count positions (0 in both for full history). Recurrent layers have separate ids.
    """

    kv_heads: list[int]
    head_dims: list[int]
    v_head_dims: list[int]
    windows: list[int]
    chunks: list[int]
    recurrent: list[RecurrentLayer] = field(default_factory=list)


@dataclass(frozen=True)
class _CausalMask:
    """Replaces a mask in a survey. ``window`` and ``chunk`` count positions; 0 in both is the causal mask.

    ``is_empty`` is set for a window of 0 or less, in which no token sees itself. A model may create such a mask and not
    use it.
    """

    window: int = 0
    chunk: int = 0
    is_empty: bool = False

    def __str__(self) -> str:
        """Return a description of the mask, for messages."""
        return f"chunks of {self.chunk}" if self.chunk else f"a window of {self.window}"

    def __getitem__(self, rows: object) -> _CausalMask:
        """Return the mask itself: in a survey, the slices of :func:`etkv.export.forward.kept_rows` contain all
        tokens.
        """
        return self


@dataclass
class _Survey:
    """The calls of a model's attention in one step. The program has ``max_context`` positions."""

    max_context: int
    modules: dict[Any, _Call] = field(default_factory=dict)
    """The first call of each module."""


@dataclass(frozen=True)
class _Call:
    """A call of the op: the id of its cache, its keys and values, and its mask."""

    cache: int
    key: torch.Tensor
    value: torch.Tensor
    mask: _CausalMask

    def shares(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether ``key`` and ``value`` are those of this call: layers may share keys and values."""
        return all(
            mine.data_ptr() == other.data_ptr() and mine.shape == other.shape
            for mine, other in ((self.key, key), (self.value, value))
        )


_survey: ContextVar[_Survey | None] = ContextVar("etkv.export.attention.survey", default=None)


def register() -> None:
    """Register the attention :data:`NAME` with transformers. A graph has no masks, because the cache applies them."""
    ensure_available()
    # The import registers the op.
    from executorch.extension.llm.cache import update_and_attend  # noqa: F401
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # The import registers the op's overload with sinks and a softcap.
    import etkv.op  # noqa: F401

    # A step of an earlier export may have failed, and so may still be open.
    recurrent.end()
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


def survey(step: torch.nn.Module, inputs: dict[str, torch.Tensor], max_context: int) -> CacheLayout:
    """Run ``step`` once with ``inputs`` in plain PyTorch, and return the caches that its attention uses.

    ``max_context`` is the number of positions of the program. Chunks of at least this length are full history.

    Stores in each attention module the id of its cache. Modules that share keys and values share a cache. Raises what
    the model raises, and :class:`ValueError` for attention that the op lacks.
    """
    found = _Survey(max_context)
    token = _survey.set(found)
    with torch.no_grad(), recurrent.surveying() as states:
        try:
            step(**inputs)
        except (AttributeError, TypeError) as error:
            if _CausalMask.__name__ not in str(error):
                raise
            own = ValueError("it applies a mask by itself, so the KV cache op cannot replace its attention")
            raise own.with_traceback(error.__traceback__) from None
        finally:
            _survey.reset(token)
            recurrent.end()
    if not found.modules and not states:
        raise ValueError("the KV cache op cannot replace its attention")
    for module, call in found.modules.items():
        module.etkv_cache = call.cache
    first = {call.cache: call for call in reversed(found.modules.values())}
    calls = [first[cache] for cache in sorted(first)]
    return CacheLayout(
        kv_heads=[call.key.shape[1] for call in calls],
        head_dims=[call.key.shape[-1] for call in calls],
        v_head_dims=[call.value.shape[-1] for call in calls],
        windows=[call.mask.window for call in calls],
        chunks=[call.mask.chunk for call in calls],
        recurrent=states,
    )


def run(model: torch.nn.Module, cache_position: torch.Tensor, **arguments: Any) -> Any:
    """Call ``model`` with ``arguments`` for tokens at ``cache_position``, ``[T]``, without a transformers cache."""
    recurrent.begin(cache_position)
    made = model(
        **arguments,
        cache_position=cache_position,
        # Without position_ids, the model would derive positions from a transformers cache.
        position_ids=cache_position.unsqueeze(0),
        use_cache=False,
        past_key_values=None,
    )
    recurrent.end()
    return made


def _mask(*, mask_function: Any = None, use_vmap: bool = False, **others: Any) -> _CausalMask | None:
    """Return None in a graph, and a :class:`_CausalMask` in a survey.

    Raises :class:`ValueError` for masks other than a causal mask, a sliding window and chunks.
    """
    from transformers.masking_utils import causal_mask_function

    found = None if torch.compiler.is_compiling() else _survey.get()
    if found is None:
        return None
    if not use_vmap:
        if (window := _window(mask_function)) is not None:
            return _CausalMask(window=window, is_empty=window < 1 and mask_function is not causal_mask_function)
        if (chunk := _chunk(mask_function)) is not None:
            return _CausalMask(chunk=chunk)
    name = getattr(mask_function, "__qualname__", "?").split(".")[0]
    raise ValueError(f"its attention has the mask {name}; expected a causal mask, a sliding window or chunks")


def _window(mask_function: Any) -> int | None:
    """Return the window of a mask function of transformers; 0 for the causal mask, None for other masks."""
    from transformers.masking_utils import causal_mask_function, sliding_window_overlay

    if mask_function is causal_mask_function:
        return 0
    return _of_overlay(mask_function, sliding_window_overlay(1))


def _chunk(mask_function: Any) -> int | None:
    """Return the chunk length of a mask function of transformers; None for other masks."""
    from transformers.masking_utils import chunked_overlay

    return _of_overlay(mask_function, chunked_overlay(1, torch.zeros(1)))


def _of_overlay(mask_function: Any, known: Any) -> int | None:
    """Return the length of a causal mask's overlay if the overlay has the code of ``known``; None for other masks."""
    from transformers.masking_utils import and_masks, causal_mask_function

    if getattr(mask_function, "__code__", None) is not and_masks().__code__:
        return None
    parts = [cell.cell_contents for cell in mask_function.__closure__]
    if len(parts) == 1 and isinstance(parts[0], tuple) and len(parts[0]) == 2 and parts[0][1] is causal_mask_function:
        overlay = parts[0][0]
        if overlay.__code__ is known.__code__:
            # The first closure variable of both overlays is their length.
            return int(overlay.__closure__[0].cell_contents)
    return None


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _CausalMask | torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer, from ``[1, heads, T, head_dim]`` to ``[1, T, heads, v_head_dim]``.

    Raises :class:`ValueError` for arguments that change the result and that the op lacks.
    """
    from etkv.export import latent, position_scale

    _check_arguments(module, arguments)
    if is_latent := latent.is_latent(module):
        if arguments.get("scaling") is None:
            # The default scale follows from the dimension of the expanded keys, not of the latents.
            arguments["scaling"] = query.shape[-1] ** -0.5
        query = latent.query(module, query)
    if isinstance(attention_mask, torch.Tensor):
        raise ValueError("it computes a mask for its attention, which the KV cache op lacks")
    sinks, softcap = _sinks(arguments, query), _softcap(arguments)
    found = None if torch.compiler.is_compiling() else _survey.get()
    if found is not None:
        mask = attention_mask if isinstance(attention_mask, _CausalMask) else _CausalMask()
        _note(found, module, query, key, value, mask, arguments.get("sliding_window"))
        width: Any = module.v_head_dim if is_latent else value.shape[-1]
        return query.new_zeros(1, query.shape[2], query.shape[1], width), None

    position, cache = recurrent.position(), getattr(module, "etkv_cache", None)
    if position is None or cache is None:
        raise ValueError("its attention runs outside of a step of the program")
    query = position_scale.scaled(module, query, position)
    scale = arguments.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    position = position.reshape(-1, 1)
    attended: torch.Tensor
    if sinks is None and softcap == 0.0:
        plain = torch.ops.kvcache.update_and_attend
        attended = plain(query, key, value, position, layer_id=cache, scale=scale, out_dtype=query.dtype)
    else:
        overload = torch.ops.kvcache.update_and_attend.sinks
        attended = overload(query, key, value, position, cache, scale, query.dtype, sinks, softcap)
    if is_latent:
        attended = latent.result(module, attended)
    return attended.transpose(1, 2).contiguous(), None


def _sinks(arguments: dict[str, Any], query: torch.Tensor) -> torch.Tensor | None:
    """Return the sinks of a layer, ``[heads]``, or None. Raises :class:`ValueError` unless there is one for each
    head.
    """
    given = [arguments[name] for name in _SINKS if arguments.get(name) is not None]
    if not given:
        return None
    shapes = [list(sinks.shape) for sinks in given]
    if shapes != [[query.shape[1]]]:
        raise ValueError(
            f"its attention has learned sinks of shape {', '.join(map(str, shapes))}; the KV cache op has one for each "
            f"of {query.shape[1]} heads"
        )
    sinks: torch.Tensor = given[0]
    return sinks


def _softcap(arguments: dict[str, Any]) -> float:
    """Return the softcap of a layer; 0 for none. Raises :class:`ValueError` for a number that is no softcap."""
    softcap = arguments.get("softcap")
    if softcap is not None and not softcap > 0:
        raise ValueError(
            f"its attention has a softcap of {softcap}; for a model without a softcap, set attn_logit_softcapping in "
            "config.json to null"
        )
    return float(softcap or 0.0)


def _check_arguments(module: torch.nn.Module, arguments: dict[str, Any]) -> None:
    causal = arguments.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError("its tokens attend to later tokens, but the KV cache op is causal")
    for name, given in arguments.items():
        if given is None or given is False or name in _WITHOUT_EFFECT or name in _USED:
            continue
        if name in _LACKED:
            raise ValueError(f"its attention has {_LACKED[name]}, which the KV cache op lacks")
        raise ValueError(f"its attention has the argument {name!r}, which the KV cache op lacks")
    if arguments.get("dropout"):
        raise ValueError("its attention has dropout, which is for training")


def _note(
    found: _Survey,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: _CausalMask,
    declared: int | None,
) -> None:
    """Add a call to a survey. Raises :class:`ValueError` if one cache cannot serve all calls of the module."""
    if query.shape[2] != key.shape[2]:
        raise ValueError("in a step, its queries and its keys belong to different tokens")
    if mask.is_empty:
        raise ValueError(
            f"its sliding window is {mask.window}, so no token would see itself; for a model without a window, set "
            "sliding_window in config.json to null"
        )
    if declared and declared != mask.window:
        raise ValueError(f"its attention has a window of {declared}, but its mask has {mask}")
    earlier = found.modules.get(module)
    if earlier is not None:
        if not earlier.shares(key, value):
            raise ValueError("a step runs the same attention several times with different keys and values")
        return
    donor = next((call for call in found.modules.values() if call.shares(key, value)), None)
    if donor is not None and donor.mask != mask:
        raise ValueError(f"layers that share keys and values have different masks: {donor.mask} and {mask}")
    cache = donor.cache if donor is not None else len({call.cache for call in found.modules.values()})
    found.modules[module] = _Call(cache, key, value, mask)
