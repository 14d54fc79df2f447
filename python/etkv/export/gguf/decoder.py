"""Keys that all decoders in GGUF files share."""

from __future__ import annotations

import math
from typing import Any

from etkv.errors import EtkvError
from etkv.export.gguf import rope
from etkv.export.gguf.keys import Keys

Settings = dict[str, Any]
"""Arguments of a transformers configuration."""


class Decoder:
    """The settings that all decoders share: sizes, the output's weight, and which projections have biases."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        embedding = keys.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise EtkvError(f"{keys.file.path} lacks tensor token_embd.weight")
        self.vocab_size = embedding.shape[0]
        keys.only("vocab_size", self.vocab_size, reason=f"and its embedding has {self.vocab_size} rows")
        width = embedding.shape[-1]
        self.hidden = keys.positive("embedding_length")
        keys.only("embedding_length", width, reason=f"and its embedding has rows of {width} numbers")
        self.layers = keys.positive("block_count")
        self.heads = keys.positive("attention.head_count")
        self.kv_heads = keys.positive("attention.head_count_kv", self.heads)
        self.context = keys.positive("context_length")
        stored = self._stored_head_dim()
        self.head_dim = keys.positive("attention.key_length", stored)
        if "blk.0.attn_q.weight" in keys.file.tensors:
            keys.only("attention.key_length", stored, reason=f"and its queries have heads of {stored} numbers")
        keys.only(
            "attention.value_length",
            self.head_dim,
            reason=f"and {keys.key('attention.key_length')} is {self.head_dim}; they have to be alike",
        )

    def _stored_head_dim(self) -> int:
        """Return the size of a head, from the shape of the first layer's queries or from the model's width."""
        query = self.keys.file.tensors.get("blk.0.attn_q.weight")
        rows = self.hidden if query is None else query.shape[0]
        if rows % self.heads:
            raise self.keys.refuse("attention.head_count", f"which does not divide {rows}, the length of its queries")
        return rows // self.heads

    @property
    def common(self) -> Settings:
        """Return the settings with a name that transformers' decoders share."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
            "intermediate_size": self.keys.positive("feed_forward_length"),
            # llama.cpp uses the embedding if the output has no weight of its own.
            "tie_word_embeddings": not self.keys.has_tensor("output.weight"),
        }

    def llama_like(self, *, partial: bool = False) -> Settings:
        """Return :attr:`common`, an RMS norm's epsilon, the head's size and the rotary embedding."""
        # Converters also write a configuration's other epsilon, which no RMS norm reads.
        self.keys.skip("attention.layer_norm_epsilon")
        return self.common | {
            "rms_norm_eps": self.keys.real("attention.layer_norm_rms_epsilon"),
            "head_dim": self.head_dim,
            "rope_parameters": rope.read(self.keys, self.head_dim, partial=partial),
        }

    def layer_norm(self) -> float:
        """Return the epsilon of layer norms."""
        self.keys.skip("attention.layer_norm_rms_epsilon")
        return self.keys.real("attention.layer_norm_epsilon")

    def usual_head_dim(self) -> None:
        """Raise :class:`EtkvError` unless the heads together have the model's width: the family has no other head
        size.
        """
        if self.head_dim * self.heads != self.hidden:
            name = "attention.key_length" if self.keys.has("attention.key_length") else "attention.head_count"
            raise self.keys.refuse(name, f"and heads of this architecture make up its width of {self.hidden} numbers")

    def usual_scale(self) -> None:
        """Raise :class:`EtkvError` if attention is scaled by anything but the root of the head's size."""
        usual = 1.0 / math.sqrt(self.head_dim)
        self.keys.only("attention.scale", 0.0, usual, reason=f"and this architecture scales by {usual:.6g}")

    def has_bias(self, name: str) -> bool:
        """Return whether the first layer has a bias ``name``, such as ``attn_q``."""
        return self.keys.has_tensor(f"blk.0.{name}.bias")

    def biases(self) -> Settings:
        """Return whether attention and feed-forward have biases, for families that allow both."""
        return {
            "attention_bias": any(self.has_bias(f"attn_{name}") for name in ("q", "k", "v", "output")),
            "mlp_bias": any(self.has_bias(f"ffn_{name}") for name in ("gate", "up", "down")),
        }

    def window(self, default_pattern: int) -> Settings:
        """Return the window, and the kind of each layer. By default every ``default_pattern``-th layer has no
        window.
        """
        window = self.keys.integer("attention.sliding_window", 0)
        pattern = self.keys.flags_or_integer("attention.sliding_window_pattern", default_pattern)
        if isinstance(pattern, int):
            pattern = [pattern != 0 and (layer + 1) % pattern != 0 for layer in range(self.layers)]
        if len(pattern) != self.layers:
            raise self.keys.refuse("attention.sliding_window_pattern", f"and the model has {self.layers} layers")
        kinds = ["sliding_attention" if window and slides else "full_attention" for slides in pattern]
        return {"sliding_window": window or None, "layer_types": kinds}

    def experts(self, *, normalized: bool, fixed: bool = True) -> Settings:
        """Return the number of experts and how many a token takes.

        ``normalized`` is the default of whether the weights of a token's experts add up to 1. If it is ``fixed``, the
        family has no other rule; otherwise the settings have ``norm_topk_prob``.
        """
        keys = self.keys
        keys.only("expert_gating_func", 0, 1, reason="and this architecture's router is a softmax (1)")
        keys.only("expert_weights_scale", 0.0, 1.0, reason="and this architecture does not scale its experts' weights")
        keys.only("expert_group_count", 0, 1, reason="and this architecture has no groups of experts")
        keys.only("expert_group_used_count", 0, 1, reason="and this architecture has no groups of experts")
        if fixed:
            keys.only("expert_weights_norm", normalized, reason=f"and this architecture takes {normalized}")
        count, used = keys.positive("expert_count"), keys.positive("expert_used_count")
        if used > count:
            raise keys.refuse("expert_used_count", f"and there are {count} experts")
        rule = {} if fixed else {"norm_topk_prob": keys.flag("expert_weights_norm", normalized)}
        return {"num_experts": count, "num_experts_per_tok": used} | rule
