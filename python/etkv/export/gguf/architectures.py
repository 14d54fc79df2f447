"""The supported architectures of GGUF files, and their configurations in transformers.

llama.cpp defines the meaning and the default of each key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etkv.errors import EtkvError
from etkv.export.gguf import dense, gemma, hybrids, latent, mixtures, rope, special_tokens
from etkv.export.gguf.decoder import Reader
from etkv.export.gguf.file import GgufFile
from etkv.export.gguf.keys import Keys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_config(file: GgufFile) -> PreTrainedConfig:
    """Return the configuration of the model in ``file``.

    Raises :class:`EtkvError` for an unsupported architecture, for an unknown key or settings tensor, and for settings
    that transformers' model of the family cannot express.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    _check_is_model(file)
    read = READERS.get(file.architecture)
    if read is None:
        raise EtkvError(
            f"architecture {file.architecture!r} of {file.path} is not one that the exporter reads from GGUF "
            f"({', '.join(sorted(READERS))}); export the model's Hugging Face folder instead"
        )
    keys = Keys(file)
    model_type, settings = read(keys)
    _check_neutral(keys)
    keys.check_all_read(rope.SETTINGS)
    return CONFIG_MAPPING[model_type](**settings, **special_tokens.ids(file))


def _check_is_model(file: GgufFile) -> None:
    kind = file.values.get("general.type", "model")
    if kind != "model":
        raise EtkvError(f"{file.path} is not a model: its general.type is {kind!r}")
    adapter = next((key for key in file.values if key.startswith("adapter.")), None)
    if adapter is not None:
        raise EtkvError(f"{file.path} is an adapter, not a model: it has {adapter}")


_NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "router_logit_softcapping": (0.0,),
}
"""Keys that enable further computations -> the values that disable them."""


def _check_neutral(keys: Keys) -> None:
    """Accept keys that no reader has read, if their values disable the computation."""
    for name, values in _NEUTRAL.items():
        if not keys.was_read(name):
            keys.only(name, *values, reason="which transformers' model of this architecture does not apply")
    keys.only("attention.causal", True, reason="but the KV cache is for causal attention")


READERS: dict[str, Reader] = {**dense.READERS, **gemma.READERS, **hybrids.READERS, **latent.READERS, **mixtures.READERS}
"""llama.cpp's name of an architecture -> the function that returns its transformers family and settings."""
