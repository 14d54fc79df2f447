"""The weights of a GGUF file, with the names and the layout of transformers' model."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from etkv.errors import EtkvError
from etkv.export import recurrent
from etkv.export.gguf import layouts, packed, rope
from etkv.export.gguf.file import GgufFile, StoredTensor
from etkv.export.gguf.layouts import Rule
from etkv.export.published.weight import Groups, Weight, joined

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_INTERLEAVED = frozenset({"arcee", "granite", "granitehybrid", "granitemoe", "llama", "mistral3", "olmo", "smollm3"})
"""Architectures whose stored queries and keys rotate pairs of neighbours. transformers pairs the halves of a head."""

_SHIFTED_NORMS = frozenset({"gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next"})
"""Architectures whose stored norms include the 1 that transformers adds to weights."""

_LAYER = re.compile(r"blk\.(\d+)\.")
_WITHOUT_EFFECT = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that follow from the settings: old converters stored the frequencies of the rotary embedding."""

_OF_CACHE = re.compile(r"blk\.\d+\.attn_(k|v|k_norm)\.weight")
"""Tensors of keys and values. They have no effect in layers that share the keys and values of earlier layers."""

_PROJECTION = re.compile(r".*\.altup_(unembed_)?projections\.(\d+)\.weight")
"""Projections between the inputs of Gemma 3n's layers. A file has all of them in one tensor."""

_OPTIONAL_BIASES = {
    "attention_bias": re.compile(r".*\.self_attn\.[qkvo]_proj\.bias"),
    "mlp_bias": re.compile(r".*\.mlp\.(gate|up|down)_proj\.bias"),
}
"""Settings that give every projection of a block a bias in transformers -> names of these biases.

A bias that the file lacks is zero."""


_FLOATS = ("F16", "F32", "F64", "BF16")
"""The types of tensors that are not quantized."""


def read_weights(file: GgufFile, config: PreTrainedConfig) -> dict[str, Weight]:
    """Return the weights of the model of ``config``: name -> weight. A weight is decoded when it is read.

    ``config`` may have fewer layers than the file. Raises :class:`EtkvError` if a weight is missing, or if the model
    does not use a tensor. A weight of a wrong shape raises the error when the weight is read.
    """
    model: Any = recurrent.skeleton(config)
    parameters = model.state_dict()
    if config.tie_word_embeddings:
        for name in model.all_tied_weights_keys:
            parameters.pop(name, None)
    reader = _Reader(file, config)
    sources = {name: reader.sources(name) for name in parameters}
    reader.check_all_named(sources)
    for name, parts in sources.items():
        reader.check_there(name, parts)
    return {
        name: _Weight(reader, name, sources[name], tuple(parameter.shape)) for name, parameter in parameters.items()
    }


