"""The cache metadata of programs: written to a real ``.pte`` and read back, and refusals."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import etkv
import etkv.reference
import reference
from etkv import pte
from etkv.config import LayerConfig
from etkv.errors import EtkvError
from etkv.metadata import ModelCacheParams, read_kv_cache_metadata, write_kv_cache_metadata
from reference import Variant
from tiny_models import CONTEXT


def versioned(**changes):
    facts = {
        "kv_cache.schema_version": 1,
        "kv_cache.n_layers": 2,
        "kv_cache.n_kv_heads": 8,
        "kv_cache.head_dim": 64,
        **{f"kv_cache.{name}": value for name, value in changes.items()},
    }
    return {name: value for name, value in facts.items() if value is not None}


def exporters(**changes):
    facts = {
        "get_n_caches": 2,
        "get_kv_heads": [4, 2],
        "get_head_dims": torch.tensor([64, 128], dtype=torch.int32),
        "get_windows": [0, 512],
        "get_prefill_chunk_size": 256,
        "get_max_ctx_len": 4096,
        **changes,
    }
    return {name: value for name, value in facts.items() if value is not None}


def saved(tmp_path, metadata):
    """Write a program of one addition for ExecuTorch's portable kernels, with these constant methods."""
    from executorch.exir import to_edge

    class AddOne(torch.nn.Module):
        def forward(self, x):
            return x + 1

    program = to_edge(torch.export.export(AddOne(), (torch.ones(2),)), constant_methods=metadata).to_executorch()
    path = tmp_path / "model.pte"
    path.write_bytes(program.buffer)
    return path


def test_one_number_for_all_layers(tmp_path):
    metadata = {"get_prefill_chunk_size": 32}
    assert write_kv_cache_metadata(metadata, n_layers=3, n_kv_heads=4, head_dim=64) is metadata
    assert metadata == {
        "get_prefill_chunk_size": 32,
        "kv_cache.schema_version": 1,
        "kv_cache.n_layers": 3,
        "kv_cache.n_kv_heads": 4,
        "kv_cache.head_dim": 64,
    }
    expected = ModelCacheParams((LayerConfig(4, 64, 64),) * 3, 32, 0)
    path = saved(tmp_path, metadata)
    assert pte.constant_methods(path) == metadata
    for source in (metadata, path, str(path)):
        assert read_kv_cache_metadata(source) == expected


def test_layers_with_chunks(tmp_path):
    """Readers that do not support chunks must refuse the program: their queries would see positions of other chunks."""
    metadata = write_kv_cache_metadata({}, n_layers=2, n_kv_heads=2, head_dim=64, chunk=[8192, 0])
    assert metadata["kv_cache.schema_version"] == 3
    for source in (metadata, saved(tmp_path, metadata)):
        assert read_kv_cache_metadata(source).layers == (LayerConfig(2, 64, 64, chunk=8192), LayerConfig(2, 64, 64))
    none = write_kv_cache_metadata({}, n_layers=2, n_kv_heads=2, head_dim=64, chunk=0)
    assert none["kv_cache.schema_version"] == 1
    convolution = etkv.Convolution(64, 4)
    both = write_kv_cache_metadata({}, n_layers=1, n_kv_heads=2, head_dim=64, chunk=16, recurrent_layers=[convolution])
    assert both["kv_cache.schema_version"] == 3
    read = read_kv_cache_metadata(both)
    assert (read.layers[0].chunk, read.recurrent_layers) == (16, (convolution,))


def test_one_number_for_each_layer(tmp_path):
    metadata = write_kv_cache_metadata(
        {"get_max_ctx_len": 2048},
        n_layers=2,
        n_kv_heads=[8, np.int64(4)],
        head_dim=(64, 96),
        v_head_dim=torch.tensor([32, 48]),
        window=np.array([0, 1024]),
        sinks=[0, 4],
        values_in_keys=[1, 0],
    )
    assert metadata["kv_cache.schema_version"] == 1
    assert metadata["kv_cache.window"].dtype == torch.int32
    layers = (LayerConfig(8, 64, 32, values_in_keys=True), LayerConfig(4, 96, 48, window=1024, sinks=4))
    for source in (metadata, saved(tmp_path, metadata)):
        assert read_kv_cache_metadata(source) == ModelCacheParams(layers, 0, 2048)


def test_one_layer_with_a_list_of_one(tmp_path):
    """A tensor of one element is the value of one layer, and stays a tensor in the program."""
    metadata = write_kv_cache_metadata({}, n_layers=1, n_kv_heads=[3], head_dim=[80], window=[16])
    for source in (metadata, saved(tmp_path, metadata)):
        assert read_kv_cache_metadata(source).layers == (LayerConfig(3, 80, 80, window=16),)


