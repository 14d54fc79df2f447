"""Registers every causal language model of transformers with ``AutoModelForCausalLM``."""

from __future__ import annotations


def register() -> None:
    """Register the causal language models that transformers lists only as image models: Mistral 4, in 5.23."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto import configuration_auto, modeling_auto

    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    for family, name in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        if name.endswith("ForCausalLM") and family not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            config = configuration_auto.CONFIG_MAPPING[family]
            if config not in known:
                model = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config]
                # Without exist_ok, transformers silently skips its own configurations.
                AutoModelForCausalLM.register(config, model, exist_ok=True)
