"""Runs ExecuTorch's own tests of the op against this package's op and reference caches.

    python executorch_adapter.py        prints the outcome of each test, as JSON

The tests import names of ExecuTorch's modules. Data types and host helpers are ExecuTorch's own: configs, policies,
specs and ``flatten_step``. The op, its registry, the caches and the attention are adapters for this package. The
adapters translate these differences:

* ExecuTorch's caches describe a mask by its kind, and return a mask only if the kind is not enough. This package's
  caches always return a mask.
* ExecuTorch's step commits when its first layer is called, and its tests omit other layers. This package's step commits
  when all layers were called, so the adapter calls the omitted layers with zeros.
* ExecuTorch's ``begin_step`` refuses a step that does not fit. Here the step is refused, and ``can_extend`` predicts
  it.
* ExecuTorch needs ``begin_step`` before each attempt of a forward. This package needs it only for several sequences,
  and a declaration holds until a step commits.
* ExecuTorch raises RuntimeError where this package raises an error with the status CAPACITY or STEP.
* ExecuTorch has 63 sequences; this package has 256.
* ExecuTorch allocates by a sizing policy. This package has none.

So five of the tests do not test much of this package: one tests ``flatten_step``, one the policies, two the step
protocol, and one admission in ``begin_step``. The adapter implements what the last three test.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PACKAGE = "executorch.extension.llm.cache"


def source(name: str) -> Path:
    """Return the file of a module of ExecuTorch without importing it."""
    spec = importlib.util.find_spec("executorch")
    folders = spec.submodule_search_locations if spec else []
    return next(Path(folder, "extension/llm/cache", f"{name}.py") for folder in folders)


def load(name: str, alias: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(alias, source(name))
    assert spec is not None and spec.loader is not None
    module = sys.modules[alias] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


theirs = load("reference_cache", "executorchs_reference_cache")
assert not hasattr(torch.ops.kvcache, "update_and_attend"), "the op is registered already"

from etkv import op, reference  # noqa: E402
from etkv.config import CacheConfig, LayerConfig  # noqa: E402
from etkv.errors import Status, StatusError  # noqa: E402
from etkv.reference.attention import attention  # noqa: E402
from etkv.reference.sequences import MAX_SEQUENCES  # noqa: E402


@contextlib.contextmanager
def their_errors() -> Iterator[None]:
    try:
        yield
    except StatusError as error:
        if error.status in (Status.CAPACITY, Status.STEP):
            raise RuntimeError(str(error)) from error
        raise


class Adapter:
    """A cache of this package with the methods of all of ExecuTorch's caches."""

    kind = "contiguous"

    def __init__(self, config: Any) -> None:
        layers = [
            LayerConfig(config.n_kv_heads, config.head_dim, window=config.policy_for(layer).window)
            for layer in range(config.n_layers)
        ]
        # If steps may be as long as the capacity, windows drop no rows.
        ours = CacheConfig(layers, config.capacity, k_format="f32", v_format="f32", max_step_tokens=config.capacity)
        self.cache: Any = reference.make_cache(self.kind, ours)
        self.n_layers = config.n_layers
        self.served: dict[int, tuple[Any, ...]] = {}
        """Layers that the open forward has called -> their arguments."""

    def update_and_fetch(self, layer_id: int, k: Any, v: Any, position: Any) -> tuple[Any, Any, Any]:
        with self.call(layer_id, k, v, position) as positions:
            keys, values, mask = self.cache.update_and_fetch(layer_id, k, v, positions)
        return keys, values, self.spec(mask)

    def update_and_attend(self, layer: int, q: Any, k: Any, v: Any, positions: Any, scale: Any, out_dtype: Any) -> Any:
        with self.call(layer, k, v, torch.tensor(positions)) as positions:
            return self.cache.update_and_attend(layer, q, k, v, positions, scale, out_dtype)

    @contextlib.contextmanager
    def call(self, layer: int, k: Any, v: Any, position: Any) -> Iterator[list[int]]:
        positions = position.reshape(-1).tolist()
        with their_errors():
            yield positions
        self.served[layer] = (k, v, positions)
        if len(self.served) == self.n_layers:
            self.served.clear()

    def finish(self) -> None:
        """Call the omitted layers."""
        if self.served:
            k, v, positions = next(iter(self.served.values()))
            for layer in range(self.n_layers):
                if layer not in self.served:
                    self.cache.update_and_fetch(layer, torch.zeros_like(k), torch.zeros_like(v), positions)
            self.served.clear()

    def spec(self, mask: Any) -> Any:
        n_queries, n_keys = mask.shape
        if n_queries == 1 and mask.all():
            return theirs.AttendSpec(theirs.MaskKind.NONE)
        if n_queries == n_keys and torch.equal(mask, torch.ones_like(mask).tril()):
            return theirs.AttendSpec(theirs.MaskKind.CAUSAL)
        return theirs.AttendSpec(theirs.MaskKind.EXPLICIT, mask)

    def abort(self) -> None:
        self.served.clear()
        self.cache.abort()


