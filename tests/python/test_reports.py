"""JSON reports: docs/reports.md lists all fields, and their values are right."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import etkv
import lacking_program
from etkv.pte import PteFile

PAGE = (Path(__file__).parents[2] / "docs/reports.md").read_text(encoding="utf-8")

TYPES = {"string": str, "integer": int, "boolean": bool, "list": list, "null": type(None)}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def documented(title: str) -> dict[str, list[type]]:
    """Return the allowed types of each field in a table of the page."""
    fields: dict[str, list[type]] = {}
    for row in re.findall(r"^\| (`.*?) \| (.*?) \| .* \|$", section(title), re.MULTILINE):
        names, kinds = re.findall(r"`([^`]+)`", row[0]), row[1].split(", ")
        assert len(kinds) in (1, len(names)), row
        for index, name in enumerate(names):
            assert name not in fields, f"{name} is listed twice"
            fields[name] = [TYPES[kind] for kind in kinds[index % len(kinds)].split(" or ")]
    return fields


def check(found, title: str, seen: set[str]) -> None:
    """Check that each field of `found` is listed with its type. Add the fields to `seen`."""
    fields = documented(title)

    def visit(value, path: str) -> None:
        if path in fields:
            assert type(value) in fields[path], f"{path} is {value!r}"
            seen.add(path)
        if isinstance(value, dict):
            for name, inner in value.items():
                visit(inner, f"{path}.{name}" if path else name)
        elif isinstance(value, list):
            for inner in value:
                visit(inner, f"{path}[]")
        else:
            within = path.removesuffix("[]")
            # If an object is null, its fields are absent.
            assert path in fields or within in fields or value is None, f"{path} is not listed"

    visit(found, "")


def example(title: str):
    return json.loads(re.search(r"```json\n(.*?)```", section(title), re.DOTALL)[1])


def config(capacity=64, **more) -> etkv.CacheConfig:
    return etkv.CacheConfig([etkv.LayerConfig(2, 32, window=more.pop("window", 0))] * 2, capacity, **more)


@pytest.fixture(scope="module")
def lacking(tmp_path_factory) -> Path:
    """Return a program with operations that this build lacks."""
    return lacking_program.write(tmp_path_factory.mktemp("lacking") / "x.pte")


def test_fields_of_a_cache():
    seen: set[str] = set()
    for kind in (etkv.DecodeSession, etkv.SeqSession, etkv.TreeSession):
        with kind(config(growth="upfront", quantized_kv_start=4, k_format="affine4g32", window=8)) as session:
            check(session.report(), "A cache", seen)
    with etkv.TreeSession(config()) as session:
        session.propose([-1, -1], sequence=3)
        check(session.report(), "A cache", seen)
    with etkv.DecodeSession(config(recurrent_layers=[etkv.Convolution(8, 4), etkv.Recurrence(1, 2, 8, 8)])) as session:
        check(session.report(), "A cache", seen)
    # test_recurrent_caches.py has a report with checkpoints.
    seen.add("sequences[].checkpoints")
    assert seen == set(documented("A cache"))
    check(example("A cache"), "A cache", in_example := set())
    assert in_example == seen


def test_fields_of_the_process():
    seen: set[str] = set()
    with etkv.DecodeSession(config(growth="upfront")) as session, etkv.SeqSession(config()):
        etkv.set_memory_budget(1 << 40)
        try:
            found = etkv.process_report()
        finally:
            etkv.set_memory_budget(None)
        check(found, "The process", seen)
        held = {holder["keys"][0]: holder["held"] for holder in found["memory"]["holders"] if holder["keys"]}
        assert held[session.key] == session.memory().allocated
    assert found["memory"]["free"] == (1 << 40) - found["memory"]["held"]
    assert etkv.process_report()["memory"]["limit"] is None
    assert seen == set(documented("The process"))
    check(example("The process"), "The process", in_example := set())
    assert in_example == seen


def test_fields_of_a_program(exported, lacking):
    seen: set[str] = set()
    quantized = exported("tiny-llama", "f32", "4w")
    for path in (exported("tiny-llama") / "model.pte", quantized / "model.pte", lacking):
        check(etkv.describe_program(path), "A program", seen)
    assert seen == set(documented("A program"))
    check(example("A program"), "A program", set())


def test_a_report_agrees_with_the_cache():
    with etkv.DecodeSession(config(k_format="affine4g32", growth="upfront")) as session:
        found, memory = session.report(), session.memory()
    assert found["formats"] == {"k": "affine4g32", "v": "f16"}
    names = ("allocated", "used", "shared", "at_capacity")
    assert found["memory"] == {name: getattr(memory, name) for name in names}
    assert [layer["k"]["allocated"] for layer in found["layers"]] == [layer.k_allocated for layer in memory.layers]
    assert found["layers"][0]["v"] == {"format": "f16", "slots": 64, "allocated": 64 * 2 * 32 * 2, "used": 0}
    assert found["config"]["growth"] == "upfront"
    assert found["sequences"] == []
    with pytest.raises(etkv.EtkvError, match="is closed"):
        session.report()


def test_a_description_agrees_with_the_file(exported):
    path = exported("tiny-llama") / "model.pte"
    found, file = etkv.describe_program(path), PteFile(path)
    assert etkv.describe_program(file.mlx_payload()) == found
    assert found["refused"] is None
    sizes = {tensor["name"]: tensor["bytes"] for tensor in found["constants"]["tensors"]}
    assert sizes == file.named_data
    assert found["constants"]["bytes"] == sum(sizes.values())
    counts = {counted["operation"]: counted["count"] for counted in found["operations"]}
    assert sum(counts.values()) == len(found["instructions"])
    assert counts["UpdateAndAttend"] == len(found["attention_layers"]) == 2
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    fuse = next(done for done in found["passes"] if done["name"] == "fuse_linear")
    made = {change["operation"]: change["after"] - change["before"] for change in fuse["changed"]}
    assert made["Linear"] == counts["Addmm"] == -made["Addmm"]
    for device in ("passes", "passes_on_gpu"):
        before = [done["before"] for done in found[device]]
        assert before[1:] == [done["after"] for done in found[device]][:-1]
    assert found["passes_on_gpu"][-1]["after"] < found["passes"][-1]["after"] < found["passes"][0]["before"]
    if sys.platform == "linux":
        assert found["steps_on_cuda"] == "it computes in float32, not in float16 or bfloat16"
    attention = next(node for node in found["instructions"] if node["operation"] == "UpdateAndAttend")
    assert re.fullmatch(
        r"q: t\d+, k: t\d+, v: t\d+, position: t\d+, out: t\d+, layer_id: 0, scale: [\d.]+, out_dtype: 6",
        attention["fields"],
    )


def test_a_program_that_is_refused_is_described(lacking):
    found = etkv.describe_program(lacking)
    assert found["missing"] == [{"operation": lacking_program.NAME, "count": 2}]
    assert f"{lacking_program.NAME} (2 times)" in found["refused"]
    assert (found["passes"], found["passes_on_gpu"], found["layouts"]) == ([], [], None)
    assert found["steps_on_cuda"] is None
    assert found["inputs"] == [{"name": found["inputs"][0]["name"], "dtype": "float32", "shape": [3]}]


def test_files_that_are_not_programs_are_refused(exported, tmp_path):
    payload = bytearray(PteFile(exported("tiny-llama") / "model.pte").mlx_payload())
    with pytest.raises(etkv.ProgramError, match="0 bytes"):
        etkv.describe_program(b"")
    with pytest.raises(etkv.ProgramError, match="says that its data start at"):
        etkv.describe_program(bytes(payload[:100]))
    payload[24:28] = b"\xff\xff\xff\x7f"
    with pytest.raises(etkv.ProgramError, match="the payload is damaged"):
        etkv.describe_program(bytes(payload))
    with pytest.raises(etkv.EtkvError, match="cannot be read"):
        etkv.describe_program(tmp_path / "x.pte")
