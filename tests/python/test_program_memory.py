"""The exporter's memory plan of a program."""

from __future__ import annotations

import random

import torch

from etkv.export import memory


def _specs(lifetimes):
    """Return specs of tensors from tuples ``(bytes, first instruction, last instruction)``."""
    from executorch.exir.tensor import TensorSpec

    made = []
    for size, first, last in lifetimes:
        spec = TensorSpec(torch.uint8, torch.Size([size]))
        spec.lifetime = [first, last]
        made.append(spec)
    return made


def _plan(specs):
    result = memory.plan(16, set(specs), torch.nn.Module(), None)
    return [result.spec_dict[spec].mem_offset for spec in specs], result.bufsizes


def test_tensors_of_layers_stay_low_beneath_large_logits():
    """The lifetime of each tensor overlaps that of the tensor before it, and all end before the logits begin."""
    chain = [(4096, at, at + 1) for at in range(50)]
    offsets, sizes = _plan(_specs([*chain, (1 << 20, 60, 61)]))
    assert max(offsets) == 4096
    assert sizes == [0, 1 << 20]


def test_tensors_that_live_together_are_apart():
    numbers = random.Random(1)
    for _ in range(50):
        lifetimes = []
        for _ in range(numbers.randint(1, 60)):
            first = numbers.randint(0, 30)
            lifetimes.append((16 * numbers.randint(1, 64), first, first + numbers.randint(0, 8)))
        offsets, sizes = _plan(_specs(lifetimes))
        ends = [offset + size for offset, (size, _, _) in zip(offsets, lifetimes, strict=True)]
        assert sizes == [0, max(ends)]
        for one, (_, first, last) in enumerate(lifetimes):
            for other, (_, begin, end) in enumerate(lifetimes[:one]):
                if first <= end and begin <= last:
                    assert ends[one] <= offsets[other] or ends[other] <= offsets[one]
