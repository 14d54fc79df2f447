"""CPU programs of models with recurrent layers: their calls, their metadata, and the results of their graphs.

Graphs run in plain PyTorch after all rewrites, with the ops on their reference state.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import recurrent_models
import reference
import tiny_families
from etkv import op
from etkv.errors import EtkvError
from etkv.export import (
    ExportRequest,
    _import_tools,
    check,
    cpu,
    export_program,
    layers,
    limits,
    lowering,
    recurrent,
    rope,
)
from etkv.export.scratch import Scratch
from etkv.metadata import read_kv_cache_metadata
from etkv.pte import PteFile
from etkv.recurrent_layer import BLOCK, RecurrentLayer
from test_recurrent_models import caches, surveyed
from test_recurrent_programs import recurrent_program

FAMILIES = [
    "lfm2",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in (
            "falcon-h1",
            "qwen3-next",
            "olmo-hybrid",
            "granite-4",
            "nemotron-h",
            "falcon-h1-norm",
            "bamba",
            "mamba-2",
            "qwen3.5",
            "lfm3",
        )
    ),
]

ENDS = [7, 9, 20, 21, 22, 30]
"""The positions at which steps end."""


class Recorded:
    """A cache or a state that records the calls of its ops by layer."""

    def __init__(self, held, calls: list) -> None:
        self._held, self._calls = held, calls

    def __getattr__(self, name):
        method = getattr(self._held, name)

        def call(layer, *arguments):
            self._calls.append((name, layer))
            return method(layer, *arguments)

        return method if name == "abort" else call


@pytest.fixture(scope="module", autouse=True)
def tools():
    reference.speed_up_exports()
    _import_tools()


@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_compute_what_transformers_computes(name, tmp_path):
    step, layout = surveyed(name)
    request = SimpleNamespace(logits="all", backend="cpu")
    rope.settle(step.model, 256)
    cpu.prepare(step.model, request, Scratch(tmp_path))
    edge = cpu.delegate({"forward": lowering._trace(step, 16)}, {}, request)
    cpu.check(edge.exported_program("forward").graph, name)
    graph = edge.exported_program("forward").module()
    ids, rows, calls = torch.tensor([[(number * 37 + 11) % 250 for number in range(ENDS[-1])]]), [], []
    cache, state = (held and Recorded(held, calls) for held in caches(layout))
    with torch.no_grad(), op.active(cache, state):
        for begin, end in zip([0, *ENDS], ENDS, strict=False):
            rows.append(graph(input_ids=ids[:, begin:end], cache_position=torch.arange(begin, end))[0])
    step.model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = step.model(ids, use_cache=False).logits[0]
    assert (torch.cat(rows) - expected).abs().max() < 1e-4 * expected.std()
    # Payloads contain the order of the calls of a forward.
    payloads = [json.loads(delegate.processed_bytes) for delegate in _delegates(edge.exported_program("forward"))]
    numbered = {payload["call"]: (payload["op"], payload["layer"]) for payload in payloads if "call" in payload}
    assert [numbered[call] for call in range(len(numbered))] * len(ENDS) == calls


def _delegates(program):
    made = vars(program.graph_module)["_modules"]
    return [module for module in made.values() if getattr(module, "backend_id", "") == "EtkvForCPU"]


@pytest.fixture(scope="module")
def qwen() -> PteFile:
    return PteFile(recurrent_program("qwen3.5", "cpu").request.output)


def test_payloads(qwen):
    convolution, recurrence, *_, attention, rows = map(json.loads, qwen.cpu_payloads())
    common = {"version": 1, "n_calls": 5, "n_layers": 1, "n_recurrent": 4, "logits": "selected"}
    common["program"] = convolution["program"]
    assert convolution == {
        "op": "update_and_convolve",
        **common,
        **{"call": 0, "layer": 0, "activation": "silu", "channels": 160, "width": 4, "inputs": [0, 1, None, 2]},
    }
    assert recurrence == {
        "op": "update_and_scan",
        **common,
        **{"call": 1, "layer": 1, "scale": 0.25, "k_heads": 2, "heads": 4, "k_dim": 16, "v_dim": 24},
        **{"channel_decay": False, "inputs": [0, 1, 2, 3, 4, 5]},
    }
    assert attention == {
        "op": "update_and_attend",
        **common,
        **{"call": 4, "layer": 0, "scale": 0.25, "inputs": attention["inputs"]},
    }
    assert rows == {"op": "select_rows", "version": 1}


def test_metadata(qwen):
    params = read_kv_cache_metadata(qwen.path)
    convolution = RecurrentLayer("convolution", channels=160, width=4)
    recurrence = RecurrentLayer("recurrence", k_heads=2, heads=4, k_dim=16, v_dim=24)
    assert params.recurrent_layers == (convolution, recurrence, convolution, recurrence)
    assert (len(params.layers), params.backend) == (1, "cpu")
    # With this constant, ExecuTorch's runners would run the program as if it had no state.
    assert "get_n_caches" not in qwen.constant_names


def test_weights_alone_are_computed_once(qwen):
    """Parts of the graph that depend only on weights are folded. ExecuTorch's kernels only move rows."""
    assert not {"aten::exp", "aten::squeeze_copy", "aten::neg"} & set(qwen.operators("forward"))


