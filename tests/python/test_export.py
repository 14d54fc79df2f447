"""Exports of tiny models: contents of the program, other files, refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import reference
import tiny_models
from etkv import describe_program, pte
from etkv.errors import EtkvError
from etkv.export import ExportRequest, attention, companions, cpu, export_program, is_current, limits, mlx, source
from reference import Program, Variant

VARIANTS = reference.chosen(
    [
        *(Variant(name) for name in tiny_models.CONFIGS),
        *(Variant("tiny-llama", dtype, quantize) for dtype in ("f16", "bf16") for quantize in (None, "4w", "8w")),
        Variant("tiny-llama", "f32", "4w"),
        Variant("tiny-llama", "f32", "8w"),
        Variant("tiny-qwen2", "bf16", "4w"),
        Variant("tiny-gemma3", "f32", "4w"),
        Variant("tiny-qwen3-untied", "f32", "4w"),
        Variant("tiny-qwen3-untied", "f32", "8w"),
    ]
)


@pytest.fixture(scope="module")
def programs() -> dict[Variant, Program]:
    return reference.programs(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_program(programs, variant):
    file, folder = programs[variant].path, programs[variant].path.parent
    dtype, quantize = reference.DTYPES[variant.dtype], variant.quantize
    config = json.loads((folder / "hf" / "config.json").read_text())
    layers = config["num_hidden_layers"]
    # Without layer types, every layer has the configuration's window.
    window = config.get("sliding_window") or 0
    kinds = config.get("layer_types") or ["sliding_attention" if window else "full_attention"] * layers
    windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
    head_dim = config.get("head_dim") or 16

    called = pte.PteFile(file).delegates
    assert called["forward"] == ["MLXBackend"]
    assert pte.PteFile(file).operators("forward") == []
    assert pte.constant_methods(file) == {
        "get_n_caches": layers,
        "get_kv_heads": [config["num_key_value_heads"]] * layers,
        "get_head_dims": [head_dim] * layers,
        "get_windows": windows,
        "get_prefill_chunk_size": 64,
        "get_max_ctx_len": tiny_models.CONTEXT,
        "get_logits_rows": 0,
        "get_bos_id": tiny_models.BOS,
        "get_eos_ids": [tiny_models.EOS],
        "kv_cache.schema_version": 1,
        "kv_cache.n_layers": layers,
        "kv_cache.n_kv_heads": config["num_key_value_heads"],
        "kv_cache.head_dim": head_dim,
        "kv_cache.v_head_dim": head_dim,
        "kv_cache.window": windows[0] if len(set(windows)) == 1 else windows,
        "kv_cache.sinks": 0,
        "kv_cache.dtype": variant.dtype,
    }

    program = describe_program(file)
    ops = [instruction["operation"] for instruction in program["instructions"]]
    assert program["attention_layers"] == [{"layer": layer, "calls": 1} for layer in range(layers)]
    # Phi has no gate. Phi-3 joins several products.
    products = {"phi": 6, "phi3": 4}.get(config["model_type"], 7) * layers + 1
    # Experts have two products of another kind, and their router is not quantized.
    mixtures = ops.count("GatherQmm" if quantize else "GatherMm") // 2
    assert mixtures == {"mixtral": layers, "qwen3_moe": layers - 1}.get(config["model_type"], 0)
    products -= 3 * mixtures
    assert ops.count("Addmm") == mixtures + (0 if quantize else products)
    assert ops.count("QuantizedMatmul") == (products if quantize else 0)
    assert ops.count("Dequantize") == (1 if quantize else 0)
    assert program["mutable_buffers"] == 0
    assert len(program["inputs"]) == 2
    logits = program["outputs"][0]
    assert logits["dtype"] == dtype
    assert (logits["shape"][0], logits["shape"][-1]) == (1, tiny_models.VOCABULARY)


def test_tied_weights_are_kept_once(exported):
    ends = tuple(f"{module}.{name}" for module in ("embed_tokens", "lm_head") for name in ("weight", "packed"))

    def tables(*variant):
        tensors = describe_program(exported(*variant) / "model.pte")["constants"]["tensors"]
        return [tensor["name"].split(".")[-1] for tensor in tensors if tensor["name"].endswith(ends)]

    assert tables("tiny-qwen3") == ["weight"]
    assert tables("tiny-llama-untied", "f32", "4w") == ["packed", "packed"]


def test_companions(exported, tiny):
    folder = exported("tiny-llama")
    assert {file.name for file in folder.iterdir()} == {
        "model.pte",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "export.json",
        "hf",
    }
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [tiny_models.EOS]
    template = (tiny("tiny-llama") / "chat_template.jinja").read_text()
    assert (folder / "chat_template.jinja").read_text() == template

    from tokenizers import Tokenizer

    text = "<|im_start|>user\nhé 12<|im_end|>\n"
    expected = [tiny_models.IM_START, *b"user\n", *"hé 12".encode(), tiny_models.EOS, *b"\n"]
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids == expected


def test_manifest(exported, tiny):
    manifest = json.loads((exported("tiny-llama") / "export.json").read_text())
    assert manifest["program"] == "model.pte"
    assert manifest["bytes"] == (exported("tiny-llama") / "model.pte").stat().st_size
    assert manifest["request"]["model"] == str(tiny("tiny-llama"))
    assert manifest["request"]["dtype"] == "float32"
    assert manifest["limits"]["max_context"] == tiny_models.CONTEXT
    assert manifest["versions"]["executorch"]


def test_is_current(exported, tiny, tmp_path):
    shutil.copytree(exported("tiny-llama"), tmp_path / "out")
    model = shutil.copytree(tiny("tiny-llama"), tmp_path / "model")

    def current(**changes) -> bool:
        arguments = {"model": tiny("tiny-llama"), "prefill_chunk": 64, "keep_hf": exported("tiny-llama") / "hf"}
        return is_current(ExportRequest(output=tmp_path / "out" / "model.pte", **{**arguments, **changes}))

    assert current()
    assert not current(dtype="bfloat16")
    assert not current(quantize="4w")
    assert not current(max_context=128)
    assert not current(layers=1)
    assert not current(logits="last")
    assert not current(tap_layers=(0,))
    assert not current(model=model), "another model"
    (tmp_path / "out" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert not current(), "a file beside the program is gone"
    (tmp_path / "tokenizer.json").rename(tmp_path / "out" / "tokenizer.json")
    assert current()
    with (tmp_path / "out" / "model.pte").open("ab") as file:
        file.write(b"x")
    assert not current(), "the program is not the one that was written"
    (tmp_path / "out" / "export.json").write_text("[]")
    assert not current()


def test_tapped_layers_are_current(exported, tiny):
    folder = exported("tiny-llama", tap_layers=(1, 0))
    request = ExportRequest(tiny("tiny-llama"), folder / "model.pte", prefill_chunk=64, keep_hf=folder / "hf")
    assert is_current(dataclasses.replace(request, tap_layers=(1, 0)))
    assert not is_current(dataclasses.replace(request, tap_layers=(0, 1)))
    assert not is_current(request)


def test_a_changed_model_is_not_current(exported, tiny, tmp_path):
    model = shutil.copytree(tiny("tiny-llama"), tmp_path / "model")
    out = shutil.copytree(exported("tiny-llama"), tmp_path / "out")
    manifest = json.loads((out / "export.json").read_text())
    manifest["request"] |= {"model": str(model), "keep_hf": None}
    (out / "export.json").write_text(json.dumps(manifest))
    request = ExportRequest(model=model, output=out / "model.pte", prefill_chunk=64)
    assert is_current(request)
    (model / "model.safetensors").touch()
    assert not is_current(request)


def test_a_failed_export_leaves_the_previous_one(exported, tiny, tmp_path, monkeypatch):
    out = shutil.copytree(exported("tiny-llama"), tmp_path / "out")
    before = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}

    def full(folder, tokenizer, generation):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("etkv.export.companions.write", full)
    with pytest.raises(EtkvError, match="cannot be written: No space left on device"):
        export_program(ExportRequest(model=tiny("tiny-llama"), output=out / "model.pte", dtype="float16", layers=1))
    assert {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()} == before
    assert {file.name for file in out.iterdir()} == {*before, "hf"}


@pytest.mark.parametrize(
    "where", ["etkv.export.lowering.lower", pytest.param("etkv.export.companions.write", marks=pytest.mark.long)]
)
def test_a_failed_export_leaves_the_weights_of_the_previous_one(exported, tiny, tmp_path, monkeypatch, where):
    out = shutil.copytree(exported("tiny-llama"), tmp_path / "out")
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(where, fail)
    request = ExportRequest(tiny("tiny-llama"), out / "model.pte", dtype="float16", keep_hf=out / "hf")
    with pytest.raises((EtkvError, OSError), match="No space left on device"):
        export_program(request)
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    assert [folder for folder in out.rglob("*") if folder.is_dir()] == [out / "hf"]


@pytest.mark.parametrize(
    "beside",
    [pytest.param(False, id="one folder for all", marks=pytest.mark.long), pytest.param(True, id="beside a GGUF file")],
)
def test_files_in_one_folder_are_current(tiny, tiny_llama_gguf, tmp_path, beside):
    """If program, weights and a GGUF model share a folder, nothing is exported again, and no input is lost."""
    model = shutil.copy(tiny_llama_gguf, tmp_path) if beside else tiny("tiny-llama")
    source_files = {file: file.read_bytes() for file in source.find(Path(model)).files()}
    request = ExportRequest(Path(model), tmp_path / "model.pte", keep_hf=tmp_path, layers=1)
    assert not is_current(request)
    export_program(request)
    first = request.output.read_bytes()
    assert is_current(request)
    assert {file: file.read_bytes() for file in source_files} == source_files
    # The new files in the folder of the GGUF file do not change the model.
    export_program(request)
    assert is_current(request)
    assert request.output.read_bytes() == first


@pytest.mark.long
def test_companions_of_an_earlier_model_go(tiny, tmp_path):
    model = shutil.copytree(tiny("tiny-llama"), tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "chat_template.jinja").write_text("of another model")
    export_program(ExportRequest(model=model, output=tmp_path / "out" / "model.pte", layers=1))
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_every_end_token_is_known(tiny, tmp_path):
    """Ids of the generation settings come first, then those of the configuration and the tokenizer."""
    folder = shutil.copytree(tiny("tiny-llama"), tmp_path / "model")
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [tiny_models.BOS, 300], "temperature": 0.6, "do_sample": True}))
    origin = source.find(folder)
    config = source.read_config(origin)
    model = source.read_model(origin, config, "float32")
    generation = source.generation_settings(origin, model, source.read_tokenizer(origin))
    assert generation["eos_token_id"] == [tiny_models.BOS, 300, tiny_models.EOS]
    assert generation["bos_token_id"] == tiny_models.BOS
    assert generation["temperature"] == 0.6, "the rest of the model's settings stays"


# Checks that depend on the model.


def _error(model, tmp_path, **arguments) -> str:
    with pytest.raises(EtkvError) as caught:
        export_program(ExportRequest(model=model, output=tmp_path / "not" / "there" / "model.pte", **arguments))
    assert list(tmp_path.iterdir()) == [], "nothing is written"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_context_beyond_the_model(tiny, tmp_path):
    assert _error(tiny("tiny-llama"), tmp_path, max_context=tiny_models.CONTEXT + 1) == (
        f"max-context {tiny_models.CONTEXT + 1} is above the {tiny_models.CONTEXT} positions of the model"
    )


def test_chunk_beyond_the_context(tiny, tmp_path):
    assert _error(tiny("tiny-llama"), tmp_path, max_context=100, prefill_chunk=101) == (
        "prefill-chunk 101 is above the max-context of 100"
    )


def test_layers_beyond_the_model(tiny, tmp_path):
    assert _error(tiny("tiny-llama"), tmp_path, layers=3) == "layers 3 is above the 2 layers of the model"


def test_taps_beyond_the_model(tiny, tmp_path):
    said = "tap-layers 2 is above 1, the last layer of the model"
    assert _error(tiny("tiny-llama"), tmp_path, tap_layers=(0, 2)) == said
    said = "tap-layers 1 is above 0, the last layer of the model"
    assert _error(tiny("tiny-llama"), tmp_path, layers=1, tap_layers=(1,)) == said


def test_group_that_does_not_divide(tiny, tmp_path):
    assert _error(tiny("tiny-llama"), tmp_path, quantize="4w", group_size=128) == (
        "group-size 128 does not divide 64, the width of model.embed_tokens"
    )


def test_smallest_program_and_group_size(tiny, tmp_path):
    """The minimum context and chunk, and a group size other than the default."""
    file = export_program(
        ExportRequest(
            model=tiny("tiny-llama"),
            output=tmp_path / "model.pte",
            quantize="4w",
            group_size=64,
            max_context=2,
            prefill_chunk=2,
            layers=1,
        )
    )
    methods = pte.constant_methods(file)
    assert methods["get_max_ctx_len"] == methods["get_prefill_chunk_size"] == 2
    products = [
        node["fields"] for node in describe_program(file)["instructions"] if node["operation"] == "QuantizedMatmul"
    ]
    assert products
    assert all("group_size: 64," in fields for fields in products), products[0]


def _write_model(config, folder):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


def test_sliding_windows_are_declared_and_bound_the_chunk(tmp_path):
    from transformers import MistralConfig

    model = _write_model(MistralConfig(**tiny_models.SHAPE, sliding_window=32), tmp_path / "model")
    (tmp_path / "out").mkdir()
    assert _error(model, tmp_path / "out", prefill_chunk=33) == "prefill-chunk 33 is above the sliding window of 32"
    request = ExportRequest(model, tmp_path / "x.pte")
    settled = limits.settle(request, source.read_config(source.find(model)))
    assert settled.max_context == tiny_models.CONTEXT
    layout = attention.CacheLayout([2, 2], [16, 16], [16, 16], [0, 32], [0, 0])
    assert settled.within(layout, request).prefill_chunk == 32
    with pytest.raises(EtkvError, match=r"^the model's sliding window of 1 is below the minimum step of 2$"):
        settled.within(attention.CacheLayout([2], [16], [16], [1], [0]), request)


def test_family_without_kv_cache(tmp_path):
    from transformers import MambaConfig

    config = MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2, state_size=8)
    said = _error(_write_model(config, tmp_path / "model"), _folder(tmp_path / "out"))
    assert said == (
        "model family 'mamba' has layers of kind 'linear_attention'; the exporter supports attention to all earlier "
        "tokens, to a sliding window or to chunks, and recurrent layers: short convolutions, the gated delta rule, "
        "Mamba-2 and lightning attention"
    )


def test_family_that_sees_later_tokens(tmp_path):
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(**tiny_models.SHAPE, sliding_window=128, use_bidirectional_attention=True)
    assert _error(_write_model(config, tmp_path / "model"), _folder(tmp_path / "out")) == (
        "model family 'gemma3_text' cannot be exported: model: its attention has the mask or_masks; expected "
        "a causal mask, a sliding window or chunks"
    )


def test_experts_with_a_function_that_the_op_lacks(tmp_path):
    from transformers import MixtralConfig

    config = MixtralConfig(**tiny_models.SHAPE, num_local_experts=4, hidden_act="tanh")
    assert _error(_write_model(config, tmp_path / "model"), _folder(tmp_path / "out"), backend="cpu") == (
        "model family 'mixtral' cannot be traced: model.layers.0.mlp.experts: the function between the products of its "
        "experts (Tanh) is not one of those of backend cpu: silu, gelu, gelu_tanh, relu, relu2, gated or not, with or "
        "without limits"
    )


def test_groups_that_experts_do_not_have(tmp_path):
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(**tiny_models.SHAPE, moe_intermediate_size=96, num_experts=2, num_experts_per_tok=1)
    model = _write_model(config, tmp_path / "model")
    assert _error(model, _folder(tmp_path / "out"), quantize="4w", group_size=64) == (
        "group-size 64 does not divide 96, the width of model.layers.0.mlp.experts.down_proj"
    )


def test_operators_that_mlx_lacks_are_named():
    import torch

    graph = torch.fx.Graph()
    graph.call_function(torch.ops.aten.gather.default, ())
    graph.call_function(torch.ops.aten.cumprod.default, ())
    with pytest.raises(EtkvError) as refused:
        mlx.check(graph, "bert")
    said = "model family 'bert' has operators that the MLX backend lacks: cumprod.default, gather.default"
    assert str(refused.value) == said


def test_family_that_is_not_a_language_model(tiny, tmp_path):
    model = shutil.copytree(tiny("tiny-llama"), tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"model_type": "vit"}))
    said = _error(model, _folder(tmp_path / "out"))
    assert said == f"model family 'vit' of {model} is not a causal language model"


def test_unreadable_configuration(tiny, tmp_path):
    model = shutil.copytree(tiny("tiny-llama"), tmp_path / "model")
    (model / "config.json").write_text("not JSON")
    assert "cannot be read" in _error(model, _folder(tmp_path / "out"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": None}, "Validation error for field 'attention_bias': TypeError: Field 'attention_bias' "),
        ({"num_attention_heads": 3}, "Class validation error for validator 'validate_architecture': ValueError: The "),
        ({"rope_parameters": {"rope_type": "linear"}}, "Missing required keys in `rope_parameters` for 'rope_type'"),
    ],
)
def test_a_refused_configuration_has_the_reason(tiny, tmp_path, changes, reason):
    model = shutil.copytree(tiny("tiny-llama"), tmp_path / "model")
    _change(model, changes)
    said = _error(model, _folder(tmp_path / "out"))
    assert said.startswith(f"the configuration of {model} cannot be read: {reason}")


@pytest.mark.long
def test_a_configuration_that_asks_for_tuples(tiny, tmp_path):
    model = shutil.copytree(tiny("tiny-llama"), tmp_path / "model")
    _change(model, {"return_dict": False})
    export_program(ExportRequest(model, _folder(tmp_path / "out") / "model.pte", backend="cpu"))


def test_truncated_weights(tiny, tmp_path):
    model = shutil.copytree(tiny("tiny-llama"), tmp_path / "model")
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert _error(model, _folder(tmp_path / "out")) == (
        f"the weights in {model / 'model.safetensors'} cannot be loaded: Error while deserializing header: incomplete "
        f"metadata, file not fully covered; its {len(weights) // 2} bytes are damaged or incomplete, so download it "
        "again"
    )


def test_missing_weights(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(tiny("tiny-llama"), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert _error(model, _folder(tmp_path / "out")) == (
        f"{model} lacks 1 weights of its model: model.layers.1.mlp.up_proj.weight; download it again, or correct its "
        "config.json"
    )


@pytest.mark.parametrize(("name", "row"), [("model.norm.weight", 3), ("model.embed_tokens.weight", 310)])
def test_weights_that_are_not_finite_are_named(tiny, tmp_path, name, row):
    """The comparison with the model would not find an infinite row of an embedding that no text reads."""
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(tiny("tiny-llama-untied"), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights[name][row] = float("nan") if row == 3 else float("inf")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    size, n = weights[name].numel(), weights[name][row].numel()
    assert _error(model, _folder(tmp_path / "out"), backend="cpu", verify=False) == (
        f"the weight {name} has {n} values of {size} that are not finite in float32; repair the checkpoint, or choose "
        "another --dtype"
    )


def test_tokens_that_the_model_lacks_are_noted(tiny):
    origin = source.find(tiny("tiny-llama"))
    config, tokenizer = source.read_config(origin), source.read_tokenizer(origin)
    assert source.vocabulary_remarks(config, tokenizer, {"eos_token_id": [300]}) == []
    config.vocab_size = 257
    assert source.vocabulary_remarks(config, tokenizer, {"eos_token_id": [257, 256]}) == [
        "the tokenizer has 2 tokens beyond the 257 of the model, the first is '<|im_end|>' (257): the program refuses "
        "texts with them"
    ]
    assert source.vocabulary_remarks(config, tokenizer, {"eos_token_id": [257]})[1:] == [
        "eos token ids [257] are beyond the 257 tokens of the model: answers end only at their limit of tokens"
    ]


def test_files_that_another_program_reads_are_noted(tmp_path):
    for folder in ("new", "out"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text(folder)
        (tmp_path / folder / "model.pte").touch()
    assert companions.changed(tmp_path / "new", tmp_path / "out", ["tokenizer.json"], "model.pte") == []
    (tmp_path / "out" / "draft.pte").touch()
    (remark,) = companions.changed(tmp_path / "new", tmp_path / "out", ["tokenizer.json"], "model.pte")
    assert remark.startswith(f"{tmp_path / 'out' / 'tokenizer.json'} changes, and draft.pte beside it read it too")


def test_a_configuration_from_which_no_model_can_be_built(tiny, tmp_path):
    model = shutil.copytree(tiny("tiny-llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_act": "unheard"}))
    said = _error(model, _folder(tmp_path / "out"))
    assert said == f"the model of {model} cannot be built from its config.json: 'unheard' is missing or unknown"
    (model / "config.json").write_text(json.dumps({**config, "num_attention_heads": 5}))
    # transformers says the reason in its second line.
    assert _error(model, tmp_path / "out").endswith("is not a multiple of the number of attention heads (5).")


def test_missing_tokenizer(tiny, tmp_path):
    model = shutil.copytree(tiny("tiny-llama"), tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert "has no tokenizer" in _error(model, _folder(tmp_path / "out"))


def _folder(path):
    path.mkdir()
    return path


def _change(model, changes):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_an_undelegated_operator_is_named(monkeypatch):
    """The test calls the check directly, so it does not depend on the operators that the wheel's backend supports."""
    import operator

    from executorch.exir.delegate import executorch_call_delegate

    def node(target):
        return type("Node", (), {"op": "call_function", "target": target})

    def graph(*targets):
        return type("Graph", (), {"nodes": [node(target) for target in targets]})

    mlx.check(graph(executorch_call_delegate, operator.getitem), "x")
    with pytest.raises(EtkvError, match="lacks: len, sum"):
        mlx.check(graph(executorch_call_delegate, sum, len), "x")
    with pytest.raises(EtkvError, match="splits into 2 delegates"):
        mlx.check(graph(executorch_call_delegate, executorch_call_delegate), "x")
    cpu.check(graph(executorch_call_delegate, executorch_call_delegate, operator.getitem), "x")
    with pytest.raises(EtkvError, match="lacks: len, sum"):
        cpu.check(graph(executorch_call_delegate, sum, len), "x")