def test_numbers_of_numpy_and_values_that_no_fact_has():
    facts = {"kv_cache.schema_version": np.int64(1), "kv_cache.n_layers": np.int32(2), "kv_cache.head_dim": 64}
    read = read_kv_cache_metadata({**facts, "kv_cache.n_kv_heads": [8, np.int64(4)]})
    assert [layer.n_kv_heads for layer in read.layers] == [8, 4]
    for value in (float("nan"), [8, float("inf")], torch.tensor([1.0, float("nan")]), {"a": 1}, [1.0, 2.0], True, "8"):
        with pytest.raises(etkv.ProgramError, match=r"`kv_cache\.n_kv_heads` is not one integer for each of 2 layers"):
            read_kv_cache_metadata({**facts, "kv_cache.n_kv_heads": value})


def test_metadata_of_the_exporter(exported):
    """In a program of this package's exporter, layers and steps are those of the tiny model."""
    params = read_kv_cache_metadata(exported("tiny-llama") / "model.pte")
    assert params.layers == (LayerConfig(2, 16, 16, dtype="f32"),) * 2
    assert (params.prefill_chunk_size, params.max_context_length) == (64, CONTEXT)


def test_executorchs_exporter():
    params = read_kv_cache_metadata(exporters())
    assert params.layers == (LayerConfig(4, 64, 64), LayerConfig(2, 128, 128, window=512))
    assert (params.prefill_chunk_size, params.max_context_length) == (256, 4096)
    # Other exporters of ExecuTorch use another name for the context length.
    facts = exporters(get_max_ctx_len=None, get_max_seq_len=128)
    assert read_kv_cache_metadata(facts).max_context_length == 128
    assert read_kv_cache_metadata({**facts, "get_max_context_len": 2048}).max_context_length == 2048
    # Versioned metadata takes precedence.
    assert read_kv_cache_metadata({**exporters(), **versioned()}).layers == (LayerConfig(8, 64, 64),) * 2


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_dtypes(tmp_path, dtype):
    metadata = write_kv_cache_metadata({}, n_layers=2, n_kv_heads=3, head_dim=80, dtype=dtype)
    for source in (metadata, saved(tmp_path, metadata)):
        assert read_kv_cache_metadata(source).layers == (LayerConfig(3, 80, dtype=dtype, v_head_dim=80),) * 2
    # ExecuTorch's exporter writes no dtype, which is accepted.
    assert read_kv_cache_metadata({**exporters(), "kv_cache.dtype": dtype}).layers[1].dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", 1, "x" * 1000])
def test_invalid_dtypes_are_not_written(dtype):
    with pytest.raises(EtkvError, match=r"`dtype` is .{0,40}, expected one of f32, f16, bf16"):
        write_kv_cache_metadata({}, n_layers=2, n_kv_heads=3, head_dim=80, dtype=dtype)


@pytest.mark.parametrize("variant", [Variant("tiny-llama"), Variant("tiny-llama", "bf16")])
def test_a_program_that_does_not_tell_its_dtype(variant, monkeypatch):
    """The dtype is that of the logits, for example in a program of ExecuTorch's exporter."""
    path = reference.program(variant).path
    constants = pte.constant_methods(path)
    told = constants.pop("kv_cache.dtype")
    monkeypatch.setattr(pte, "constant_methods", lambda path: constants)
    assert {layer.dtype for layer in read_kv_cache_metadata(path).layers} == {told}
    assert read_kv_cache_metadata(constants).layers[0].dtype is None


@pytest.mark.parametrize("variant", [Variant("tiny-llama"), Variant("tiny-llama", "bf16")])
@pytest.mark.parametrize("kind", [etkv.DecodeSession, etkv.SeqSession, etkv.TreeSession])
def test_a_cache_stores_the_dtype_of_its_program(variant, kind):
    path = reference.program(variant).path
    facts, dtype = read_kv_cache_metadata(path), variant.dtype
    config = etkv.CacheConfig(facts.layers, capacity=32)
    assert etkv.estimate(config, 8) == etkv.estimate(replace(config, k_format=dtype, v_format=dtype), 8)
    with kind(config, backend=facts.backend) as session:
        assert session.formats == (dtype, dtype)
        assert session.report()["config"]["k_format"] == dtype
    # Either format may be set without the other.
    with kind(replace(config, v_format="f16"), backend=facts.backend) as session:
        assert session.formats == (dtype, "f16")
    # The dtype is also the format of rows before quantization.
    with kind(replace(config, k_format="row-int4", v_format="nvfp4", quantized_kv_start=4)) as session:
        assert session.formats == (dtype, dtype)