def test_a_program_that_differs_is_refused(tmp_path, monkeypatch):
    """The export's check compares tokens beyond the first anchor."""
    model = recurrent_models.write("lfm2-recurrent", tmp_path / "model")
    request = ExportRequest(model, tmp_path / "model.pte", backend="cpu", verify=True)
    run_model = check.Check.run_model

    def off(checked):
        run_model(checked)
        checked._outputs[0][BLOCK + 1] *= 1.5

    monkeypatch.setattr(check.Check, "run_model", off)
    with pytest.raises(EtkvError, match=f"its logits at position {BLOCK + 1} of 80 are off by"):
        export_program(request)
    assert not request.output.exists()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("family", ["mamba", "jamba", "recurrent_gemma", "falcon_mamba"])
def test_states_without_ops_are_refused(family, backend):
    config = tiny_families.config(family)
    kind = next(kind for kind in config.layer_types if kind in recurrent.KINDS)
    words = f"model family '{family}' has layers of kind '{kind}'; the exporter supports attention to all earlier"
    with pytest.raises(EtkvError, match=words):
        limits.settle(SimpleNamespace(backend=backend), config)


def test_layers_without_a_cache_need_no_recurrent_layers(tmp_path):
    """The last layers of a model, which become a draft, may have no state although earlier layers have one."""
    config = tiny_families.config("nemotron_h", layers_block_type=["linear_attention", "mlp", "full_attention", "moe"])
    settled = limits.settle(ExportRequest(tmp_path, tmp_path / "x.pte"), layers.last(config, 3))
    assert settled.max_context == 256


def test_softplus_and_sums_on_xnnpack(tmp_path):
    """XNNPACK computes the operators that recurrent layers add, in a program without a cache."""
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    from etkv.export.cpu import rewrites
    from etkv.export.cpu.partitioner import CPUPartitioner

    class Decays(torch.nn.Module):
        def forward(self, x):
            steps = torch.nn.functional.softplus(x)
            return (
                steps,
                steps.clamp(0.5, 40.0),
                steps.clamp(min=0.25),
                x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6),
            )

    inputs = torch.cat([torch.randn(1, 3, 2, 16), torch.full((1, 3, 1, 16), 60.0), torch.full((1, 3, 1, 16), -60.0)], 2)
    traced = torch.export.export(Decays(), (inputs,), dynamic_shapes=({1: torch.export.Dim("tokens", max=8)},))
    rewrites.apply(traced)
    edge = to_edge_transform_and_lower({"forward": traced}, partitioner=[CPUPartitioner("all")])
    calls = [node for node in edge.exported_program("forward").graph.nodes if node.op == "call_function"]
    assert sum("call_delegate" in str(node.target) for node in calls) == 1
    assert all("call_delegate" in str(node.target) or "getitem" in str(node.target) for node in calls)
    path = tmp_path / "decays.pte"
    path.write_bytes(edge.to_executorch().buffer)
    made = Runtime.get().load_program(path).load_method("forward").execute([inputs])
    for found, expected in zip(made, Decays()(inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
