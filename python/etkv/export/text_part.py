"""Takes the text model out of a model for text and images or sound.

transformers reads the whole model, with its own rules for the names of weights. The part that is exported is a causal
language model of the text configuration with the decoder and the head of the whole, and it must answer a text as the
whole does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from etkv.errors import EtkvError
from etkv.export import packing
from etkv.export.forward import sample_ids
from etkv.export.reasons import reason

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_TOKENS = 8
"""The tokens on which the part and the whole are compared."""

_TOLERANCE = 1e-3
"""The largest difference of their logits, as a fraction of the spread. They run the same operations."""


def config(whole: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the causal language model in ``whole``; ``whole`` itself where it is one alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text: PreTrainedConfig | None = getattr(whole, "text_config", None)
    return text if text is not None and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else whole


def whole_class(whole: PreTrainedConfig) -> Any:
    """Return the class of the model of ``whole``: the one that its configuration names, or else that of its family.

    Raises :class:`EtkvError` if there is none.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    for name in whole.architectures or ():
        named = getattr(transformers, name, None)
        if named is not None and named.config_class is type(whole):
            return named
    for mapping in (modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(whole) in mapping:
            return mapping[type(whole)]
    raise EtkvError(f"model family {whole.model_type!r} has a text part, and transformers has no class for the whole")


def take(whole: PreTrainedModel) -> PreTrainedModel:
    """Return the causal language model in ``whole``, with its weights.

    Raises :class:`EtkvError` if ``whole`` is not built around one, or answers a text otherwise.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text_config, family = config(whole.config), whole.config.model_type
    head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
    if head is None:
        raise EtkvError(f"model family {family!r} has no head for text")
    text_config.tie_word_embeddings = packing.share(head, embedding)
    with torch.device("meta"):
        part: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(text_config)](text_config)
    decoder: Any = part.get_decoder()
    found = [module for module in whole.modules() if type(module) is type(decoder)]
    if len(found) != 1:
        raise EtkvError(
            f"model family {family!r} has {len(found)} modules {type(decoder).__name__}, and a text part has one"
        )
    name = next(name for name, module in part.named_modules() if module is decoder)
    parent, _, attribute = name.rpartition(".")
    setattr(part.get_submodule(parent), attribute, found[0])
    part.set_output_embeddings(head)
    lacking = [name for name, weight in (*part.named_parameters(), *part.named_buffers()) if weight.is_meta]
    if lacking:
        raise EtkvError(f"model family {family!r} has no weight {lacking[0]} of {type(part).__name__}")
    part.generation_config = whole.generation_config
    part.eval()
    _compare(whole, part)
    return part


def _compare(whole: PreTrainedModel, part: PreTrainedModel) -> None:
    """Raise :class:`EtkvError` unless both give a text the same logits."""
    family, ids = whole.config.model_type, sample_ids(part, _TOKENS)
    with torch.no_grad():
        expected = part(input_ids=ids, use_cache=False).logits
        try:
            made = whole(input_ids=ids, use_cache=False).logits
        except Exception as error:
            raise EtkvError(
                f"model family {family!r}: the text part cannot be compared with the whole: {reason(error)}"
            ) from error
    off = float((made - expected).abs().max() / expected.std())
    if not off <= _TOLERANCE:
        raise EtkvError(
            f"model family {family!r} answers a text otherwise than its text part alone, a {type(part).__name__}: its "
            f"logits differ by {off:.2g} of their spread"
        )