def test_layers_of_several_dtypes_need_a_format():
    layers = [LayerConfig(1, 8, dtype="f32"), LayerConfig(1, 8, dtype="bf16")]
    told = "k_format is not set, and the dtype of layer 1 is bf16, that of layer 0 f32; set k_format"
    for made in (etkv.DecodeSession, etkv.reference.ContiguousCache):
        with pytest.raises(EtkvError, match=told):
            made(etkv.CacheConfig(layers, 16))
        with pytest.raises(EtkvError, match="v_format is not set"):
            made(etkv.CacheConfig(layers, 16, k_format="f32"))
        made(etkv.CacheConfig(layers, 16, k_format="f32", v_format="f16"))
    unknown = [LayerConfig(1, 8), LayerConfig(1, 8)]
    assert etkv.reference.ContiguousCache(etkv.CacheConfig(unknown, 16)).formats == ("f16", "f16")
    with etkv.DecodeSession(etkv.CacheConfig(unknown, 16)) as session:
        assert session.formats == ("f16", "f16")
    with pytest.raises(EtkvError, match=r"LayerConfig\.dtype is 'float32', expected None or one of f32, f16, bf16"):
        LayerConfig(1, 8, dtype="float32")


def test_equal_layers_print_as_one():
    layers = (LayerConfig(1, 8),) * 30 + (LayerConfig(1, 8, window=4),)
    one, other = repr(layers[0]), repr(layers[30])
    assert repr(etkv.CacheConfig(layers, 16).layers) == f"[30 × {one}, {other}]"
    params = read_kv_cache_metadata(versioned(n_layers=30))
    assert repr(params.layers) == f"[30 × {LayerConfig(8, 64, 64)}]"
    assert repr(params).count("LayerConfig(") == 1


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "does not report `get_n_caches`; export it with an off-graph KV cache"),
        *((versioned(**{name: None}), f"does not report `kv_cache.{name}`") for name in ("n_layers", "head_dim")),
        # There is no fallback to the metadata of ExecuTorch's exporter, because its values may differ.
        (
            {**exporters(), "kv_cache.schema_version": 4},
            "kv_cache.schema_version is 4; this etkv reads versions 1 to 3",
        ),
        (versioned(schema_version=True), "`kv_cache.schema_version` is true, which is not a 32-bit count"),
        (versioned(values_in_keys=[1, 2]), "`kv_cache.values_in_keys` has 2, expected 0 or 1"),
        (versioned(v_head_dim=[64]), "`kv_cache.v_head_dim` is not one integer for each of 2 layers"),
        (versioned(dtype="float32"), '`kv_cache.dtype` is "float32", expected f32, f16 or bf16'),
        (exporters(get_max_ctx_len=2**31), "`get_max_ctx_len` is 2147483648"),
    ],
)
def test_invalid_facts_are_refused(facts, words):
    """The library has the rules, and its own tests of each."""
    with pytest.raises(EtkvError, match=words):
        read_kv_cache_metadata(facts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_layers": 0}, "`n_layers` is 0, expected 1 to 65536"),
        ({"n_layers": 2.0}, "`n_layers` is 2.0, which is not a 32-bit count"),
        ({"n_kv_heads": -1}, "`n_kv_heads` is -1, which is not a 32-bit count"),
        ({"head_dim": [64]}, "`head_dim` is not one integer for each of 2 layers"),
        ({"head_dim": None}, "`head_dim` is not one integer for each of 2 layers"),
        ({"v_head_dim": [64, 2**31]}, "`v_head_dim` has 2147483648"),
        ({"window": [True, False]}, "`window` is not one integer for each of 2 layers"),
        ({"sinks": "44"}, "`sinks` is not one integer for each of 2 layers"),
    ],
)
def test_metadata_that_is_not_written(changes, words):
    metadata = {"get_eos_ids": [2]}
    with pytest.raises(EtkvError, match=words):
        write_kv_cache_metadata(metadata, **{"n_layers": 2, "n_kv_heads": 4, "head_dim": 64, **changes})
    assert metadata == {"get_eos_ids": [2]}


def test_metadata_are_read_without_large_packages():
    """The import of configs and of the reader needs only this package and the standard library."""
    code = (
        "import sys, etkv.config, etkv.metadata\nprint({'torch', 'numpy', 'executorch'} & set(sys.modules))\n"
        "import etkv; etkv.read_kv_cache_metadata(sys.argv[1])\nprint({'torch', 'executorch'} & set(sys.modules))"
    )
    program = reference.program(Variant("tiny-llama")).path
    ran = subprocess.run([sys.executable, "-c", code, program], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "set()\nset()\n", ran.stderr


def test_a_session_has_the_backend_of_its_layers():
    for program, backend in (
        (reference.program(Variant("tiny-llama")).path, "MLXBackend"),
        (reference.program(Variant("tiny-llama", backend="cpu")).path, "cpu"),
    ):
        facts = read_kv_cache_metadata(program)
        assert facts.backend == facts.layers.backend == backend
        with etkv.SeqSession(etkv.CacheConfig(facts.layers, 8)) as session, etkv.load(program, session) as loaded:
            loaded.forward([1, 2], [0, 1])
            assert session.length == 2
    assert etkv.CacheConfig([LayerConfig(1, 8)], 8).layers.backend is None
