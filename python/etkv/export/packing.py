"""Packs the weights of a model as they are read, a layer at a time.

The layers of a model are never in memory together: a layer's weights are packed when transformers has read all of
them, and what was packed lies in files. A layer keeps its class and the hooks on it, and packed weights take the place
of its own. Layers with the same weights, such as an embedding and a head that is tied to it, share the packed ones.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

import torch
from transformers.pytorch_utils import Conv1D

from etkv.errors import EtkvError
from etkv.export import experts, latent, scaled_experts, unpacked
from etkv.export.published.weight import Groups, joined
from etkv.export.scratch import Scratch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from etkv.export.published.weight import Weight


class PackedLayer(torch.nn.Module):
    """A linear layer or an embedding with packed weights, which stand for a matrix ``[rows, columns]``."""

    packed: torch.Tensor
    """The packed weights, or a part of them. Layers that share weights have the same."""

    etkv_is_transposed = False
    """Whether the model's own weight is the transposed matrix, as in the linear layers of GPT-2."""

    def plain(self) -> torch.Tensor:
        """Return the matrix, dequantized."""
        raise NotImplementedError

    def numel(self) -> int:
        """Return the number of weights."""
        layer: Any = self
        if isinstance(self, torch.nn.Linear):
            return layer.out_features * layer.in_features  # type: ignore[no-any-return]
        return layer.num_embeddings * layer.embedding_dim  # type: ignore[no-any-return]

    @property
    def weight(self) -> torch.Tensor:
        """The weights as the model has them, for code that reads a layer's weights by itself."""
        plain = self.plain()
        return plain.T.contiguous() if self.etkv_is_transposed else plain


class Packer(Protocol):
    """How a backend packs weights."""

    rounds: bool
    """Whether packed weights are integers: those of a file are then other ones, unless they are kept."""

    def pack(self, weight: torch.Tensor) -> Any:
        """Return the packed form of the matrix ``weight``. Raises :class:`ValueError` if it has none."""

    def keep(self, groups: Groups, dtype: torch.dtype) -> Any:
        """Return the packed form of integers and scales of a file, with just these; ``None`` if it has none.

        ``dtype`` is that of the model's weights. Scales are rounded to it, as other weights are.
        """

    def install(self, layer: Any, packed: Any) -> type[PackedLayer]:
        """Give what :meth:`pack` returned to a layer, and return the class that computes with it.

        The layer, of torch's ``Linear`` or ``Embedding``, has no weight any more.
        """

    def pack_experts(self, module: Any, pack: Callable[[str, torch.Tensor], Any]) -> None:
        """Pack the weights of a module of experts in place. Raises :class:`ValueError` if they cannot be.

        ``pack`` is :meth:`pack` for the rows of all experts of the weight of a name, or :meth:`keep` of the file's.
        """


