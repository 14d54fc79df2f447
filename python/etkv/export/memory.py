"""Plans the memory of a program's tensors.

ExecuTorch's own plan places a tensor above all tensors with an overlapping lifetime. If the logits of a long step make
the arena large, the tensors of the layers are spread over the whole arena, and a long step touches all its pages.
"""

from __future__ import annotations

from typing import Any


def plan(alignment: int, specs: set[Any], graph_module: Any, graph_signature: Any, extra_padding: int = 0) -> Any:
    """Plan ``specs`` by size, the largest first: each gets the lowest offset that is free during its lifetime.

    Offsets and sizes are in bytes. Graphs whose tensors share storage, and subgraphs, get ExecuTorch's plan.
    """
    from executorch.exir import memory_planning

    made = memory_planning.greedy(alignment, specs, graph_module, graph_signature, extra_padding)
    shared = any(spec.storage_base is not None for spec in made.spec_dict)
    if shared or getattr(graph_module, "input_mem_buffer_sizes", None):
        return made
    sizes = [0] * len(made.bufsizes)
    # For each arena, the first and last instruction of each tensor, its first byte and its end.
    placed: list[list[tuple[int, int, int, int]]] = [[] for _ in sizes]
    for spec in sorted(made.spec_dict, key=lambda spec: (-spec.allocated_memory, spec.lifetime)):
        result, (first, last) = made.spec_dict[spec], spec.lifetime
        others = placed[result.mem_id]
        begin = 0
        for low, high in sorted((low, high) for start, end, low, high in others if start <= last and first <= end):
            if begin + spec.allocated_memory <= low:
                break
            begin = max(begin, high)
        end = begin + spec.allocated_memory
        others.append((first, last, begin, end))
        sizes[result.mem_id] = max(sizes[result.mem_id], end + extra_padding)
        # All tensors of an arena are in one memory object.
        result.mem_offset, result.mem_obj_id = begin, 0
    made.bufsizes = sizes
    return made
