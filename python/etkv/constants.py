"""Reads the constants of an exported ``.pte``: the weights in the format of the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etkv.description import describe_program
from etkv.errors import EtkvError


def read_constants(path: Path, index: int = 0) -> dict[str, Any]:
    """Return the constants of MLX delegate number ``index``, as torch tensors by their name in the source program.

    Packed quantized weights are uint32. For a constant that the program computes at load, the file has a scalar as a
    placeholder, and this function returns the scalar.
    """
    import numpy as np
    import torch
    from executorch.exir._serialize._program import deserialize_pte_binary

    described = describe_program(path, index)["constants"]["tensors"]
    file = deserialize_pte_binary(path.read_bytes())
    if file.named_data is None:
        raise EtkvError(f"{path} has no constants")
    entries, buffers = file.named_data.pte_data, file.named_data.buffers
    constants: dict[str, Any] = {}
    for constant in described:
        name = constant["name"]
        data = np.frombuffer(bytes(buffers[entries[name].buffer_index]), "uint8").copy()
        tensor = torch.from_numpy(data).view(getattr(torch, constant["dtype"])).reshape(constant["shape"])
        constants[name.split("/", 1)[-1]] = tensor
    return constants
