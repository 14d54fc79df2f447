"""Work on parts of a matrix, on all cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def by_parts(n: int, step: int, work: Callable[[slice], None]) -> None:
    """Call ``work`` for slices of ``step`` of ``n`` rows, on as many threads as torch's operations have.

    Each part is the work of one core. Raises what ``work`` raises.
    """
    n_threads = torch.get_num_threads()
    parts = [slice(first, min(first + step, n)) for first in range(0, n, step)]
    if n_threads == 1 or len(parts) == 1:
        for part in parts:
            work(part)
        return
    try:
        # The threads of the operations would wait for each other. A new thread takes the number that is set last.
        torch.set_num_threads(1)
        with ThreadPoolExecutor(n_threads) as pool:
            list(pool.map(work, parts))
    finally:
        torch.set_num_threads(n_threads)
