"""Architectures whose layers have attention and one feed-forward block, and Mixtral, which uses Llama's name."""

from __future__ import annotations

from etkv.export.gguf import rope
from etkv.export.gguf.decoder import Decoder, Reader, Settings
from etkv.export.gguf.keys import Keys


def _llama(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    settings = decoder.llama_like()
    decoder.usual_scale()
    window = keys.integer("attention.sliding_window", 0)
    if keys.integer("expert_count", 0):
        experts = decoder.experts(normalized=True)
        keys.only("expert_feed_forward_length", settings["intermediate_size"], reason="but experts differ in width")
        settings["num_local_experts"] = experts["num_experts"]
        settings["num_experts_per_tok"] = experts["num_experts_per_tok"]
        return "mixtral", settings | {"sliding_window": window or None}
    if window:
        return "mistral", settings | {"sliding_window": window}
    return "llama", settings | decoder.biases()


def _qwen2(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    return "qwen2", decoder.llama_like() | {"use_sliding_window": False, "sliding_window": None}


def _qwen3(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    settings = decoder.llama_like() | {"use_sliding_window": False, "sliding_window": None}
    return "qwen3", settings | {"attention_bias": decoder.biases()["attention_bias"]}


def _gemma(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    return "gemma", decoder.llama_like()


def _gemma_scale(decoder: Decoder, layers_of_27b: int) -> Settings:
    """Return ``query_pre_attn_scalar``: the head size, except in the family's 27B model."""
    keys = decoder.keys
    usual = decoder.hidden // decoder.heads if decoder.layers == layers_of_27b else decoder.head_dim
    scale = keys.real("attention.scale", 0.0) or usual**-0.5
    scalar = round(scale**-2) if scale > 0 else 0
    keys.only("attention.scale", 0.0, (scalar or usual) ** -0.5, reason="which is not 1 / the root of an integer")
    return {"query_pre_attn_scalar": scalar}


def _gemma2(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    settings = decoder.llama_like() | decoder.window(2) | _gemma_scale(decoder, 46)
    settings["attn_logit_softcapping"] = keys.real("attn_logit_softcapping", 50.0) or None
    settings["final_logit_softcapping"] = keys.real("final_logit_softcapping", 30.0) or None
    return "gemma2", settings


def _gemma3(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    settings = decoder.llama_like() | decoder.window(6) | _gemma_scale(decoder, 62)
    # Layers with a window have another rotary base, and no scaling.
    local = {"rope_type": "default", "rope_theta": keys.positive_real("rope.freq_base_swa", 10000.0)}
    settings["rope_parameters"] = {"full_attention": settings["rope_parameters"], "sliding_attention": local}
    settings["final_logit_softcapping"] = keys.real("final_logit_softcapping", 0.0) or None
    return "gemma3_text", settings


def _phi2(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_head_dim()
    decoder.usual_scale()
    rotary = rope.read(keys, decoder.head_dim, partial=True)
    return "phi", decoder.common | {"layer_norm_eps": decoder.layer_norm(), "rope_parameters": rotary}


def _phi3(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_head_dim()
    decoder.usual_scale()
    settings = decoder.llama_like(partial=True)
    rotary = settings["rope_parameters"]
    decoder.only_long_rope(rotary, "Phi-3")
    original = rotary.get("original_max_position_embeddings", decoder.context)
    settings["original_max_position_embeddings"] = original
    return "phi3", settings | {"sliding_window": keys.integer("attention.sliding_window", 0) or None}


def _apertus(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_head_dim()
    decoder.usual_scale()
    settings = decoder.llama_like()
    del settings["head_dim"]
    for part in ("alpha_p", "alpha_n", "beta", "eps"):
        # The weights of the activation. The file has no tensors for them.
        keys.reals_of_layers(f"xielu.{part}", decoder.layers)
    return "apertus", settings | {"attention_bias": decoder.biases()["attention_bias"]}


def _starcoder2(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_head_dim()
    decoder.usual_scale()
    settings = decoder.common | {"norm_epsilon": decoder.layer_norm(), "use_bias": decoder.has_bias("attn_q")}
    settings["rope_parameters"] = rope.read(keys, decoder.head_dim)
    return "starcoder2", settings | {"sliding_window": keys.integer("attention.sliding_window", 0) or None}


def _stablelm(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_head_dim()
    decoder.usual_scale()
    # Converters write true if a configuration lacks this key. llama.cpp ignores the key and checks the tensors.
    keys.skip("use_parallel_residual")
    settings = decoder.common | {
        "layer_norm_eps": decoder.layer_norm(),
        "use_qkv_bias": decoder.has_bias("attn_q"),
        "qk_layernorm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        "use_parallel_residual": not keys.has_tensor("blk.0.ffn_norm.weight"),
    }
    return "stablelm", settings | {"rope_parameters": rope.read(keys, decoder.head_dim, partial=True)}


def _gpt2(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_head_dim()
    decoder.usual_scale()
    settings = decoder.common
    del settings["num_key_value_heads"]
    keys.only(
        "attention.head_count_kv",
        decoder.heads,
        reason="but this architecture has equal numbers of heads of queries and keys",
    )
    settings["n_inner"] = settings.pop("intermediate_size")
    return "gpt2", settings | {"layer_norm_epsilon": decoder.layer_norm()}


def _gptneox(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_head_dim()
    decoder.usual_scale()
    settings = decoder.common
    del settings["num_key_value_heads"]
    keys.only(
        "attention.head_count_kv",
        decoder.heads,
        reason="but this architecture has equal numbers of heads of queries and keys",
    )
    settings |= {
        "layer_norm_eps": decoder.layer_norm(),
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "attention_bias": decoder.has_bias("attn_qkv"),
    }
    return "gpt_neox", settings | {"rope_parameters": rope.read(keys, decoder.head_dim, partial=True)}


def _nemotron(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    settings = decoder.common | decoder.biases() | {"norm_eps": decoder.layer_norm(), "head_dim": decoder.head_dim}
    return "nemotron", settings | {"rope_parameters": rope.read(keys, decoder.head_dim, partial=True)}


def _granite(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_head_dim()
    settings = decoder.llama_like() | decoder.biases() | decoder.multipliers()
    return "granite", settings


def _smollm3(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    settings = decoder.llama_like() | decoder.biases()
    # Every fourth layer has no rotary embedding. This is fixed in llama.cpp, and there is no key for it.
    return "smollm3", settings | {"no_rope_layer_interval": 4, "use_sliding_window": False, "sliding_window": None}


def _olmo2(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    settings = decoder.llama_like() | {"attention_bias": decoder.biases()["attention_bias"]}
    if not keys.has("attention.sliding_window"):
        return "olmo2", settings
    if settings["rope_parameters"]["rope_type"] != "default":
        raise keys.refuse(
            "attention.sliding_window", "and scaled rotary embeddings; the exporter supports only one of the two"
        )
    return "olmo3", settings | decoder.window(4)


def _olmo(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_head_dim()
    decoder.usual_scale()
    keys.only("attention.layer_norm_epsilon", 1e-5, reason="but this architecture's norms add 1e-05")
    settings = decoder.common | {"attention_bias": decoder.biases()["attention_bias"]}
    settings["clip_qkv"] = keys.real("attention.clamp_kqv", 0.0) or None
    return "olmo", settings | {"rope_parameters": rope.read(keys, decoder.head_dim)}


def _exaone4(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    return "exaone4", decoder.llama_like() | decoder.window(4)


def _seed_oss(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    biases = {"attention_bias": decoder.has_bias("attn_q"), "attention_out_bias": decoder.has_bias("attn_output")}
    return "seed_oss", decoder.llama_like() | biases | {"mlp_bias": decoder.biases()["mlp_bias"]}


def _arcee(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    return "arcee", decoder.llama_like() | decoder.biases()


def _ernie4_5(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    return "ernie4_5", decoder.llama_like() | {"use_bias": decoder.has_bias("attn_q")}


def _mistral3(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    settings = decoder.llama_like() | {"sliding_window": keys.integer("attention.sliding_window", 0) or None}
    rotary = settings["rope_parameters"]
    # Queries are scaled by the logarithm of their position divided by the original context length.
    rotary["llama_4_scaling_beta"] = keys.real("attention.temperature_scale", 0.0)
    length = rotary.setdefault("original_max_position_embeddings", decoder.context)
    keys.only(
        "attention.temperature_length",
        length,
        reason=f"but in this architecture it equals the original context length, {length}",
    )
    return "ministral3", settings


def _command_r(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_head_dim()
    decoder.usual_scale()
    settings = decoder.common | {"layer_norm_eps": decoder.layer_norm(), "logit_scale": keys.real("logit_scale")}
    settings["use_qk_norm"] = keys.has_tensor("blk.0.attn_q_norm.weight")
    return "cohere", settings | {"rope_parameters": rope.read(keys, decoder.head_dim)}


def _cohere2(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    settings = decoder.common | {"layer_norm_eps": decoder.layer_norm(), "logit_scale": keys.real("logit_scale")}
    settings |= decoder.window(4) | {"head_dim": decoder.head_dim}
    return "cohere2", settings | {"rope_parameters": rope.read(keys, decoder.head_dim)}


def _glm4(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    # Sections of frequencies are for images. In a text, all sections have the same position.
    keys.skip("rope.dimension_sections")
    return "glm4", decoder.llama_like(partial=True) | {"attention_bias": decoder.has_bias("attn_q")}


def _chatglm(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    return "glm", decoder.llama_like(partial=True) | {"attention_bias": decoder.has_bias("attn_q")}


def _hunyuan(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    return "hunyuan_v1_dense", decoder.llama_like() | {"attention_bias": decoder.has_bias("attn_q")}


def _jais2(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_scale()
    settings = decoder.common | decoder.biases() | {"layer_norm_eps": decoder.layer_norm()}
    return "jais2", settings | {"head_dim": decoder.head_dim, "rope_parameters": rope.read(keys, decoder.head_dim)}


def _starcoder(keys: Keys) -> tuple[str, Settings]:
    decoder = Decoder(keys)
    decoder.usual_head_dim()
    decoder.usual_scale()
    settings = decoder.common
    kv_heads = settings.pop("num_key_value_heads")
    if kv_heads not in (1, decoder.heads):
        raise keys.refuse("attention.head_count_kv", f"but this architecture has 1 or {decoder.heads}")
    settings["n_inner"] = settings.pop("intermediate_size")
    settings |= {"layer_norm_epsilon": decoder.layer_norm(), "multi_query": kv_heads == 1}
    return "gpt_bigcode", settings


READERS: dict[str, Reader] = {
    "apertus": _apertus,
    "arcee": _arcee,
    "chatglm": _chatglm,
    "cohere2": _cohere2,
    "command-r": _command_r,
    "ernie4_5": _ernie4_5,
    "exaone4": _exaone4,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4": _glm4,
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "granite": _granite,
    "hunyuan-dense": _hunyuan,
    "jais2": _jais2,
    "llama": _llama,
    "mistral3": _mistral3,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "phi2": _phi2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder": _starcoder,
    "starcoder2": _starcoder2,
}
