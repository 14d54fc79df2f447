"""Architectures whose layers have attention and one feed-forward block, and Mixtral, which uses Llama's name."""

from __future__ import annotations

from etkv.export.gguf.decoder import NO_WINDOW, Decoder, Family, Reader, Settings, reader


def _llama(decoder: Decoder) -> Family:
    settings, window = decoder.llama_like(), decoder.one_window()
    if decoder.keys.integer("expert_count", 0):
        experts = decoder.experts("num_local_experts", normalized=True)
        width = settings["intermediate_size"]
        decoder.keys.only("expert_feed_forward_length", width, reason="but experts differ in width")
        return "mixtral", settings | experts | window
    if window["sliding_window"]:
        return "mistral", settings | window
    return "llama", settings | decoder.biases()


def _gemma_scale(decoder: Decoder, layers_of_27b: int) -> Settings:
    """Return ``query_pre_attn_scalar``: the head size, except in the family's 27B model."""
    keys = decoder.keys
    usual = decoder.hidden // decoder.heads if decoder.layers == layers_of_27b else decoder.head_dim
    scale = keys.real("attention.scale", 0.0) or usual**-0.5
    scalar = round(scale**-2) if scale > 0 else 0
    keys.only("attention.scale", 0.0, (scalar or usual) ** -0.5, reason="which is not 1 / the root of an integer")
    return {"query_pre_attn_scalar": scalar}


def _gemma2(decoder: Decoder) -> Family:
    settings = decoder.llama_like() | decoder.window(2) | _gemma_scale(decoder, 46)
    settings["attn_logit_softcapping"] = decoder.keys.real("attn_logit_softcapping", 50.0) or None
    settings["final_logit_softcapping"] = decoder.keys.real("final_logit_softcapping", 30.0) or None
    return "gemma2", settings


def _gemma3(decoder: Decoder) -> Family:
    keys, settings = decoder.keys, decoder.llama_like() | decoder.window(6) | _gemma_scale(decoder, 62)
    # Layers with a window have another rotary base, and no scaling.
    local = {"rope_type": "default", "rope_theta": keys.positive_real("rope.freq_base_swa", 10000.0)}
    settings["rope_parameters"] = {"full_attention": settings["rope_parameters"], "sliding_attention": local}
    settings["final_logit_softcapping"] = keys.real("final_logit_softcapping", 0.0) or None
    return "gemma3_text", settings


def _phi2(decoder: Decoder) -> Family:
    rotary = decoder.rotary(partial=True)
    return "phi", decoder.common | {"layer_norm_eps": decoder.layer_norm()} | rotary


def _phi3(decoder: Decoder) -> Family:
    settings = decoder.llama_like(partial=True)
    rotary = settings["rope_parameters"]
    decoder.only_long_rope(rotary, "Phi-3")
    original = rotary.get("original_max_position_embeddings", decoder.context)
    settings["original_max_position_embeddings"] = original
    return "phi3", settings | decoder.one_window()


def _apertus(decoder: Decoder) -> Family:
    settings = decoder.llama_like()
    del settings["head_dim"]
    for part in ("alpha_p", "alpha_n", "beta", "eps"):
        # The weights of the activation. The file has no tensors for them.
        decoder.keys.reals_of_layers(f"xielu.{part}", decoder.layers)
    return "apertus", settings | decoder.attention_bias()


def _starcoder2(decoder: Decoder) -> Family:
    settings = decoder.common | {"norm_epsilon": decoder.layer_norm()} | decoder.query_bias("use_bias")
    return "starcoder2", settings | decoder.rotary() | decoder.one_window()


def _stablelm(decoder: Decoder) -> Family:
    keys = decoder.keys
    # Converters write true if a configuration lacks this key. llama.cpp ignores the key and checks the tensors.
    keys.skip("use_parallel_residual")
    settings = decoder.common | {
        "layer_norm_eps": decoder.layer_norm(),
        "use_qkv_bias": decoder.has_bias("attn_q"),
        "qk_layernorm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        "use_parallel_residual": not keys.has_tensor("blk.0.ffn_norm.weight"),
    }
    return "stablelm", settings | decoder.rotary(partial=True)


def _with_equal_heads(decoder: Decoder) -> Settings:
    """Return the settings of a family that has no number of heads of keys."""
    settings = decoder.common
    del settings["num_key_value_heads"]
    reason = "but this architecture has equal numbers of heads of queries and keys"
    decoder.keys.only("attention.head_count_kv", decoder.heads, reason=reason)
    return settings


def _gpt2(decoder: Decoder) -> Family:
    settings = _with_equal_heads(decoder)
    settings["n_inner"] = settings.pop("intermediate_size")
    return "gpt2", settings | {"layer_norm_epsilon": decoder.layer_norm()}


def _gptneox(decoder: Decoder) -> Family:
    settings = _with_equal_heads(decoder) | {
        "layer_norm_eps": decoder.layer_norm(),
        "use_parallel_residual": decoder.keys.flag("use_parallel_residual", True),
        "attention_bias": decoder.has_bias("attn_qkv"),
    }
    return "gpt_neox", settings | decoder.rotary(partial=True)


def _nemotron(decoder: Decoder) -> Family:
    settings = decoder.common | decoder.biases() | {"norm_eps": decoder.layer_norm(), "head_dim": decoder.head_dim}
    return "nemotron", settings | decoder.rotary(partial=True)


def _smollm3(decoder: Decoder) -> Family:
    # Every fourth layer has no rotary embedding. This is fixed in llama.cpp, and there is no key for it.
    return "smollm3", decoder.llama_like() | decoder.biases() | NO_WINDOW | {"no_rope_layer_interval": 4}


