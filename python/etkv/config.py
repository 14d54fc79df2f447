"""What a cache is to be: the layers of the model, which are facts, and capacity and storage, which are a choice.

The fields are those of ``etkv_layer_config`` and ``etkv_cache_config`` in ``include/etkv/etkv.h``. Only types are
checked here; limits are checked where a cache is made, by the native library and by the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass

from etkv.errors import EtkvError

GROWTHS = ("doubling", "step", "exact", "upfront")
"""How buffers grow as positions come, in the order of ``etkv_growth``."""


@dataclass(frozen=True)
class LayerConfig:
    """What one attention layer stores."""

    n_kv_heads: int
    """KV heads, not query heads."""
    k_head_dim: int
    """Elements of one key."""
    v_head_dim: int | None = None
    """Elements of one value; None for the same as a key."""
    _: KW_ONLY
    window: int = 0
    """Positions that a query sees, itself among them; 0 for full history."""
    sinks: int = 0
    """First positions that a query sees besides its window; 0 without one."""

    def __post_init__(self) -> None:
        for name in ("n_kv_heads", "k_head_dim", "window", "sinks"):
            _integer(f"{type(self).__name__}.{name}", getattr(self, name))
        if self.v_head_dim is not None:
            _integer(f"{type(self).__name__}.v_head_dim", self.v_head_dim)

    @property
    def value_dim(self) -> int:
        """Elements of one value."""
        return self.k_head_dim if self.v_head_dim is None else self.v_head_dim


@dataclass(frozen=True)
class CacheConfig:
    """What a cache is to be."""

    layers: Sequence[LayerConfig]
    """One entry a layer, in the order of the program's layer ids. Kept as a tuple."""
    capacity: int
    """The most positions that it holds: the session's context length."""
    _: KW_ONLY
    k_format: str = "f16"
    """Storage of keys, by name."""
    v_format: str = "f16"
    """Storage of values, by name."""
    max_step_tokens: int = 0
    """The most tokens of one step where layers have windows or ``quantized_kv_start`` is set; 0 for 512."""
    growth: str = "doubling"
    """One of :data:`GROWTHS`."""
    min_chunk: int = 0
    """Slots of a growth that has chunks; 0 for 256."""
    quantized_kv_start: int = 0
    """Where it is more than 0: positions are stored in ``float_format`` until there are so many, then converted."""
    float_format: str = "f16"
    """Storage of both before ``quantized_kv_start``: a float format."""

    def __post_init__(self) -> None:
        if isinstance(self.layers, (str, LayerConfig)) or not isinstance(self.layers, Iterable):
            raise EtkvError(f"CacheConfig.layers is {self.layers!r}, it is a sequence of LayerConfig")
        object.__setattr__(self, "layers", tuple(self.layers))
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, LayerConfig):
                raise EtkvError(f"CacheConfig.layers[{index}] is {layer!r}, it is a LayerConfig")
        for name in ("capacity", "max_step_tokens", "min_chunk", "quantized_kv_start"):
            _integer(f"CacheConfig.{name}", getattr(self, name))
        for name in ("k_format", "v_format", "growth", "float_format"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise EtkvError(f"CacheConfig.{name} is {value!r}, it is a string")


def _integer(name: str, value: object) -> None:
    # A bool is an int to Python, and a mistake here.
    if isinstance(value, bool) or not isinstance(value, int):
        raise EtkvError(f"{name} is {value!r}, it is an integer")
