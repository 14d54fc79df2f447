"""Packs the weights of a model while they are read, a layer at a time.

A model's layers are never in memory together: a layer's weights are packed as soon as transformers has read all of
them, and packed weights are in files. A layer keeps its class and its hooks, and packed weights replace its own. Layers
with the same weights, such as an embedding and a tied head, share packed weights.
"""

from __future__ import annotations

import contextlib
import functools
import math
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
    """A linear layer or an embedding with a packed matrix ``[rows, columns]``."""

    packed: torch.Tensor
    """The packed weights, or a part of them. Layers that share weights have the same tensor."""

    etkv_is_transposed = False
    """Whether the model's own weight is the transposed matrix, as in GPT-2's linear layers."""

    def plain(self) -> torch.Tensor:
        """Return the dequantized matrix."""
        raise NotImplementedError

    def etkv_shape(self) -> tuple[int, int]:
        """Return the rows and the columns."""
        layer: Any = self
        if isinstance(self, torch.nn.Linear):
            return layer.out_features, layer.in_features
        return layer.num_embeddings, layer.embedding_dim

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weights in the model's layout, for code that reads the weights of a layer."""
        plain = self.plain()
        return plain.T.contiguous() if self.etkv_is_transposed else plain


class FileIntegers(Protocol):
    """A function that returns the packed form of a file's integers, see :meth:`Packer.keep`."""

    def __call__(
        self, name: str, weights: torch.Tensor, arranged: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> Any:
        """Return the packed form of the file's integers, or None if the file has none or the integers cannot be kept.

        ``name`` is the name of a weight of a module, and ``weights`` are its values, ``[rows, columns]`` or
        ``[experts, rows, columns]``. ``arranged`` reorders the rows of a matrix to the order of the packed form.
        """


class Packer(Protocol):
    """The interface by which a backend packs weights."""

    rounds: bool
    """Whether packed weights are integers. A file's integers are then quantized again, unless they are kept."""

    def pack(self, weight: torch.Tensor) -> Any:
        """Return the packed form of the matrix ``weight``. Raises :class:`ValueError` if it has none."""

    def keep(self, groups: Groups, dtype: torch.dtype, of_experts: bool) -> Any:
        """Return the packed form of a file's integers and scales without changing them; ``None`` if that is impossible.

        ``dtype`` is that of the model's weights. Scales are rounded to it, like other weights. ``of_experts`` is
        whether the matrix is one of experts.
        """

    def install(self, layer: Any, packed: Any) -> type[PackedLayer]:
        """Store the result of :meth:`pack` in a layer, and return the class that computes with it.

        The layer, a ``Linear`` or an ``Embedding`` of torch, no longer has its weight.
        """

    def pack_experts(self, module: Any, kept: FileIntegers) -> None:
        """Pack the weights of a module of experts. Raises :class:`ValueError` if that is impossible.

        ``kept`` returns the result of :meth:`keep` for the file's integers of a weight.
        """


class Packing:
    """The packing of one model. Without a ``packer``, weights are not packed, but still moved to files.

    ``note`` is called with the name of each module whose weights were read or packed.
    """

    def __init__(
        self, packer: Packer | None, scratch: Scratch, note: Callable[[str], None] = lambda path: None
    ) -> None:
        self._packer, self._scratch, self.note = packer, scratch, note
        # The id of a weight, or of its stand-in -> the weight and its packed form. While the weight lives, no other
        # object gets its id.
        self._packed: dict[int, tuple[torch.Tensor, Any]] = {}
        # A module and the name of its weight -> the weights of the file from which it was loaded.
        self._stored: dict[tuple[torch.nn.Module, str], list[Weight]] = {}
        self.kept = 0
        """The number of matrices that keep the file's integers and scales."""
        self.repacked = 0
        """The number of matrices that are quantized in the file, and are quantized again."""
        self._left: list[str] = []

    @contextlib.contextmanager
    def reading(self, is_packed: bool = True, taken: Callable[[], list[Weight]] = list) -> Iterator[None]:
        """Pack the weights that transformers reads within the block. Weights that may be tied wait for :meth:`finish`.

        Without ``is_packed`` all weights wait. ``taken`` returns the weights that were read since its last call.
        """
        from transformers import core_model_loading

        place = core_model_loading.set_param_for_module
        packed: set[torch.nn.Module] | None = None
        of_text: set[torch.nn.Module] = set()

        def placed(model: PreTrainedModel, name: str, *arguments: Any) -> None:
            nonlocal packed
            place(model, name, *arguments)
            if packed is None:
                scaled_experts.take(model)
                packed = self._to_pack(model) if is_packed else set()
                of_text.update(module for _, module in _modules_of_text(model))
            path, _, attribute = name.rpartition(".")
            module = model.get_submodule(path)
            self._stored[module, attribute] = taken()
            weights = list(module.parameters(recurse=False))
            read = module._parameters.get(attribute)
            # A packer that rounds checks the matrices that it packs.
            is_rounded = module in packed and attribute in _matrices(module) and getattr(self._packer, "rounds", False)
            if read is not None and module in of_text and not is_rounded:
                _check_finite(name, read)
            if read is not None and module not in packed and not read.is_meta:
                read.data = self._scratch.keep(read.data)
            size = 0 if read is None else read.nbytes
            if module in packed and not any(weight.is_meta for weight in weights):
                self._take(path, module)
            self.note(path)
            del weights, read
            self._scratch.used(size)

        # transformers has an interface for this, its quantizers. But a model has only one quantizer, and a published
        # quantization uses it. Asynchronous loading is disabled, because its threads would read ahead of the packing.
        with (
            mock.patch.object(core_model_loading, "set_param_for_module", placed),
            mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}),
        ):
            yield
        self._scratch.release()

    def _to_pack(self, model: PreTrainedModel) -> set[torch.nn.Module]:
        """Return the modules whose weights are packed once they are read. ``model`` has no weights yet."""
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
        """Pack the weights of ``module`` while the model is read."""
        if experts.are_plain(module):
            self._pack(path, module)
            return
        # transformers ties and counts weights later, so leave a parameter of the same shape, with storage of one
        # element.
        stand_in = torch.nn.Parameter(module.weight.new_zeros(1).expand(module.weight.shape), requires_grad=False)
        stand_in._is_hf_initialized = True  # type: ignore[attr-defined]
        self._packed[id(stand_in)] = stand_in, self._pack(path, module)
        module.weight = stand_in

    def finish(self, model: PreTrainedModel) -> None:
        """Pack the weights of ``model`` that are not packed yet, and let its layers compute with packed weights."""
        modules = list(self._modules(model))
        for path, module in modules:
            if experts.are_plain(module):
                self._pack(path, module)
                continue
            weight: torch.Tensor = module._parameters["weight"]  # type: ignore[assignment] # There is one.
            if id(weight) not in self._packed:
                self._packed[id(weight)] = weight, self._pack(path, module)
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
        """Return remarks on matrices that are not packed, and on the source's integers."""
        made = list(self._left)
        if self.kept:
            made.append(f"{self.kept} matrices keep the integers and the groups of the source")
        if self.repacked:
            made.append(
                f"{self.repacked} matrices of the source are quantized again: their integers or groups cannot be kept"
            )
        return made

    def _pack(self, path: str, module: torch.nn.Module) -> Any:
        """Pack the weights of ``module``. Return the packed form of a layer, and None for experts."""
        packer: Any = self._packer
        try:
            if experts.are_plain(module):
                return packer.pack_experts(module, functools.partial(self._kept, module, of_experts=True))
            weight = matrix(module)
            kept = self._kept(module, "weight", weight)
            return packer.pack(weight.detach()) if kept is None else kept
        except ValueError as error:
            raise EtkvError(f"the weights of {path} cannot be packed: {error}") from error

    def _kept(
        self,
        module: torch.nn.Module,
        name: str,
        weights: torch.Tensor,
        arranged: Callable[[torch.Tensor], torch.Tensor] | None = None,
        of_experts: bool = False,
    ) -> Any:
        """Return the packed form of a weight of ``module`` with the integers of the file, see :class:`FileIntegers`."""
        packer: Any = self._packer
        parts = self._stored.pop((module, name), [])
        stored = [part.groups() for part in parts]
        whole = [groups for groups in stored if groups is not None]
        if not whole:
            self.repacked += packer.rounds and any(part.is_quantized for part in parts)
            return None
        found = _assembled(whole, weights.flatten(0, -2)) if len(whole) == len(stored) else None
        if found is not None and arranged is not None:
            found = found.rows(arranged) if found.order is None else None
        kept = None if found is None else packer.keep(found, weights.dtype, of_experts)
        self.kept += kept is not None
        self.repacked += kept is None and packer.rounds
        return kept