class Packing:
    """The packing of one model. Without a ``packer`` weights stay as they are, but move to files.

    ``note`` is told the name of each module whose weights were read or packed.
    """

    def __init__(
        self, packer: Packer | None, scratch: Scratch, note: Callable[[str], None] = lambda path: None
    ) -> None:
        self._packer, self._scratch, self.note = packer, scratch, note
        # The id of a weight, or of what stands for it -> its packed form. The weight is there to keep its id its own.
        self._packed: dict[int, tuple[torch.Tensor, Any]] = {}
        # A module and the name of its weight -> the weights of the file that became it.
        self._stored: dict[tuple[torch.nn.Module, str], list[Weight]] = {}
        self.kept = 0
        """The number of matrices whose integers and scales are those of the file."""
        self.repacked = 0
        """The number of matrices that the file has as integers, and whose integers are others."""
        self._left: list[str] = []

    @contextlib.contextmanager
    def reading(self, is_packed: bool = True, taken: Callable[[], list[Weight]] = list) -> Iterator[None]:
        """Pack what transformers reads within the block. Weights that it may tie wait for :meth:`finish`.

        Without ``is_packed`` all wait. ``taken`` returns the weights that were read since its last call.
        """
        from transformers import core_model_loading

        place = core_model_loading.set_param_for_module
        packed: set[torch.nn.Module] | None = None

        def placed(model: PreTrainedModel, name: str, *arguments: Any) -> None:
            nonlocal packed
            place(model, name, *arguments)
            if packed is None:
                scaled_experts.take(model)
                packed = self._to_pack(model) if is_packed else set()
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            self._stored[module, attribute] = taken()
            weights = list(module.parameters(recurse=False))
            read = module._parameters.get(attribute)
            if read is not None and module not in packed and not read.is_meta:
                read.data = self._scratch.keep(read.data)
            size = 0 if read is None else read.nbytes
            if module in packed and not any(weight.is_meta for weight in weights):
                self._take(path, module)
            self.note(path)
            del weights, read
            self._scratch.used(size)

        # transformers has quantizers for this, but one a model, and a published quantization takes that place. Its
        # threads would read ahead of the packing.
        with (
            mock.patch.object(core_model_loading, "set_param_for_module", placed),
            mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
        ):
            yield
        self._scratch.release()

    def _to_pack(self, model: PreTrainedModel) -> set[torch.nn.Module]:
        """Return the modules of ``model``, which has no weights yet, that are packed as soon as they are read."""
        tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
        return {module for path, module in self._modules(model) if f"{path}.weight" not in tied}

    def _modules(self, model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module]]:
        """Return the modules of the text model in ``model`` whose weights are packed, with their names."""
        if self._packer is None:
            return
        kept = latent.expansions(model)
        for path, module in _modules_of_text(model):
            if module not in kept and (experts.are_plain(module) or is_linear(module) or _is_embedding(module)):
                yield path, module

    def _take(self, path: str, module: Any) -> None:
        """Pack the weights of ``module``, of a model that is being read."""
        if experts.are_plain(module):
            self._pack_experts(path, module)
            return
        # transformers ties and counts weights after this, so there is one of the same shape, of one element.
        stand_in = torch.nn.Parameter(module.weight.new_zeros(1).expand(module.weight.shape), requires_grad=False)
        stand_in._is_hf_initialized = True  # type: ignore[attr-defined]
        self._packed[id(stand_in)] = stand_in, self._pack(path, module, matrix(module))
        module.weight = stand_in

    def finish(self, model: PreTrainedModel) -> None:
        """Pack the weights of ``model`` that are not packed yet, and let its layers compute with packed weights."""
        modules = list(self._modules(model))
        for path, module in modules:
            if experts.are_plain(module):
                self._pack_experts(path, module)
                continue
            weight: torch.Tensor = module._parameters["weight"]  # type: ignore[assignment] # There is one.
            if id(weight) not in self._packed:
                self._packed[id(weight)] = weight, self._pack(path, module, matrix(module))
                self.note(path)
            own = _as_linear(module)
            del module._parameters["weight"]
            packed: Any = self._packer.install(module, self._packed[id(weight)][1])  # type: ignore[union-attr]
            module.__class__ = _class(own, packed)
            if not any(left.is_floating_point() for left in model.parameters()):
                _keep_dtype(model, weight.dtype)
        if self._packer is not None:
            self._left = unpacked.remarks(_modules_of_text(model))
        self._packed.clear()
        self._stored.clear()
        self._scratch.release()

    def remarks(self) -> list[str]:
        """Return which matrices are not packed, and what became of the integers that the source has."""
        made = list(self._left)
        if self.kept:
            made.append(f"{self.kept} matrices keep the integers and the groups that the source has")
        if self.repacked:
            made.append(
                f"{self.repacked} matrices are quantized again: the program cannot have their integers or groups"
            )
        return made

    def _pack(self, path: str, module: torch.nn.Module, weight: torch.Tensor) -> Any:
        try:
            return self._pack_matrix(module, "weight", weight)
        except ValueError as error:
            raise EtkvError(f"the weights of {path} cannot be packed: {error}") from error

    def _pack_experts(self, path: str, module: Any) -> None:
        def pack(name: str, weights: torch.Tensor) -> Any:
            return self._pack_matrix(module, name, weights)

        packer: Any = self._packer
        try:
            packer.pack_experts(module, pack)
        except ValueError as error:
            raise EtkvError(f"the weights of {path} cannot be packed: {error}") from error
        # A backend may have packed them without the function, and kept no integers.
        for key in [key for key in self._stored if key[0] is module]:
            stored = [part.groups() for part in self._stored.pop(key)]
            self.repacked += packer.rounds and any(groups is not None for groups in stored)

    def _pack_matrix(self, module: torch.nn.Module, name: str, weight: torch.Tensor) -> Any:
        """Return the packed form of a matrix of ``module``: the integers of the file, if the backend takes them."""
        packer: Any = self._packer
        stored = [part.groups() for part in self._stored.pop((module, name), [])]
        whole = [groups for groups in stored if groups is not None]
        if whole:
            found = _assembled(whole, weight) if len(whole) == len(stored) else None
            kept = None if found is None else packer.keep(found, weight.dtype)
            if kept is not None:
                self.kept += 1
                return kept
            self.repacked += packer.rounds
        return packer.pack(weight.detach())


