"""Exports and runs a Llama model as ExecuTorch does: XNNPACK, a cache in the graph, and ``llama::custom_sdpa``.

The exporter is :func:`executorch.examples.models.llama.export_llama_lib.export_llama`, which needs weights under
Meta's names. ``benches/cpu_peers.py`` runs this file to export a program, and imports it to run one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

CHUNK = 512
"""The maximum tokens of a call, as in etkv's programs."""

_NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
"""Names of a layer's weights: transformers -> Meta."""


def convert(source: Path, folder: Path) -> None:
    """Converts the GGUF file ``source`` to Meta's weights.pth and params.json.

    Meta's rotary embedding rotates neighbouring elements, and the rotary embedding of transformers rotates halves. So
    the rows of the query and key weights are reordered.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = model.config
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_dim": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
    }
    (folder / "params.json").write_text(json.dumps(params))

    weights = {}
    for name, weight in model.state_dict().items():
        stem = name.removeprefix("model.").removesuffix(".weight")
        if stem.startswith("layers."):
            _, number, stem = stem.split(".", 2)
            if stem in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = weight.view(-1, 2, config.head_dim // 2, config.hidden_size)
                weight = heads.transpose(1, 2).reshape(weight.shape)
            weights[f"layers.{number}.{_NAMES[stem]}.weight"] = weight
        else:
            stem = {"embed_tokens": "tok_embeddings", "lm_head": "output"}.get(stem, stem)
            weights[f"{stem}.weight"] = weight
    weights.setdefault("output.weight", weights["tok_embeddings.weight"])
    torch.save(weights, folder / "weights.pth")


def export(source: Path, program: Path, max_context: int, quantize: str | None) -> None:
    """Exports the GGUF file ``source`` as ``program``. The program computes only the last row of logits."""
    from executorch.examples.models.llama.export_llama_lib import export_llama
    from executorch.extension.llm.export.config.llm_config import LlmConfig, ModelType

    folder = program.parent
    if "8da4w" in str(folder) or "int8" in str(folder):
        raise SystemExit(f"ExecuTorch would treat the weights in {folder} as quantized, because of the folder's name")
    folder.mkdir(parents=True, exist_ok=True)
    convert(source, folder)
    config = LlmConfig()
    config.base.model_class = ModelType.smollm2
    config.base.checkpoint = str(folder / "weights.pth")
    config.base.params = str(folder / "params.json")
    config.base.metadata = "{}"
    config.model.use_kv_cache = True
    config.model.use_sdpa_with_kv_cache = True
    # A call accepts one token less than this number.
    config.export.max_seq_length = CHUNK + 1
    config.export.max_context_length = max_context
    config.backend.xnnpack.enabled = True
    config.backend.xnnpack.extended_ops = True
    if quantize:
        config.quantization.qmode = quantize
        config.quantization.group_size = 32
    # The file is renamed when it is complete, because an existing program is used without a check.
    partial = program.with_suffix(".partial.pte")
    config.export.output_name = str(partial)
    export_llama(config)
    partial.rename(program)
    (folder / "weights.pth").unlink()


def load(program: Path, n_threads: int) -> Callable[[list[int], int], int]:
    """Returns a function that runs a call of ``program``: it maps tokens and the first position to the greedy id."""
    import torch
    from executorch.extension.pybindings import portable_lib

    portable_lib._unsafe_reset_threadpool(n_threads)
    module = portable_lib._load_for_executorch(str(program))

    def step(tokens: list[int], position: int) -> int:
        (logits,) = module.forward((torch.tensor([tokens]), torch.tensor([position])))
        return int(logits.argmax())

    return step


def main() -> None:
    """Exports a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="MODEL.gguf")
    parser.add_argument("program", type=Path, metavar="MODEL.pte")
    parser.add_argument("--max-context", type=int, required=True, metavar="N", help="positions of the cache")
    parser.add_argument("--quantize", choices=["8da4w"], help="its linear layers' weights, in groups of 32")
    arguments = parser.parse_args()
    export(arguments.source, arguments.program, arguments.max_context, arguments.quantize)


if __name__ == "__main__":
    main()
