"""Extracts the text model of a model for text and images or sound.

transformers reads the whole model, with its own rules for the names of weights. The exported part is a causal language
model of the text configuration, with the decoder and the head of the whole model. Its logits for a text must equal
those of the whole model.
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
"""Number of tokens for comparing the text part with the whole model."""

_TOLERANCE = 1e-3
"""The maximum difference between the logits of both models, as a fraction of their spread. Both models run the same
operations.
"""


def config(whole: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the causal language model in ``whole``; ``whole`` itself if it has no other part."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text: PreTrainedConfig | None = getattr(whole, "text_config", None)
    return text if text is not None and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else whole


def whole_class(whole: PreTrainedConfig) -> Any:
    """Return the class of the model of ``whole``: the class in its configuration, or else the class of its family.

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
    raise EtkvError(f"model family {whole.model_type!r} has a text part, but transformers has no class for the whole")


def take(whole: PreTrainedModel) -> PreTrainedModel:
    """Return the causal language model in ``whole``, with its weights.

    Raises :class:`EtkvError` if ``whole`` has no such model, or if its logits for a text differ.
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
        raise EtkvError(f"model family {family!r} has {len(found)} modules {type(decoder).__name__}, expected 1")
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
    """Raise :class:`EtkvError` unless both models return the same logits for a text."""
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
            f"model family {family!r} and its text part, a {type(part).__name__}, return different logits for a text: "
            f"they differ by {off:.2g} of their spread"
        )
