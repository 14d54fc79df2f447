"""Architectures that compute keys and values from a latent: DeepSeek's, and MiniCPM3."""

from __future__ import annotations

from etkv.export.gguf import rope
from etkv.export.gguf.decoder import Reader, Settings, embedding, grouped_experts, layers
from etkv.export.gguf.keys import Keys

_LITE_VOCABULARY = 154880
"""The size of the vocabulary of GLM-4.7-Flash. The first files of this model lack the function of the router."""


def _deepseek2(keys: Keys) -> tuple[str, Settings]:
    decoder = _Latent(keys)
    gating = keys.integer("expert_gating_func", 0) or (2 if decoder.vocab_size == _LITE_VOCABULARY else 0)
    biased = any(name.endswith(".exp_probs_b.bias") for name in keys.file.tensors)
    if not gating:
        # llama.cpp assumes a softmax. Files with a selection bias come from models with a sigmoid.
        gating = 2 if biased else 1
    if gating not in (1, 2) or biased != (gating == 2):
        with_bias = "a bias" if biased else "no bias"
        raise keys.refuse(
            "expert_gating_func",
            f"but {with_bias} for choosing experts; a softmax (1) has no bias, a sigmoid (2) has one",
        )
    settings = decoder.settings() | grouped_experts(keys)
    if gating == 2:
        return "deepseek_v3", settings | {"num_nextn_predict_layers": 0}
    settings["topk_method"] = "group_limited_greedy" if settings["n_group"] > 1 else "greedy"
    # transformers multiplies by the factor, and does not normalize the weights.
    keys.only("expert_weights_norm", False, reason="but transformers' DeepSeek-V2 does not normalize weights")
    return "deepseek_v2", settings


def _minicpm3(keys: Keys) -> tuple[str, Settings]:
    decoder = _Latent(keys)
    settings = decoder.settings()
    # These numbers are fixed in llama.cpp, and there are no keys for them.
    return "minicpm3", settings | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


class _Latent:
    """The settings of latent attention. The last part of a query's head is rotated, the first part is not."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.vocab_size, self._hidden = embedding(keys)

    def settings(self) -> Settings:
        """Return the settings, with the sizes that all decoders share."""
        keys = self._keys
        heads, rank = keys.positive("attention.head_count"), keys.positive("attention.kv_lora_rank")
        rotary = keys.positive("rope.dimension_count")
        key = keys.positive("attention.key_length_mla", keys.integer("attention.key_length", 0) or None)
        if key <= rotary:
            raise keys.refuse("rope.dimension_count", f"but heads of queries have {key} elements")
        value = self._value_length(heads, key - rotary)
        if keys.has("attention.key_length_mla"):
            # In llama.cpp all heads attend to one head, which consists of the latent and its rotary part.
            keys.only("attention.key_length", rank + rotary, reason=f"but latents have {rank} + {rotary} elements")
            keys.only("attention.value_length", rank, reason=f"but latents have {rank} elements")
            keys.only("attention.head_count_kv", 1, reason="but there is one latent a token")
        else:
            keys.only("attention.value_length", value, reason=f"but tensor attn_kv_b has values of {value} elements")
            keys.only("attention.head_count_kv", heads, reason=f"but there are {heads} heads of queries")
        keys.skip("attention.layer_norm_epsilon")
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self._hidden,
            "intermediate_size": keys.positive("feed_forward_length"),
            "num_hidden_layers": layers(keys),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": keys.positive("context_length"),
            "rms_norm_eps": keys.epsilon("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": not keys.has_tensor("output.weight"),
            "q_lora_rank": keys.integer("attention.q_lora_rank", 0) or None,
            "kv_lora_rank": rank,
            "qk_rope_head_dim": rotary,
            "qk_nope_head_dim": key - rotary,
            "v_head_dim": value,
            "head_dim": rotary,
            "rope_parameters": self._rope(rotary),
        }

    def _value_length(self, heads: int, unrotated: int) -> int:
        """Return the number of elements of a head's value, from the shape of the tensor that expands latents."""
        apart, joined = (self._keys.file.tensors.get(f"blk.0.attn_{name}.weight") for name in ("v_b", "kv_b"))
        if apart is not None:
            self._keys.only("attention.value_length_mla", apart.shape[1], reason="but tensor attn_v_b has another size")
            return apart.shape[1]
        if joined is None or joined.shape[0] % heads or joined.shape[0] // heads <= unrotated:
            raise self._keys.refuse("attention.head_count", "but no tensor attn_v_b or attn_kv_b has a matching size")
        return joined.shape[0] // heads - unrotated

    def _rope(self, rotary: int) -> Settings:
        """Return the rotary embedding. YaRN's logarithm scales attention scores, not the cosines."""
        keys = self._keys
        if keys.text("rope.scaling.type", "linear") != "yarn":
            return rope.read(keys, rotary)
        # Converters divide the multiplier by 10.
        multiplier = keys.real("rope.scaling.yarn_log_multiplier", 0.0) * 10
        for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
            keys.only(name, 0.0, 1.0, reason="but this architecture scales by yarn_log_multiplier alone")
        parameters = rope.read(keys, rotary)
        parameters.pop("attention_factor")
        return parameters | {"mscale": multiplier, "mscale_all_dim": multiplier}


READERS: dict[str, Reader] = {
    "deepseek2": _deepseek2,
    "minicpm3": _minicpm3,
}
