"""Keys that all decoders in GGUF files share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from etkv.errors import EtkvError
from etkv.export.gguf import rope
from etkv.export.gguf.keys import Keys

Settings = dict[str, Any]
"""Arguments of a transformers configuration."""

Family = tuple[str, Settings]
"""The transformers family of a file, and the settings of its configuration."""

Reader = Callable[[Keys], Family]

NO_WINDOW: Settings = {"use_sliding_window": False, "sliding_window": None}
"""The settings of families whose windows are off, although transformers has them."""


class Decoder:
    """The settings that all decoders share: sizes, the output weight, and which projections have biases."""

    def __init__(self, keys: Keys, *, is_hybrid: bool = False) -> None:
        """Read the keys. In a model that ``is_hybrid``, layers without attention have 0 heads of keys."""
        self.keys = keys
        self.vocab_size, self.hidden = embedding(keys)
        self.layers = layers(keys)
        self.heads = keys.positive("attention.head_count")
        self.kv_heads_of_layers = keys.of_layers("attention.head_count_kv", self.layers, self.heads)
        attending = [layer for layer, heads in enumerate(self.kv_heads_of_layers) if heads]
        counts = {heads for heads in self.kv_heads_of_layers if heads}
        if len(counts) != 1 or (len(attending) < self.layers and not is_hybrid):
            raise keys.refuse("attention.head_count_kv", "which differs between layers, or is 0 in all")
        self.kv_heads = counts.pop()
        self.context = keys.positive("context_length")
        self._query = f"blk.{attending[0]}.attn_q.weight"
        stored = self._stored_head_dim()
        self.head_dim = keys.positive("attention.key_length", stored)
        if self._query in keys.file.tensors:
            keys.only("attention.key_length", stored, reason=f"but its queries have heads of {stored} elements")
        keys.only(
            "attention.value_length",
            self.head_dim,
            reason=f"but {keys.key('attention.key_length')} is {self.head_dim}; both must be equal",
        )

    def _stored_head_dim(self) -> int:
        """Return the size of a head, from the shape of the first layer's queries or from the model's width."""
        query = self.keys.file.tensors.get(self._query)
        rows = self.hidden if query is None else query.shape[0]
        if rows % self.heads:
            raise self.keys.refuse("attention.head_count", f"which does not divide {rows}, the length of its queries")
        return rows // self.heads

    def _intermediate(self) -> int:
        """Return the width of feed-forward blocks. The key is optional in models with experts in every layer."""
        has = self.keys.has("feed_forward_length") or not self.keys.has("expert_feed_forward_length")
        return self.keys.positive("feed_forward_length" if has else "expert_feed_forward_length")

    @property
    def common(self) -> Settings:
        """Return the settings whose names transformers' decoders share."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
            "intermediate_size": self._intermediate(),
            # Without an output weight, llama.cpp uses the embedding.
            "tie_word_embeddings": not self.keys.has_tensor("output.weight"),
        }

    def llama_like(self, *, partial: bool = False) -> Settings:
        """Return :attr:`common`, the epsilon of RMS norms, the head size and the rotary embedding."""
        # Converters also write the epsilon of layer norms, which these models do not have.
        self.keys.skip("attention.layer_norm_epsilon")
        return self.common | {
            "rms_norm_eps": self.keys.epsilon("attention.layer_norm_rms_epsilon"),
            "head_dim": self.head_dim,
            **self.rotary(partial=partial),
        }

    def rotary(self, *, partial: bool = False) -> Settings:
        """Return the rotary embedding. ``partial`` allows heads in which only the first elements are rotated."""
        return {"rope_parameters": rope.read(self.keys, self.head_dim, partial=partial)}

    def layer_norm(self) -> float:
        """Return the epsilon of layer norms."""
        self.keys.skip("attention.layer_norm_rms_epsilon")
        return self.keys.epsilon("attention.layer_norm_epsilon")

    def usual_head_dim(self) -> None:
        """Raise :class:`EtkvError` unless heads times head size is the model's width. The family supports no other head
        size.
        """
        if self.head_dim * self.heads != self.hidden:
            name = "attention.key_length" if self.keys.has("attention.key_length") else "attention.head_count"
            raise self.keys.refuse(name, f"but in this architecture heads times head size is the width, {self.hidden}")

    def usual_scale(self) -> None:
        """Raise :class:`EtkvError` unless attention is scaled by one over the root of the head size."""
        usual = 1.0 / math.sqrt(self.head_dim)
        self.keys.only("attention.scale", 0.0, usual, reason=f"but this architecture scales by {usual:.6g}")

    def only_long_rope(self, rotary: Settings, family: str) -> None:
        """Raise :class:`EtkvError` for a ``rotary`` embedding with a scaling other than long RoPE."""
        keys = self.keys
        if rotary["rope_type"] not in ("default", "longrope"):
            name = "rope.scaling.factor" if keys.has("rope.scaling.factor") else "rope.scale_linear"
            raise keys.refuse(
                name, f"but transformers' {family} has no rotary embedding of type {rotary['rope_type']!r}"
            )

    def has_bias(self, name: str) -> bool:
        """Return whether the first layer has a bias ``name``, such as ``attn_q``."""
        return self.keys.has_tensor(f"blk.0.{name}.bias")

    def query_bias(self, name: str = "attention_bias") -> Settings:
        """Return the setting ``name``: whether queries have a bias."""
        return {name: self.has_bias("attn_q")}

    def attention_bias(self) -> Settings:
        """Return whether a projection of attention has a bias."""
        return {"attention_bias": any(self.has_bias(f"attn_{name}") for name in ("q", "k", "v", "output"))}

    def biases(self) -> Settings:
        """Return whether attention and feed-forward have biases, for families that allow both."""
        return self.attention_bias() | {
            "mlp_bias": any(self.has_bias(f"ffn_{name}") for name in ("gate", "up", "down"))
        }

    def one_window(self) -> Settings:
        """Return the window of all layers, or None."""
        return {"sliding_window": self.keys.integer("attention.sliding_window", 0) or None}

    def window(self, default_pattern: int) -> Settings:
        """Return the window, and the kind of each layer. By default every ``default_pattern``-th layer has no
        window.
        """
        window = self.keys.integer("attention.sliding_window", 0)
        pattern = self.keys.flags_or_integer("attention.sliding_window_pattern", default_pattern)
        if isinstance(pattern, int):
            pattern = [pattern != 0 and (layer + 1) % pattern != 0 for layer in range(self.layers)]
        if len(pattern) != self.layers:
            raise self.keys.refuse("attention.sliding_window_pattern", f"but the model has {self.layers} layers")
        kinds = ["sliding_attention" if window and slides else "full_attention" for slides in pattern]
        return {"sliding_window": window or None, "layer_types": kinds}

    def multipliers(self) -> Settings:
        """Return Granite's multipliers of embeddings, residuals, attention and logits."""
        real = self.keys.real
        return {
            "logits_scaling": real("logit_scale", 0.0) or 1.0,
            "residual_multiplier": real("residual_scale", 0.0) or 1.0,
            "embedding_multiplier": real("embedding_scale", 0.0) or 1.0,
            "attention_multiplier": real("attention.scale", 0.0) or 1.0 / math.sqrt(self.head_dim),
        }

    def routed_experts(self) -> Settings:
        """Return the settings of experts, by the names of DeepSeek's families: experts in groups, and shared experts.

        llama.cpp's number of the router's function must be that of a sigmoid (2), which is the default.
        """
        if (self.keys.integer("expert_gating_func", 2) or 2) != 2:
            raise self.keys.refuse("expert_gating_func", "but this architecture's router is a sigmoid (2)")
        return grouped_experts(self.keys)

    def experts(
        self,
        count_name: str = "num_experts",
        used_name: str = "num_experts_per_tok",
        *,
        normalized: bool,
        fixed: bool = True,
    ) -> Settings:
        """Return the number of experts, and the number of experts for each token, under the given names.

        ``normalized``: whether the weights of a token's experts add up to 1 by default. If ``fixed``, the family
        supports only the default. Otherwise the settings have ``norm_topk_prob``.
        """
        keys = self.keys
        keys.only("expert_gating_func", 0, 1, reason="but this architecture's router is a softmax (1)")
        keys.only("expert_weights_scale", 0.0, 1.0, reason="but this architecture does not scale its experts' weights")
        keys.only("expert_group_count", 0, 1, reason="but this architecture has no groups of experts")
        keys.only("expert_group_used_count", 0, 1, reason="but this architecture has no groups of experts")
        if fixed:
            keys.only("expert_weights_norm", normalized, reason=f"but this architecture has {normalized}")
        count, used = expert_counts(keys)
        rule = {} if fixed else {"norm_topk_prob": keys.flag("expert_weights_norm", normalized)}
        return {count_name: count, used_name: used} | rule