def _olmo2(decoder: Decoder) -> Family:
    settings = decoder.llama_like() | decoder.attention_bias()
    if not decoder.keys.has("attention.sliding_window"):
        return "olmo2", settings
    if settings["rope_parameters"]["rope_type"] != "default":
        raise decoder.keys.refuse(
            "attention.sliding_window", "and scaled rotary embeddings; the exporter supports only one of the two"
        )
    return "olmo3", settings | decoder.window(4)


def _olmo(decoder: Decoder) -> Family:
    keys = decoder.keys
    keys.only("attention.layer_norm_epsilon", 1e-5, reason="but this architecture's norms add 1e-05")
    settings = decoder.common | decoder.attention_bias()
    settings["clip_qkv"] = keys.real("attention.clamp_kqv", 0.0) or None
    return "olmo", settings | decoder.rotary()


def _seed_oss(decoder: Decoder) -> Family:
    biases = decoder.biases() | decoder.query_bias() | {"attention_out_bias": decoder.has_bias("attn_output")}
    return "seed_oss", decoder.llama_like() | biases


def _mistral3(decoder: Decoder) -> Family:
    keys, settings = decoder.keys, decoder.llama_like() | decoder.one_window()
    rotary = settings["rope_parameters"]
    # Queries are scaled by the logarithm of their position divided by the original context length.
    rotary["llama_4_scaling_beta"] = keys.real("attention.temperature_scale", 0.0)
    length = rotary.setdefault("original_max_position_embeddings", decoder.context)
    reason = f"but in this architecture it equals the original context length, {length}"
    keys.only("attention.temperature_length", length, reason=reason)
    return "ministral3", settings


def _cohere(decoder: Decoder) -> Settings:
    """Return the settings that both families of Cohere share."""
    scale = {"layer_norm_eps": decoder.layer_norm(), "logit_scale": decoder.keys.real("logit_scale")}
    return decoder.common | scale | decoder.rotary()


def _command_r(decoder: Decoder) -> Family:
    return "cohere", _cohere(decoder) | {"use_qk_norm": decoder.keys.has_tensor("blk.0.attn_q_norm.weight")}


def _cohere2(decoder: Decoder) -> Family:
    return "cohere2", _cohere(decoder) | decoder.window(4) | {"head_dim": decoder.head_dim}


def _glm4(decoder: Decoder) -> Family:
    # Sections of frequencies are for images. In a text, all sections have the same position.
    decoder.keys.skip("rope.dimension_sections")
    return "glm4", decoder.llama_like(partial=True) | decoder.query_bias()


def _jais2(decoder: Decoder) -> Family:
    settings = decoder.common | decoder.biases() | {"layer_norm_eps": decoder.layer_norm()}
    return "jais2", settings | {"head_dim": decoder.head_dim} | decoder.rotary()


def _starcoder(decoder: Decoder) -> Family:
    settings = decoder.common
    kv_heads = settings.pop("num_key_value_heads")
    if kv_heads not in (1, decoder.heads):
        raise decoder.keys.refuse("attention.head_count_kv", f"but this architecture has 1 or {decoder.heads}")
    settings["n_inner"] = settings.pop("intermediate_size")
    return "gpt_bigcode", settings | {"layer_norm_epsilon": decoder.layer_norm(), "multi_query": kv_heads == 1}


READERS: dict[str, Reader] = {
    "apertus": reader(_apertus, usual_head_dim=True),
    "arcee": reader(lambda decoder: ("arcee", decoder.llama_like() | decoder.biases())),
    "chatglm": reader(lambda decoder: ("glm", decoder.llama_like(partial=True) | decoder.query_bias())),
    "cohere2": reader(_cohere2),
    "command-r": reader(_command_r, usual_head_dim=True),
    "ernie4_5": reader(lambda decoder: ("ernie4_5", decoder.llama_like() | decoder.query_bias("use_bias"))),
    "exaone4": reader(lambda decoder: ("exaone4", decoder.llama_like() | decoder.window(4))),
    "gemma": reader(lambda decoder: ("gemma", decoder.llama_like())),
    "gemma2": reader(_gemma2, usual_scale=False),
    "gemma3": reader(_gemma3, usual_scale=False),
    "glm4": reader(_glm4),
    "gpt2": reader(_gpt2, usual_head_dim=True),
    "gptneox": reader(_gptneox, usual_head_dim=True),
    "granite": reader(
        lambda decoder: ("granite", decoder.llama_like() | decoder.biases() | decoder.multipliers()),
        usual_head_dim=True,
        usual_scale=False,
    ),
    "hunyuan-dense": reader(lambda decoder: ("hunyuan_v1_dense", decoder.llama_like() | decoder.query_bias())),
    "jais2": reader(_jais2),
    "llama": reader(_llama),
    "mistral3": reader(_mistral3),
    "nemotron": reader(_nemotron),
    "olmo": reader(_olmo, usual_head_dim=True),
    "olmo2": reader(_olmo2),
    "phi2": reader(_phi2, usual_head_dim=True),
    "phi3": reader(_phi3, usual_head_dim=True),
    "qwen2": reader(lambda decoder: ("qwen2", decoder.llama_like() | NO_WINDOW)),
    "qwen3": reader(lambda decoder: ("qwen3", decoder.llama_like() | NO_WINDOW | decoder.attention_bias())),
    "seed_oss": reader(_seed_oss),
    "smollm3": reader(_smollm3),
    "stablelm": reader(_stablelm, usual_head_dim=True),
    "starcoder": reader(_starcoder, usual_head_dim=True),
    "starcoder2": reader(_starcoder2, usual_head_dim=True),
}
