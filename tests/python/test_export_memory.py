"""An export keeps weights in files, so its memory does not grow with the model. The weights do not change."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import tiny_models
from etkv import _mlx_serialization
from etkv.export import progress

_mlx_serialization.ensure_available()

from etkv.export import mlx_quantization, packing, parallel, scratch, streaming  # noqa: E402

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the pages of files")

_EXPORT = """
import sys, threading, time
from pathlib import Path
from etkv.export import ExportRequest, Progress, export_program
from etkv.export.progress import third_party_noise

def held():
    # Anonymous memory in kB, which includes compiled code but not libraries.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

class Watching(Progress):
    most = 0
    def note(self, text):
        if text == "reading the weights":
            self.begin = held()
            threading.Thread(target=self.watch, daemon=True).start()
    def watch(self):
        while True:
            self.most = max(self.most, held())
            time.sleep(0.005)

watching = Watching()
with third_party_noise(allowed=False):
    request = ExportRequest(Path(sys.argv[1]), Path(sys.argv[2]), dtype="bfloat16", quantize="4w", verify=False)
    export_program(request, watching)
print((watching.most - watching.begin) * 1024, file=sys.stderr)
"""


@linux
@pytest.mark.long
def test_an_export_needs_less_memory_than_its_weights(tmp_path):
    """The weights have 300 MB. Without streaming, ExecuTorch would hold several copies of the quantized weights."""
    from transformers import AutoModelForCausalLM

    sizes = {"vocab_size": 64_000, "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 1}
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(tiny_models.config("LlamaConfig", **sizes, tie_word_embeddings=True))
    folder = tmp_path / "model"
    tiny_models.tokenizer().save_pretrained(folder)
    shapes.config.save_pretrained(folder)
    random = torch.Generator().manual_seed(0)
    names = {name: weight.shape for name, weight in shapes.named_parameters()}
    weights = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in names.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    of_weights = sum(weight.nbytes for weight in weights.values())

    program = tmp_path / "out" / "model.pte"
    process = [sys.executable, "-c", _EXPORT, str(folder), str(program)]
    made = subprocess.run(process, check=True, capture_output=True, text=True)
    grown = int(made.stderr.split()[-1])
    assert program.stat().st_size < 0.3 * of_weights
    assert grown < of_weights, f"{grown / 1e6:.0f} MB for {of_weights / 1e6:.0f} MB of weights"
    assert not list(program.parent.glob(".*")), "the files of weights are removed"


def _resident(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@linux
def test_released_pages_come_back_with_what_was_written(tmp_path):
    with scratch.Scratch(tmp_path) as files:
        kept = files.empty((1 << 25,), torch.uint8)
        kept.fill_(7)
        before = _resident("RssShmem") + _resident("RssFile")
        files.release()
        after = _resident("RssShmem") + _resident("RssFile")
        assert before - after > kept.nbytes // 2
        assert bool((kept == 7).all())
        assert files.keep(kept) is kept
        copied = files.keep(torch.arange(1 << 20))
        assert torch.equal(copied, torch.arange(1 << 20))
    assert not list(tmp_path.iterdir())


@linux
def test_a_weight_that_was_changed_in_memory_is_not_read_again(tmp_path):
    """The model's file is mapped without writing to it, so changes are only in memory."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}, file)
    with scratch.Scratch(tmp_path, [file]) as files, safe_open(file, "pt") as tensors:
        a, b = (tensors.get_slice(name)[...] for name in "ab")
        assert files.keep(a) is a, "it is in a file already"
        a[3] = 5.0
        files.release()
        assert a[3] == 5.0
        assert float(b.sum()) == 1 << 20


def test_small_tensors_stay_in_memory(tmp_path):
    with scratch.Scratch(tmp_path) as files:
        small = torch.ones(8)
        assert files.keep(small) is small
        assert not list(files.path.iterdir())


def test_data_of_a_tensor_is_its_bytes(tmp_path):
    tensor = torch.arange(1 << 19, dtype=torch.int32).bfloat16()
    expected = tensor.view(torch.uint8).numpy().tobytes()
    with scratch.Scratch(tmp_path) as files:
        data = streaming.TensorData(files.keep(tensor), files)
        written = io.BytesIO()
        data.write_to_file(written)
        assert len(data) == len(expected)
        assert data.prefix(32) == expected[:32]
        assert written.getvalue() == expected
        assert data.to_bytes() == expected


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 64), (8, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_are_those_of_torchao(bits, group_size, dtype):
    """For a group of thousands, two scales may be equally good. The errors are then the same."""
    from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_scale_only_hqq as choose

    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] = 0
    packed, scales = mlx_quantization.quantize(weight, bits, group_size)
    found = mlx_quantization.dequantize(packed, scales, bits, torch.float32)
    codes, others = choose(weight, [1, group_size], -(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    expected = (codes.unflatten(1, (-1, group_size)) * others.float().unsqueeze(2)).flatten(1)
    differ = int((scales != others).sum())
    assert differ <= max(1, scales.numel() // 40)
    errors = [float((each - weight.float()).square().mean()) for each in (found, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_weights_that_are_not_finite_are_refused():
    weight = torch.ones(64, 64)
    weight[5, 7] = torch.inf
    with pytest.raises(ValueError, match="not finite"):
        mlx_quantization.quantize(weight, 4, 32)


def test_every_part_is_worked_on_and_errors_are_raised():
    threads = torch.get_num_threads()
    done = torch.zeros(1000)

    def work(part: slice) -> None:
        done[part] += 1

    parallel.by_parts(1000, 7, work)
    assert bool((done == 1).all())

    def fail(part: slice) -> None:
        raise ValueError(f"part {part.start}")

    with pytest.raises(ValueError, match="part 0"):
        parallel.by_parts(10, 5, fail)
    assert torch.get_num_threads() == threads


def test_a_run_without_products_has_the_shapes_of_one_with_them(tmp_path):
    from etkv.export import mlx_linears

    layer = torch.nn.Sequential(torch.nn.Linear(64, 96))
    with scratch.Scratch(tmp_path) as files:
        packer = mlx_linears.Packer(4, 32, False, files)
        packed = packer.pack(layer[0]._parameters.pop("weight").detach())
        layer[0].__class__ = packer.install(layer[0], packed)
        x = torch.randn(2, 3, 64)
        made = layer(x)
        with packing.without_products(layer):
            cheap = layer(x)
        assert made.shape == cheap.shape
        assert not torch.equal(made, cheap)
        assert torch.equal(layer(x), made)


def test_a_step_prints_its_layers_at_most_once_a_second(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with progress.Progress(stream).step("reading the weights") as step:
        for layer in range(6):
            for part in ("self_attn.q_proj", "mlp.up_proj"):
                now[0] += 0.3
                step.at(f"model.layers.{layer}.{part}")
    lines = [line.split("] ")[1] for line in stream.getvalue().splitlines()]
    assert lines == ["reading the weights", *(f"... reading the weights: layer {layer}" for layer in (1, 3, 5))]