def reader(
    read: Callable[[Decoder], Family],
    *,
    usual_head_dim: bool = False,
    usual_scale: bool = True,
    is_hybrid: bool = False,
) -> Reader:
    """Return the reader of an architecture, from a function that returns the family of its :class:`Decoder`.

    If ``usual_head_dim`` or ``usual_scale`` is set, the reader first calls the method of that name.
    """

    def checked(keys: Keys) -> Family:
        decoder = Decoder(keys, is_hybrid=is_hybrid)
        if usual_head_dim:
            decoder.usual_head_dim()
        if usual_scale:
            decoder.usual_scale()
        return read(decoder)

    return checked


def embedding(keys: Keys) -> tuple[int, int]:
    """Return the size of the vocabulary and the width of the model. Both must match the shape of the embedding."""
    tensor = keys.file.tensors.get("token_embd.weight")
    if tensor is None:
        raise EtkvError(f"{keys.file.path} lacks tensor token_embd.weight")
    keys.only("vocab_size", tensor.shape[0], reason=f"but its embedding has {tensor.shape[0]} rows")
    width = tensor.shape[-1]
    hidden = keys.positive("embedding_length")
    keys.only("embedding_length", width, reason=f"but its embedding has rows of {width} elements")
    return tensor.shape[0], hidden


