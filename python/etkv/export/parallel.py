"""Runs work on parts of a matrix in parallel."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def by_parts(n: int, step: int, work: Callable[[slice], None]) -> None:
    """Call ``work`` for slices of ``step`` of ``n`` rows, on as many threads as torch uses for an operation.

    Each slice runs on one thread. Raises what ``work`` raises.
    """
    n_threads = torch.get_num_threads()
    parts = [slice(first, min(first + step, n)) for first in range(0, n, step)]
    if n_threads == 1 or len(parts) == 1:
        for part in parts:
            work(part)
        return
    try:
        # Nested threads of torch's operations would slow each other down. New threads inherit the number set here.
        torch.set_num_threads(1)
        with ThreadPoolExecutor(n_threads) as pool:
            list(pool.map(work, parts))
    finally:
        torch.set_num_threads(n_threads)