def _matrices(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of ``module`` that packers pack. The others are biases."""
    return experts.names(module) if experts.are_plain(module) else ("weight",)


def _check_finite(name: str, weight: torch.Tensor) -> None:
    """Raise :class:`EtkvError` if ``weight`` has NaN or infinite values. If they are only in one row of an embedding or
    in one expert, most texts do not read them, and a comparison of the program with the model does not find them.
    """
    if weight.is_meta or not weight.is_floating_point() or not weight.numel():
        return
    # The minimum and the maximum are NaN if a value is NaN. Unlike isfinite, aminmax needs no memory.
    if not all(bool(torch.isfinite(bound)) for bound in torch.aminmax(weight)):
        count = weight.numel() - int(torch.isfinite(weight).sum())
        raise EtkvError(
            f"the weight {name} has {count} values of {weight.numel()} that are not finite in "
            f"{str(weight.dtype).removeprefix('torch.')}; repair the checkpoint, or choose another --dtype"
        )


def _assembled(parts: list[Groups], weight: torch.Tensor) -> Groups | None:
    """Combine ``parts`` to the integers of ``weight``, ``[rows, columns]``; return None if the values do not match.

    A loader concatenates the matrices of all experts. If a matrix has two products for each expert, a file may have all
    first products before all second products. Loaders that transpose or cut weights are not supported.
    """
    half = len(parts) // 2
    orders = [parts]
    if len(parts) % 2 == 0:
        orders.append([part for pair in zip(parts[:half], parts[half:], strict=True) for part in pair])
    for order in orders:
        made = joined(order)
        if made is not None and made.codes.shape == weight.shape:
            values = made.values().to(weight.dtype)
            # Packing anew refuses weights that are not finite. A finite scale times an integer may be infinite.
            if torch.equal(values, weight) and all(map(math.isfinite, values.aminmax())):
                return made
    return None


def _keep_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Set the dtype of ``model``, which has no parameters. transformers would use the dtype of the first parameter."""
    known = type(model)
    model.__class__ = type(known.__name__, (known,), {"dtype": dtype, "__module__": known.__module__})


def _modules_of_text(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module]]:
    """Return the modules of the text model in ``model``, with their names."""
    of_text = type(model.config.get_text_config())
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    configs = [(module, type(module.config)) for module in model.modules() if hasattr(module, "config")]
    wholes = [module for module, config in configs if config is of_text]
    # The model may contain a part for images or sound.
    others = [module for module, config in configs if config not in (of_text, type(model.config))]
    found = {module for whole in (*wholes, *ends) if whole is not None for module in whole.modules()}
    found -= {module for other in others for module in other.modules()} - set(ends)
    return ((path, module) for path, module in model.named_modules() if module in found)


