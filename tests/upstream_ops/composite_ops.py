"""Speeds up exports in tests: torch looks through all of its operators for the composite ones twice in each."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._export.utils
import torch.export.decomp_utils
import torch.export.exported_program

_FIND = "_collect_all_valid_cia_ops"


@functools.cache
def look_up_once() -> None:
    """Look for the composite operators again only when this process has more operators than before.

    Programs are the same, and small ones take three quarters of the time. The modules of torch that ask have the
    function by its name: a release that has it elsewhere fails here.
    """
    find = getattr(torch._export.utils, _FIND)
    found: dict[int, set[Any]] = {}

    def find_once() -> set[Any]:
        n_ops = len(torch._C._dispatch_get_all_op_names())
        if n_ops not in found:
            found[n_ops] = find()
        return found[n_ops]

    for module in (torch.export.decomp_utils, torch.export.exported_program):
        assert hasattr(module, _FIND), f"{module.__name__} lacks {_FIND}"
        setattr(module, _FIND, find_once)
