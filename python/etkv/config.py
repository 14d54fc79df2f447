"""The config of a cache. The model determines the layers. The caller chooses capacity and storage.

The fields are those of ``etkv_layer_config`` and ``etkv_cache_config`` in ``include/etkv/etkv.h``. This
module checks only types. The native library and the reference caches check limits when a cache is created.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias, get_args

from etkv.errors import EtkvError
from etkv.recurrent_layer import KINDS, RecurrentLayer

DEFAULT_MAX_STEP_TOKENS = 512
"""Maximum tokens of one step if neither the program nor the config sets it."""

Dtype: TypeAlias = Literal["f32", "f16", "bf16"]
"""The dtype that a program computes in, by the name of its storage format."""

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
"""The dtypes in the order of ``etkv_dtype``, which begins with the unknown dtype."""

GROWTHS = ("doubling", "step", "exact", "upfront")
"""The ways in which buffers grow, in the order of ``etkv_growth``."""


@dataclass(frozen=True)
class LayerConfig:
    """Shapes of the keys and values that one attention layer stores, and the positions that its queries see."""

    n_kv_heads: int
    """Number of KV heads, not of query heads."""
    k_head_dim: int
    """Number of elements of one key."""
    v_head_dim: int | None = None
    """Number of elements of one value; None for the same number as a key."""
    _: KW_ONLY
    window: int = 0
    """Number of positions that a query sees, its own included; 0 for full history."""
    sinks: int = 0
    """Number of positions at the start of the sequence that a query sees in addition to its window; 0 without a
    window.
    """
    dtype: Dtype | None = None
    """The dtype of keys and values in the program; None if it is unknown. It is the storage format if the config names
    no format.
    """
    values_in_keys: bool = False
    """Whether a value is the first ``v_head_dim`` elements of its key, as with latent attention. The layer then stores
    only keys. The first step of a program is refused if the program has other values."""
    chunk: int = 0
    """Number of positions in a chunk; 0 for a layer without chunks. Chunks begin at multiples of this number. A query
    sees its own position and the earlier positions of its chunk. A layer with chunks has no window.
    """

    def __post_init__(self) -> None:
        for name in ("n_kv_heads", "k_head_dim", "window", "sinks", "chunk"):
            _integer(f"{type(self).__name__}.{name}", getattr(self, name))
        if self.dtype is not None and self.dtype not in DTYPES:
            raise EtkvError(f"LayerConfig.dtype is {self.dtype!r}, expected None or one of {', '.join(DTYPES)}")
        if self.v_head_dim is not None:
            _integer(f"{type(self).__name__}.v_head_dim", self.v_head_dim)
        if not isinstance(self.values_in_keys, bool):
            raise EtkvError(f"LayerConfig.values_in_keys is {self.values_in_keys!r}, expected a bool")

    @property
    def value_dim(self) -> int:
        """Return the number of elements of one value."""
        return self.k_head_dim if self.v_head_dim is None else self.v_head_dim


class LayerConfigs(tuple[LayerConfig, ...]):
    """The layers of a model, in the order of the program's layer ids. ``repr`` shows equal neighbours once.

    ``backend`` is the backend of the program that the layers were read from, or None. ``recurrent_layers`` are the
    recurrent layers of the program.
    """

    backend: str | None
    recurrent_layers: tuple[RecurrentLayer, ...]

    def __new__(
        cls,
        layers: Iterable[LayerConfig] = (),
        backend: str | None = None,
        recurrent_layers: Sequence[RecurrentLayer] = (),
    ) -> LayerConfigs:
        """Hold ``layers``. If they are :class:`LayerConfigs`, they supply the arguments that are left out."""
        configs = super().__new__(cls, layers)
        configs.backend, configs.recurrent_layers = backend, tuple(recurrent_layers)
        if isinstance(layers, LayerConfigs):
            configs.backend = layers.backend if backend is None else backend
            configs.recurrent_layers = configs.recurrent_layers or layers.recurrent_layers
        return configs

    def __repr__(self) -> str:
        runs = ((layer, len(list(same))) for layer, same in itertools.groupby(self))
        return f"[{', '.join(f'{n} × {layer}' if n > 1 else repr(layer) for layer, n in runs)}]"


@dataclass(frozen=True)
class CacheConfig:
    """The config of a cache."""

    layers: Sequence[LayerConfig]
    """One entry for each attention layer, in the order of the program's layer ids. May be empty in a config with
    recurrent layers. Stored as :class:`LayerConfigs`."""
    capacity: int
    """Maximum number of positions in the cache: the session's context length."""
    _: KW_ONLY
    k_format: str | None = None
    """The format of keys, by name. None for the dtype of the layers, or ``f16`` if that is unknown.
    :attr:`etkv.Cache.formats` has the format in use."""
    v_format: str | None = None
    """The format of values, by name. None has the same meaning as in ``k_format``. If the values of all layers are in
    their keys, this field is None or the format of keys.
    """
    max_step_tokens: int = 0
    """Maximum tokens of one step if layers have windows or ``quantized_kv_start`` is set; 0 for 512."""
    growth: str = "doubling"
    """One of :data:`GROWTHS`."""
    min_chunk: int = 0
    """Minimum slots by which buffers grow, for the growths ``doubling`` and ``step``; 0 for 256."""
    quantized_kv_start: int = 0
    """Number of positions that are stored in ``float_format`` before quantization begins; 0 to begin at once."""
    float_format: str | None = None
    """The float format of keys and values before ``quantized_kv_start``. None has the same meaning as in
    ``k_format``."""
    recurrent_layers: Sequence[RecurrentLayer] = ()
    """One :class:`etkv.Convolution` or :class:`etkv.Recurrence` for each recurrent layer, in the order of their ids.
    Recurrent layers have ids of their own, from 0. If this field is empty and ``layers`` were read from a program,
    the program's recurrent layers are used. Recurrent layers always store float32. Stored as a tuple.
    """
    anchors: int = 0
    """The number of states that a sequence keeps in each recurrence, 1 to 64; 0 for 2. These states lie at multiples
    of 64 positions. Each state after the first lets the sequence rewind by 64 more positions.
    """
    checkpoints: int | None = None
    """Maximum number of checkpoints in the cache, see :meth:`etkv.Cache.mark`: 0 to 256; None for 32. Each checkpoint
    keeps the states of one position.
    """

    def __post_init__(self) -> None:
        if isinstance(self.layers, (str, LayerConfig)) or not isinstance(self.layers, Iterable):
            raise EtkvError(f"CacheConfig.layers is {self.layers!r}, expected a sequence of LayerConfig")
        layers = LayerConfigs(self.layers)
        object.__setattr__(self, "layers", layers)
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, LayerConfig):
                raise EtkvError(f"CacheConfig.layers[{index}] is {layer!r}, expected a LayerConfig")
        self._take_recurrent_layers(layers.recurrent_layers)
        for name in ("capacity", "max_step_tokens", "min_chunk", "quantized_kv_start", "anchors"):
            _integer(f"CacheConfig.{name}", getattr(self, name))
        if self.checkpoints is not None:
            _integer("CacheConfig.checkpoints", self.checkpoints)
        for name in ("k_format", "v_format", "growth", "float_format"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "growth"):
                raise EtkvError(f"CacheConfig.{name} is {value!r}, expected a string")

    def _take_recurrent_layers(self, of_program: tuple[RecurrentLayer, ...]) -> None:
        given = self.recurrent_layers
        if isinstance(given, (str, RecurrentLayer)) or not isinstance(given, Iterable):
            raise EtkvError(f"CacheConfig.recurrent_layers is {given!r}, expected a sequence of RecurrentLayer")
        layers = tuple(given) or of_program
        for index, layer in enumerate(layers):
            name = f"CacheConfig.recurrent_layers[{index}]"
            if not isinstance(layer, RecurrentLayer):
                raise EtkvError(f"{name} is {layer!r}, expected a Convolution or a Recurrence")
            if layer.kind not in KINDS:
                raise EtkvError(f"{name}.kind is {layer.kind!r}, expected one of {', '.join(KINDS)}")
            for size in ("channels", "width", "k_heads", "heads", "k_dim", "v_dim"):
                _integer(f"{name}.{size}", getattr(layer, size))
            if not isinstance(layer.channel_decay, bool):
                raise EtkvError(f"{name}.channel_decay is {layer.channel_decay!r}, expected a bool")
        object.__setattr__(self, "recurrent_layers", layers)


def _integer(name: str, value: object) -> None:
    # In Python a bool is an int.
    if isinstance(value, bool) or not isinstance(value, int):
        raise EtkvError(f"{name} is {value!r}, expected an integer")