def _assembled(parts: list[Groups], weight: torch.Tensor) -> Groups | None:
    """Return the integers of ``parts`` whose values are ``weight``, ``[rows, columns]``; None if none are.

    A loader puts the weights of experts one after the other, or, if a matrix has two products of each expert, after
    the other products. It may also transpose or cut what it read.
    """
    half = len(parts) // 2
    orders = [parts]
    if len(parts) % 2 == 0:
        orders.append([part for pair in zip(parts[:half], parts[half:], strict=True) for part in pair])
    for order in orders:
        made = joined(order)
        if made is not None and made.codes.shape == weight.shape:
            values = made.values().to(weight.dtype)
            if torch.equal(values, weight):
                return made
    return None


def _keep_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let ``model`` have a dtype without parameters of its own: transformers takes that of the first."""
    known = type(model)
    model.__class__ = type(known.__name__, (known,), {"dtype": dtype, "__module__": known.__module__})


def _modules_of_text(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module]]:
    """Return the modules of the text model in ``model``, with their names."""
    of_text = type(model.config.get_text_config())
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    configs = [(module, type(module.config)) for module in model.modules() if hasattr(module, "config")]
    wholes = [module for module, config in configs if config is of_text]
    # A part for images or sound may lie within the model.
    others = [module for module, config in configs if config not in (of_text, type(model.config))]
    found = {module for whole in (*wholes, *ends) if whole is not None for module in whole.modules()}
    found -= {module for other in others for module in other.modules()} - set(ends)
    return ((path, module) for path, module in model.named_modules() if module in found)


def is_linear(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is a linear layer with plain weights, which may be transposed."""
    return isinstance(module, torch.nn.Linear | Conv1D) and not isinstance(module, PackedLayer)


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding) and not isinstance(module, PackedLayer)


def matrix(layer: Any) -> torch.Tensor:
    """Return the weights of a linear layer or an embedding, ``[rows, columns]``. A row makes one output."""
    weight: torch.Tensor = layer.weight
    return weight.T if isinstance(layer, Conv1D) else weight


def _as_linear(layer: Any) -> Any:
    """Return the class of ``layer``. A linear layer with transposed weights becomes one of torch's."""
    if not isinstance(layer, Conv1D):
        return type(layer)
    layer.in_features, layer.out_features = layer.weight.shape
    layer.etkv_is_transposed = True
    layer.__class__ = torch.nn.Linear
    return torch.nn.Linear


@functools.cache
def _class(own: Any, packed: Any) -> Any:
    """Return a class that computes what ``own`` does, with ``packed`` for the product or the rows."""
    if own in packed.__mro__:
        return packed
    return type(f"Packed{own.__name__}", (own, packed), {})


@contextlib.contextmanager
def without_products(model: torch.nn.Module) -> Iterator[None]:
    """Let packed linear layers of ``model`` return elements of their input, for a run in which only shapes matter.

    Unpacking all weights of a model takes much longer than the rest of such a run.
    """
    # A model's own class may do more than the product, which it gets from the packed class.
    products = {
        base
        for _, layer in layers(model)
        for base in type(layer).__mro__
        if issubclass(base, PackedLayer) and issubclass(base, torch.nn.Linear) and "forward" in vars(base)
    }

    def elements(layer: Any, input: torch.Tensor) -> torch.Tensor:
        places = torch.arange(layer.out_features) % layer.in_features
        return input.index_select(-1, places)

    with contextlib.ExitStack() as patches:
        for base in products:
            patches.enter_context(mock.patch.object(base, "forward", elements))
        yield


def layers(model: torch.nn.Module) -> Iterator[tuple[str, PackedLayer]]:
    """Return the layers of ``model`` with packed weights, each with its name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, PackedLayer))


def share(layer: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Return whether two layers have the same weights."""
    if isinstance(layer, PackedLayer) and isinstance(other, PackedLayer):
        return layer.packed is other.packed
    return layer.weight is other.weight
