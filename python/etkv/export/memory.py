"""Places the tensors of a program in its memory.

ExecuTorch's own plan puts a tensor above all that live with it. Where the logits of a long step make the memory large,
the tensors of the layers climb through all of it, and all of it counts as the process's in a long step.
"""

from __future__ import annotations

from typing import Any


def plan(alignment: int, specs: set[Any], graph_module: Any, graph_signature: Any, extra_padding: int = 0) -> Any:
    """Return where ``specs`` lie: each at the lowest place that is free as long as it lives, the largest first.

    Offsets and sizes are in bytes. Graphs whose tensors share a storage, and parts of a graph, get ExecuTorch's plan.
    """
    from executorch.exir import memory_planning

    made = memory_planning.greedy(alignment, specs, graph_module, graph_signature, extra_padding)
    shared = any(spec.storage_base is not None for spec in made.spec_dict)
    if shared or getattr(graph_module, "input_mem_buffer_sizes", None):
        return made
    sizes = [0] * len(made.bufsizes)
    # For each memory its tensors: the first and last instruction, and the bytes from and to.
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
        # One object, in which tensors have offsets.
        result.mem_offset, result.mem_obj_id = begin, 0
    made.bufsizes = sizes
    return made