class CellAdapter(Adapter):
    kind = "seq"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.declared, self.called = False, set()

    def begin_step(self, sequences: list[int]) -> None:
        self.finish()
        with their_errors():
            self.cache.begin_step(sequences)
        if not self.can_extend(len(sequences)):
            raise RuntimeError(f"{len(sequences)} tokens do not fit")
        self.declared, self.called = True, set()

    @contextlib.contextmanager
    def call(self, layer: int, k: Any, v: Any, position: Any) -> Iterator[list[int]]:
        if layer in self.called or not (self.declared or self.served):
            raise RuntimeError("no begin_step before this forward")
        self.declared = False
        with super().call(layer, k, v, position) as positions:
            yield positions
        self.called.add(layer)

    def spec(self, mask: Any) -> Any:
        return theirs.AttendSpec(theirs.MaskKind.EXPLICIT, mask)

    def can_extend(self, n: int = 1) -> bool:
        self.finish()
        return self.cache.can_extend(n)

    def free_cells(self) -> int:
        self.finish()
        return self.cache.capacity - self.cache.length

    def seq_len(self, sequence: int) -> int:
        self.finish()
        return self.cache.seq_len(sequence)

    def seq_cp(self, source: int, target: int, upto: int | None = None) -> None:
        self.finish()
        self.cache.seq_cp(source, target, 0, upto)

    def seq_rm(self, sequence: int, begin: int = 0, end: int | None = None) -> None:
        self.finish()
        self.cache.seq_rm(sequence, begin, end)


def attend(q: Any, k: Any, v: Any, spec: Any, scale: float, out_dtype: Any) -> Any:
    n_queries, n_keys = q.shape[2], k.shape[2]
    if spec.kind is theirs.MaskKind.CAUSAL and n_queries != n_keys:
        raise ValueError("expected as many keys as queries under ExecuTorch's causal mask")
    mask = torch.ones(n_queries, n_keys, dtype=torch.bool)
    if spec.kind is not theirs.MaskKind.NONE:
        mask = mask.tril() if spec.kind is theirs.MaskKind.CAUSAL else spec.mask
    return attention(q, k, v, mask, scale, out_dtype)


class Registry:
    def __init__(self) -> None:
        self.caches: dict[str, Adapter] = {}

    def install(self, key: str, cache: Adapter) -> None:
        self.caches[key] = cache

    def uninstall(self, key: str) -> None:
        self.caches.pop(key, None)

    def active(self, key: str) -> Any:
        return op.active(self.caches[key])


def tests() -> ModuleType:
    """Return ExecuTorch's module of tests, with the adapters in place of its imports."""
    caches = {"CellReferenceCache": CellAdapter, "ContiguousReferenceCache": Adapter, "attend": attend}
    served = {
        f"{PACKAGE}.reference_cache": SimpleNamespace(**{**vars(theirs), **caches, "MAX_SEQS": MAX_SEQUENCES}),
        f"{PACKAGE}.update_and_attend": SimpleNamespace(REGISTRY=Registry(), update_and_attend=op.update_and_attend),
    }
    sys.modules.update(served)
    try:
        return load("test_update_and_attend", "executorchs_tests")
    finally:
        for name in served:
            del sys.modules[name]


class Counting(unittest.TestResult):
    """Records the tests that passed, and the outcomes of the other tests."""

    def __init__(self) -> None:
        super().__init__()
        self.told = {"passed": [], "not passed": {}}

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self.told["passed"].append(test.id().split(".", 1)[1])

    def stopTest(self, test: Any) -> None:  # noqa: N802
        super().stopTest(test)
        for other, why in [*self.failures, *self.errors, *self.skipped, *self.expectedFailures]:
            self.told["not passed"][other.id().split(".", 1)[1]] = why


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    result = Counting()
    unittest.defaultTestLoader.loadTestsFromModule(tests()).run(result)
    assert f"{PACKAGE}.update_and_attend" not in sys.modules, "their op has replaced ours on the way"
    print(json.dumps(result.told))
