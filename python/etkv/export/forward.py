"""The module that is traced: one step of a model whose KV caches are outside the graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from etkv.errors import EtkvError
from etkv.export import attention, layers


class Forward(torch.nn.Module):
    """``forward(input_ids [1, T], cache_position [T])`` -> logits, or logits and hidden states.

    Logits are ``[1, T, vocabulary]``, or ``[1, 1, vocabulary]`` for the last token if ``last_logits`` is set. With
    ``taps``, hidden states are ``[1, T, hidden * taps]``: the concatenated outputs of the layers with these indices,
    before any final norm.
    """

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...] = (), last_logits: bool = False) -> None:
        super().__init__()
        self.model = model
        self._taps = taps
        self.rows = kept_rows(model, last_logits)
        self._tapped: dict[int, torch.Tensor] = {}
        for index in taps:
            layers.modules(model)[index].register_forward_hook(self._tap(index))

    def _tap(self, index: int) -> Callable[[torch.nn.Module, object, Any], None]:
        def keep(module: torch.nn.Module, arguments: object, output: Any) -> None:
            self._tapped[index] = output[0] if isinstance(output, tuple) else output

        return keep

    def inputs(self, length: int) -> dict[str, torch.Tensor]:
        """Return example inputs of ``length`` tokens."""
        return token_inputs(length)

    def forward(
        self, input_ids: torch.Tensor, cache_position: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        made = attention.run(self.model, cache_position, input_ids=input_ids, **self.rows)
        if not self._taps:
            logits: torch.Tensor = made.logits
            return logits
        return made.logits, torch.cat([self._tapped[index] for index in self._taps], dim=-1)


def token_inputs(length: int) -> dict[str, torch.Tensor]:
    """Return examples of the inputs that every program has: ids ``[1, T]`` and positions ``[T]``."""
    return {
        "input_ids": torch.zeros((1, length), dtype=torch.long),
        "cache_position": torch.arange(length, dtype=torch.long),
    }


def sample_ids(model: PreTrainedModel, length: int) -> torch.Tensor:
    """Return ``length`` different ids for ``model``, ``[1, length]``."""
    # The first and last ids of a vocabulary are often special tokens, some of them for images.
    n = model.get_input_embeddings().num_embeddings
    ids: torch.Tensor = torch.arange(length) * 37 % max(1, min(n // 2, 1000)) + n // 4
    return ids.reshape(1, -1)


def samples(step: Any, length: int) -> dict[str, torch.Tensor]:
    """Return inputs of ``length`` different tokens for ``step``, a :class:`Forward` or a draft."""
    inputs: dict[str, torch.Tensor] = step.inputs(length)
    inputs["input_ids"] = sample_ids(step.model, length)
    numbers = torch.Generator().manual_seed(0)
    for name, example in inputs.items():
        if example.is_floating_point():
            inputs[name] = torch.rand(example.shape, generator=numbers).to(example.dtype)
    if "known" in inputs:
        inputs["known"] = inputs["known"].round()
    return inputs


def kept_rows(model: PreTrainedModel, last_only: bool) -> dict[str, int | slice]:
    """Return the argument with which ``model`` computes logits only for the last token; empty unless ``last_only``.

    Raises :class:`EtkvError` for a family without such an argument.
    """
    if not last_only:
        return {}
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise EtkvError(
            f"logits last: model family {model.config.model_type!r} cannot compute only the last row of logits"
        )
    if getattr(model.config.get_text_config(), "num_kv_shared_layers", 0):
        # The argument is a number or a slice. With a number, layers that share keys and values would also compute
        # only the last token. A slice limits only the head.
        return {"logits_to_keep": slice(-1, None)}
    return {"logits_to_keep": 1}
