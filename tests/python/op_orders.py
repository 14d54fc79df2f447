"""Imports etkv's op and ExecuTorch's op in some order, and runs the traced programs; see ``test_op.py``.

    python op_orders.py ours trace theirs check

``ours`` and ``theirs`` import an op, ``trace`` traces a model, ``check`` runs all traced programs on caches of both
packages, and ``lower`` delegates the programs to MLX.
"""

from __future__ import annotations

import gc
import sys
import warnings

import torch
import torch.nn.functional as F  # noqa: N812

ROWS = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
POSITION = torch.arange(3)
EXPECTED = F.scaled_dot_product_attention(ROWS, ROWS, ROWS, is_causal=True, scale=0.5)


class OneLayer(torch.nn.Module):
    def forward(self, x, position):
        return torch.ops.kvcache.update_and_attend(x, x, x, position, 0, 0.5, torch.float32)


def trace(traced):
    exported = torch.export.export(OneLayer(), (ROWS, POSITION), strict=True)
    # The traced op object must survive a garbage collection.
    gc.collect()
    calls = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert calls == [torch.ops.kvcache.update_and_attend.default]
    traced += [exported.module(), exported.run_decompositions({}).module()]
    traced.append(torch.compile(OneLayer(), backend="eager", fullgraph=True))
    # This program is bound to the op that is registered now.
    traced.append(
        lambda x, position, bound=torch.ops.kvcache.update_and_attend.default: bound(
            x, x, x, position, 0, 0.5, torch.float32
        )
    )
    return exported


def check(traced):
    from etkv import op, reference
    from etkv.config import CacheConfig, LayerConfig
    from etkv.errors import EtkvError

    runs = [*traced, OneLayer(), lambda x, position: op.update_and_attend(x, x, x, position, 0, 0.5, torch.float32)]
    cache = reference.ContiguousCache(CacheConfig([LayerConfig(2, 8)], 16, k_format="f32", v_format="f32"))
    for run in runs:
        with op.active(cache):
            torch.testing.assert_close(run(ROWS, POSITION), EXPECTED)
        assert cache.length == 3
        cache.clear()
        try:
            run(ROWS, POSITION)
            raise AssertionError("ran without a cache")
        except RuntimeError as error:
            assert isinstance(error, EtkvError) and "etkv.op.active(cache)" in str(error), error
    theirs = sys.modules.get("executorch.extension.llm.cache.update_and_attend")
    if theirs is not None:
        check_theirs(theirs, cache, runs)


def check_theirs(theirs, cache, runs):
    from executorch.extension.llm.cache.reference_cache import CacheConfig, ContiguousReferenceCache

    from etkv import op

    for run in [*runs, lambda x, position: theirs.update_and_attend(x, x, x, position, 0, 0.5, torch.float32)]:
        other = ContiguousReferenceCache(CacheConfig(n_layers=1, n_kv_heads=2, head_dim=8, capacity=16))
        theirs.REGISTRY.install("other", other)
        with theirs.REGISTRY.active("other"):
            torch.testing.assert_close(run(ROWS, POSITION.unsqueeze(1)), EXPECTED)
            with op.active(cache):  # the active cache takes precedence
                run(ROWS, POSITION)
        assert (other.used(0), cache.length) == (3, 3)
        cache.clear()


def lower(programs):
    from etkv._mlx_serialization import ensure_available

    ensure_available()
    from executorch import exir
    from executorch.backends.mlx import MLXPartitioner

    config = exir.EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    for program in programs:
        edge = exir.to_edge_transform_and_lower(program, partitioner=[MLXPartitioner()], compile_config=config)
        calls = [str(node.target) for node in edge.exported_program().graph.nodes if node.op == "call_function"]
        assert not any("update_and_attend" in call for call in calls), "left to portable kernels"


def main(words):
    warnings.simplefilter("ignore")
    traced, exported = [], []
    for word in words:
        match word:
            case "ours":
                import etkv.op  # noqa: F401
            case "theirs":
                import executorch.extension.llm.cache.update_and_attend  # noqa: F401
            case "trace":
                exported.append(trace(traced))
            case "check":
                check(traced)
            case "lower":
                lower(exported)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1:])