@dataclass(frozen=True)
class _Weight(Weight):
    """The weight ``name`` of transformers' model. It has ``shape`` and comes from the tensors ``sources``."""

    reader: _Reader
    name: str
    sources: list[str]
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Return the values in float32, contiguous."""
        reader, name, shape = self.reader, self.name, self.shape
        key = reader.key(name)
        if key is not None:
            return torch.from_numpy(np.full(shape, key, dtype=np.float32))
        if reader.is_absent_bias(name, self.sources[0]):
            return torch.from_numpy(np.zeros(shape, dtype=np.float32))
        parts = [reader.file.tensors[source].read() for source in self.sources]
        rule = reader.rule(name)
        values = parts[0] if rule is None else rule.make(parts, reader.config)
        values = reader.reordered(name, self.sources[0], values)
        if values.shape != shape and values.size == np.prod(shape) and 1 in (*shape, *values.shape):
            values = values.reshape(shape)
        if values.shape != shape:
            raise EtkvError(
                f"tensor {self.sources[0]} of {reader.file.path} has shape {list(values.shape)}, but its model needs "
                f"{list(shape)}"
            )
        # Copy float32 values, because they are read-only views of the file.
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def groups(self) -> Groups | None:
        """Return the integers and scales; ``None`` if the file has none, or has them in an order that would split
        groups of columns.

        The rows of all experts are one matrix.
        """
        reader, tensors = self.reader, self._tensors()
        is_packed = tensors and all(tensor.kind in packed.FORMATS for tensor in tensors)
        if not is_packed or len(tensors) != len(self.sources):
            return None
        rule = reader.rule(self.name)
        if rule is not None and rule.orders == "elements":
            return None
        found = joined([packed.groups(tensor.blocks(), tensor.kind) for tensor in tensors])
        if found is None:
            return None
        if rule is not None and rule.orders == "columns":
            order = rule.make([np.arange(tensor.shape[-1])[None] for tensor in tensors], reader.config)
            return found.columns(torch.from_numpy(order.ravel()))
        # Arrange the numbers of the rows as `read` arranges their values.
        rows, first = [], 0
        for tensor in tensors:
            n = math.prod(tensor.shape[:-1])
            rows.append(np.arange(first, first + n).reshape(*tensor.shape[:-1], 1))
            first += n
        made = rows[0] if rule is None else rule.make(rows, reader.config)
        order = torch.from_numpy(reader.reordered(self.name, self.sources[0], made).ravel())
        is_same = torch.equal(order, torch.arange(len(found.codes)))
        return found if is_same else found.rows(lambda matrix: matrix[order])

    @property
    def is_quantized(self) -> bool:
        return any(tensor.kind not in _FLOATS for tensor in self._tensors())

    def _tensors(self) -> list[StoredTensor]:
        """Return the tensors that are in the file."""
        return [self.reader.file.tensors[source] for source in self.sources if source in self.reader.file.tensors]


class _Reader:
    def __init__(self, file: GgufFile, config: PreTrainedConfig) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self.file = file
        self.config = config
        architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
        self._names = get_tensor_name_map(architecture, config.num_hidden_layers)

    def check_there(self, name: str, sources: list[str]) -> None:
        """Raise :class:`EtkvError` for a tensor of ``name`` that the file lacks, unless it is a bias, which is zero."""
        for source in sources:
            if source not in self.file.tensors and not self.is_absent_bias(name, source):
                raise EtkvError(f"{self.file.path} lacks tensor {source} of its model")

    def check_all_named(self, sources: dict[str, list[str]]) -> None:
        """Raise :class:`EtkvError` for a tensor of the model's layers that no parameter uses."""
        named = {source for parts in sources.values() for source in parts}
        stored = self.file.values[f"{self.file.architecture}.block_count"]
        first_shared = self.config.num_hidden_layers - (getattr(self.config, "num_kv_shared_layers", 0) or 0)
        for name in self.file.tensors:
            layer = _LAYER.match(name)
            if layer is not None and self.config.num_hidden_layers <= int(layer[1]) < stored:
                continue
            if name in named or name in rope.SETTINGS or _WITHOUT_EFFECT.fullmatch(name):
                continue
            if layer is not None and int(layer[1]) >= first_shared and _OF_CACHE.fullmatch(name):
                continue
            raise EtkvError(
                f"tensor {name} of {self.file.path} is not used by transformers' model of family "
                f"{self.config.model_type!r}; export the model's Hugging Face folder instead"
            )

    def sources(self, name: str) -> list[str]:
        """Return the names of the file's tensors for transformers' parameter ``name``; empty for a number that is a
        key.
        """
        if self.key(name) is not None:
            return []
        layer = re.search(r"\.(\d+)\.", name)
        rule = self.rule(name)
        if layer is not None and rule is not None:
            return [f"blk.{layer[1]}.{part}" for part in rule.sources]
        head = re.fullmatch(r".*\.self_attn\.([qk])_layernorm\.norms\.\d+\.weight", name)
        if layer is not None and head is not None:
            return [f"blk.{layer[1]}.attn_{head[1]}_norm.weight"]
        projection = _PROJECTION.fullmatch(name)
        if projection is not None:
            return [f"altup_{'unembd_' if projection[1] else ''}proj.weight"]
        known: str | None = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name == "lm_head.weight":
            known = "output.weight"
        if known is None:
            raise EtkvError(f"parameter {name} of family {self.config.model_type!r} has no name in GGUF files")
        return [known]

    def key(self, name: str) -> float | None:
        """Return the number for transformers' parameter ``name``, if the file stores the number as a key."""
        layer = re.search(r"\.(\d+)\.(.*)", name)
        key = None if layer is None else layouts.key_of(self.file.architecture, layer[2])
        if layer is None or key is None:
            return None
        value = self.file.values[f"{self.file.architecture}.{key}"]
        return float(value[int(layer[1])] if isinstance(value, list) else value)

    def rule(self, name: str) -> Rule | None:
        """Return the rule for transformers' parameter ``name``: the first rule whose tensors are in the file, or else
        the last rule.
        """
        layer = re.search(r"\.(\d+)\.(.*)", name)
        if layer is None:
            return None
        rules = layouts.rules(self.file.architecture, layer[2])
        there = (
            rule for rule in rules if all(f"blk.{layer[1]}.{source}" in self.file.tensors for source in rule.sources)
        )
        return next(there, rules[-1] if rules else None)

    def is_absent_bias(self, name: str, source: str) -> bool:
        if source in self.file.tensors:
            return False
        return any(
            getattr(self.config, setting, False) and pattern.fullmatch(name)
            for setting, pattern in _OPTIONAL_BIASES.items()
        )

    def reordered(self, name: str, source: str, values: np.ndarray) -> np.ndarray:
        """Return ``values`` in the layout of transformers, because llama.cpp's converters reorder some weights."""
        architecture, config = self.file.architecture, self.config
        ordered: np.ndarray = values
        if architecture in _INTERLEAVED and ".attn_q." in source:
            return _halves(values, config.num_attention_heads)
        if architecture in _INTERLEAVED and ".attn_k." in source:
            return _halves(values, config.num_key_value_heads)
        if architecture in _SHIFTED_NORMS and source.endswith("norm.weight") and not source.endswith("ssm_norm.weight"):
            ordered = values - 1.0
        elif architecture == "gpt2" and values.ndim == 2 and source.startswith("blk."):
            ordered = values.T
        elif architecture == "gptneox" and ".attn_qkv." in source:
            apart = values.reshape(3, config.num_attention_heads, -1, *values.shape[1:])
            ordered = apart.swapaxes(0, 1).reshape(values.shape)
        elif projection := _PROJECTION.fullmatch(name):
            ordered = values[int(projection[2])]
        elif architecture == "stablelm" and (head := re.search(r"_layernorm\.norms\.(\d+)\.", name)):
            ordered = values.reshape(-1, values.shape[-1])[int(head[1])]
        return ordered


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a projection with the halves of each head in sequence, from interleaved halves."""
    pairs: np.ndarray = values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return pairs