def layers(keys: Keys) -> int:
    """Return the number of layers, without the blocks after them that predict further tokens."""
    blocks, others = keys.positive("block_count"), keys.integer("nextn_predict_layers", 0)
    if others >= blocks:
        raise keys.refuse("nextn_predict_layers", f"but the file has {blocks} blocks")
    return blocks - others


def expert_counts(keys: Keys) -> tuple[int, int]:
    """Return the number of experts, and the number of experts for each token."""
    count, used = keys.positive("expert_count"), keys.positive("expert_used_count")
    if used > count:
        raise keys.refuse("expert_used_count", f"but there are {count} experts")
    return count, used


def expert_groups(keys: Keys) -> tuple[int, int]:
    """Return the number of groups of experts, and the number of groups from which a token's experts are chosen."""
    count, used = expert_counts(keys)
    groups = keys.integer("expert_group_count", 0) or 1
    if count % groups:
        raise keys.refuse("expert_group_count", f"which does not divide {count}, the number of experts")
    chosen = keys.integer("expert_group_used_count", 0) or 1
    if chosen > groups:
        raise keys.refuse("expert_group_used_count", f"but there are {groups} groups of experts")
    if used > chosen * (count // groups):
        raise keys.refuse("expert_used_count", f"but the groups of a token have {chosen * (count // groups)} experts")
    return groups, chosen


def routing(keys: Keys, n_shared: int = 0) -> Settings:
    """Return the settings of experts, by the names of DeepSeek's families, for any function of the router. ``n_shared``
    is the default number of shared experts.
    """
    (count, used), (groups, chosen) = expert_counts(keys), expert_groups(keys)
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count", n_shared),
        "n_group": groups,
        "topk_group": chosen,
        "routed_scaling_factor": keys.real("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


def grouped_experts(keys: Keys) -> Settings:
    """Return :func:`routing` of experts with one width, and the number of first layers without experts."""
    settings = routing(keys)
    width, shared = settings["moe_intermediate_size"], settings["n_shared_experts"]
    reason = f"but there are {shared} shared experts of width {width}"
    keys.only("expert_shared_feed_forward_length", shared * width, reason=reason)
    return settings | {"first_k_dense_replace": keys.integer("leading_dense_block_count", 0)}