def is_linear(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is a linear layer with plain weights. The weights may be transposed."""
    return isinstance(module, torch.nn.Linear | Conv1D) and not isinstance(module, PackedLayer)


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding) and not isinstance(module, PackedLayer)


def matrix(layer: Any) -> torch.Tensor:
    """Return the weights of a linear layer or an embedding, ``[rows, columns]``. A row is the weights of one output."""
    weight: torch.Tensor = layer.weight
    return weight.T if isinstance(layer, Conv1D) else weight


def _as_linear(layer: Any) -> Any:
    """Return the class of ``layer``. For a linear layer with transposed weights, return torch's ``Linear``."""
    if not isinstance(layer, Conv1D):
        return type(layer)
    layer.in_features, layer.out_features = layer.weight.shape
    layer.etkv_is_transposed = True
    layer.__class__ = torch.nn.Linear
    return torch.nn.Linear


@functools.cache
def _class(own: Any, packed: Any) -> Any:
    """Return a class that computes like ``own``, but with ``packed`` for the product or the rows."""
    if own in packed.__mro__:
        return packed
    return type(f"Packed{own.__name__}", (own, packed), {})


@contextlib.contextmanager
def without_products(model: torch.nn.Module) -> Iterator[None]:
    """Skip the products of packed linear layers of ``model``, for a run in which only shapes matter.

    The layers return elements of their input. Unpacking all weights would take much longer than the rest of the run.
    """
    # A model's own class may do more than the product, so only the product of the packed class is replaced.
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
