"""Lets ExecuTorch read weights while it writes a program, instead of copying them beforehand.

ExecuTorch can write data from files. But its exporter passes the bytes of every tensor, and makes several copies of
the weights. Within :func:`streaming`, :class:`TensorData` replaces these bytes.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from executorch.exir import lowered_backend_module
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails
from executorch.exir.emit._emitter import _Emitter
from executorch.exir.schema import EValue, TensorDataLocation
from executorch.exir.tensor import TensorSpec, make_tensor_value
from executorch.exir.tensor_layout import TensorLayout
from torch.export import ExportedProgram
from torch.fx.passes.tools_common import legalize_graph

from etkv.export.scratch import SMALL, Scratch

_PIECE = 1 << 26
"""Number of bytes that are written at once."""


@contextlib.contextmanager
def streaming(scratch: Scratch) -> Iterator[None]:
    """Stream the weights of programs that are written within the block."""
    add, emit = NamedDataStore.add_named_data, _Emitter._tensor_spec_to_evalue

    def added(
        store: NamedDataStore,
        key: str,
        data: bytes | FileBackedData | torch.Tensor,
        alignment: int | None = 1,
        external_tag: str | None = None,
        tensor_layout: TensorLayout | None = None,
    ) -> None:
        if isinstance(data, torch.Tensor) and data.nbytes > SMALL:
            data, tensor_layout = TensorData(data, scratch), TensorLayout.from_tensor(data)
        add(store, key, data, alignment, external_tag, tensor_layout)

    def emitted(emitter: Any, spec: TensorSpec, constant_tag: str | None = None) -> EValue:
        is_weight = spec.const and spec.mem_id is None and spec.storage.nbytes() > SMALL
        info = spec.extra_tensor_info
        if not is_weight or (info is not None and info.location == TensorDataLocation.EXTERNAL):
            return emit(emitter, spec, constant_tag)
        data = TensorData(torch.empty(0, dtype=torch.uint8).set_(spec.storage), scratch)
        digest = data.sha256().hex()
        at = emitter.program_state.cached_spec_hash_values.get(digest)
        if at is None:
            at = emitter._save_new_const_tensor(spec, data, digest)
        return EValue(make_tensor_value(at, None, spec))

    # ExecuTorch copies the program for each delegate, because a delegate may change its copy. No delegate changes a
    # tensor, so the tensors need no copies.
    with (
        mock.patch.object(NamedDataStore, "add_named_data", added),
        mock.patch.object(_Emitter, "_tensor_spec_to_evalue", emitted),
        mock.patch.object(lowered_backend_module, "legalize_graph", _sorted),
        mock.patch.object(BackendDetails, "copy_exported_program_for_preprocess", classmethod(_copied)),
    ):
        yield


def _sorted(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return ``module`` with its nodes in topological order.

    ExecuTorch sorts the whole graph for each delegate. Most graphs are sorted already.
    """
    seen: set[torch.fx.Node] = set()
    for node in module.graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            return legalize_graph(module)
        seen.add(node)
    return module


def _copied(backend: object, program: ExportedProgram, compile_specs: object) -> ExportedProgram:
    """Return a copy of ``program`` that shares its tensors."""
    tensors = (*program.state_dict.values(), *program.constants.values())
    return copy.deepcopy(program, {id(tensor): tensor for tensor in tensors})


class TensorData(FileBackedData):  # type: ignore[misc] # ExecuTorch's classes have no types.
    """The bytes of a tensor in a program. They are read when the program is written, without earlier copies."""

    def __init__(self, tensor: torch.Tensor, scratch: Scratch) -> None:
        # The base class would open a file.
        self._tensor = tensor.detach().contiguous()
        self._scratch = scratch
        self._digest: bytes | None = None

    def _content(self) -> memoryview:
        return memoryview(self._tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type] # It is a buffer.

    def __len__(self) -> int:
        """Return the number of bytes."""
        return self._tensor.nbytes

    def __deepcopy__(self, memo: object) -> TensorData:
        """Return the same object, because the data never changes."""
        return self

    def prefix(self, size: int) -> bytes:
        """Return the first bytes."""
        return bytes(self._content()[:size])

    def sha256(self) -> bytes:
        """Return the digest of the bytes."""
        if self._digest is None:
            self._digest = hashlib.sha256(self._content()).digest()
            self._scratch.used(len(self))
        return self._digest

    def to_bytes(self) -> bytes:
        """Return a copy of the bytes."""
        return bytes(self._content())

    def write_to_file(self, outfile: io.BufferedIOBase) -> None:
        """Write the bytes."""
        content = self._content()
        for first in range(0, len(content), _PIECE):
            outfile.write(content[first : first + _PIECE])
        self._scratch.used(len(self))

    def close(self) -> None:
        """Do nothing: the scratch folder removes its files."""
