"""A request to export, and the checks that need no model."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from etkv.errors import EtkvError

DTYPES = {
    "float32": "float32",
    "f32": "float32",
    "float16": "float16",
    "f16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
"""Accepted spellings -> torch's name of the dtype."""

BACKENDS = {"mlx": ("4w", "8w"), "cpu": ("8da4w", "8da8w")}
"""A backend -> its quantizations of weights."""

QUANTIZATIONS = {"4w": 32, "8w": None, "8da4w": 32, "8da8w": None}
"""Quantization of weights -> default group size in elements; ``None`` is one scale for each row."""

GROUP_SIZES = (32, 64, 128)
"""Group sizes, in elements, that MLX's quantized matrix products support."""

DEFAULT_MAX_CONTEXT = 8192
"""The default context of a program, in tokens. It is limited by the context of the model."""

DEFAULT_PREFILL_CHUNK = 512
"""The default prefill chunk: the maximum tokens in one execution of a program."""

LOGITS = ("all", "last")
"""The rows of logits that a step returns: a row for each token, or only the row of the last token."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""The form of an id on the Hugging Face hub: an owner and a name."""

_TRIAL = 1 << 16
"""Bytes of a trial file."""

MAX_TOKENS = (1 << 31) - 1
"""Maximum context and prefill chunk, in tokens: programs store sizes of tensors in 32 bits."""

MIN_STEP = 2
"""Minimum context and prefill chunk, in tokens, because a dynamic dimension needs at least two lengths: 1 and 2."""


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of one export.

    ``model`` is a Hugging Face model folder or a ``.gguf`` file. ``backend`` is the backend of the program: ``mlx``, or
    ``cpu`` for XNNPACK and the kernels of ExecuTorch and etkv. ``output`` is the ``.pte`` to write; other files that a
    runner needs are written to the same folder. ``dtype`` is the dtype of activations and of weights that are not
    quantized; on the CPU, ``bfloat16`` applies only to the weights of linear layers, embeddings and experts.
    ``quantize`` names the quantization of linear and embedding weights. ``group_size`` counts elements, ``max_context``
    and ``prefill_chunk`` count tokens; ``None`` is the default. ``keep_hf`` is a folder for the exported weights,
    dequantized, as a Hugging Face model.

    ``layers`` exports only the model's first layers, with its final norm and its head: a draft of the model. ``draft``
    exports its last layers, which read the hidden states of the layer below them. ``logits`` selects the rows of logits
    that a step returns, ``all`` or ``last``. ``tap_layers`` are indices of layers, from 0. Their concatenated outputs
    are a second output of the program.

    ``verify`` compares the program with the model before it is written; ``None`` compares models of less than a billion
    parameters.
    """

    model: Path
    output: Path
    backend: str = "mlx"
    dtype: str = "float32"
    quantize: str | None = None
    group_size: int | None = None
    max_context: int | None = None
    prefill_chunk: int | None = None
    keep_hf: Path | None = None
    layers: int | None = None
    draft: int | None = None
    logits: str = "all"
    tap_layers: tuple[int, ...] = ()
    verify: bool | None = None

    @property
    def activations(self) -> str:
        """Return torch's name of the dtype of activations. On the CPU it is always float32."""
        return "float32" if self.backend == "cpu" else DTYPES[self.dtype]

    def validated(self) -> ExportRequest:
        """Return the request with torch's name of the dtype and with absolute paths.

        Raises :class:`EtkvError` if the request is invalid for every model. Limits that depend on the model are checked
        later, after its configuration is read.
        """
        model = _existing(self.model)
        # Check before anything is written, including folders and trial files.
        _spares(model, "output", self.output, self.output.absolute().parent)
        if self.keep_hf is not None:
            _spares(model, "keep-hf", self.keep_hf, self.keep_hf)
        return ExportRequest(
            model=model,
            output=_writable_program(self.output),
            backend=_one_of("backend", self.backend, BACKENDS),
            dtype=_dtype(self.dtype, self.backend),
            quantize=_quantization(self.quantize, self.backend, self.dtype),
            group_size=_group_size(self.group_size, self.quantize, self.backend),
            max_context=_tokens("max-context", self.max_context),
            prefill_chunk=_tokens("prefill-chunk", self.prefill_chunk),
            keep_hf=_writable_folder(self.keep_hf) if self.keep_hf is not None else None,
            layers=_at_least("layers", self.layers, 1),
            draft=_draft(self),
            logits=_one_of("logits", self.logits, LOGITS),
            tap_layers=_tap_layers(self.tap_layers),
            verify=self.verify,
        )


def _spares(model: Path, name: str, given: Path, folder: Path) -> None:
    """Raise :class:`EtkvError` if writing to ``folder`` could replace files of the model.

    This is possible if ``folder`` is in the model's folder, or has a file that the model links to. Links are resolved.
    The folder of a GGUF file is accepted, because an export writes no file with the GGUF file's name.
    """
    if not model.is_dir():
        return
    folder = folder.resolve()
    if any(_is_same(parent, model) for parent in (folder, *folder.parents)):
        where = f"is inside the model's folder {model}"
    elif any(_is_same(folder, file.resolve().parent) for file in _files(model) if file.is_symlink()):
        where = f"has files that the model {model} links to"
    else:
        return
    raise EtkvError(f"{name} {given} {where}, whose files the export would replace; choose a folder outside of it")


def _files(model: Path) -> list[Path]:
    try:
        return list(model.iterdir())
    except OSError as error:
        raise EtkvError(f"model {model} cannot be read: {error.strerror}") from error


def _is_same(folder: Path, other: Path) -> bool:
    try:
        return folder.samefile(other)
    except OSError:
        # One of the paths does not exist yet, or cannot be read.
        return False


def _existing(model: Path) -> Path:
    expected = "expected a Hugging Face model folder or a .gguf file"
    try:
        model.stat()
    except (FileNotFoundError, NotADirectoryError):
        if _HUB_ID.fullmatch(str(model)):
            expected += f"; to export a model of the hub, run hf download {model} --local-dir DIR, and name DIR"
        raise EtkvError(f"model {model} does not exist; {expected}") from None
    except (OSError, ValueError) as error:
        raise EtkvError(f"model {model} cannot be read: {_reason(error)}; {expected}") from error
    return model.absolute()


def _writable_program(output: Path) -> Path:
    if output.suffix != ".pte":
        raise EtkvError(f"output is {output}, expected a file name that ends in .pte")
    try:
        found = output.stat()
    except (FileNotFoundError, NotADirectoryError):
        found = None
    except (OSError, ValueError) as error:
        raise EtkvError(f"output {output} cannot be written: {_reason(error)}; choose another path") from error
    if found is not None and not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a file"
        raise EtkvError(f"output {output} is {kind}, expected a file name that ends in .pte")
    _writable_folder(output.absolute().parent)
    return output.absolute()


def _writable_folder(folder: Path) -> Path:
    """Write a trial file to ``folder``, or if it does not exist, to its innermost parent that exists. Return the
    absolute path of ``folder``.

    Creates nothing that stays. Raises :class:`EtkvError` if that fails, so that an export does not fail at its end.
    """
    folder = folder.absolute()
    parent = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not parent.is_dir():
        raise EtkvError(f"folder {folder} is not writable: {parent} is not a folder; choose another folder")
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            # A full disk has room for a file without contents.
            file.write(bytes(_TRIAL))
            file.flush()
    except (OSError, ValueError) as error:
        raise EtkvError(f"folder {folder} is not writable: {_reason(error)}; choose another folder") from error
    return folder


def _reason(error: OSError | ValueError) -> str:
    """Return the reason for a failed access to a path. A path with a zero byte is a :class:`ValueError`."""
    return str(error.strerror if isinstance(error, OSError) else error)


def _one_of(option: str, name: str, known: Collection[str]) -> str:
    if name not in known:
        raise EtkvError(f"{option} {name!r} is not one of {', '.join(known)}")
    return name


def _dtype(name: str, backend: str) -> str:
    _one_of("dtype", name, DTYPES)
    if backend == "cpu" and DTYPES[name] == "float16":
        raise EtkvError(f"dtype {name!r} is not supported by backend cpu; expected float32, or bfloat16 for weights")
    return DTYPES[name]


def _quantization(name: str | None, backend: str, dtype: str) -> str | None:
    if name is not None and name not in BACKENDS[backend]:
        raise EtkvError(
            f"quantize {name!r} is not supported by backend {backend}; expected {', '.join(BACKENDS[backend])}"
        )
    if name is not None and backend == "cpu" and _dtype(dtype, backend) != "float32":
        raise EtkvError(f"dtype {dtype!r} and quantize {name!r} are both for weights on backend cpu; leave one out")
    return name


def _group_size(size: int | None, quantize: str | None, backend: str) -> int | None:
    if size is None:
        return None
    if quantize is None:
        raise EtkvError(f"group-size {size} needs --quantize {' or '.join(BACKENDS[backend])}")
    if size not in GROUP_SIZES:
        raise EtkvError(f"group-size {size} is not one of {', '.join(map(str, GROUP_SIZES))}")
    return size


def _at_least(name: str, value: int | None, minimum: int) -> int | None:
    if value is not None and value < minimum:
        raise EtkvError(f"{name} {value} is below the minimum of {minimum}")
    return value


def _tokens(name: str, value: int | None) -> int | None:
    if value is not None and value > MAX_TOKENS:
        raise EtkvError(f"{name} {value} is above the maximum of {MAX_TOKENS}")
    return _at_least(name, value, MIN_STEP)


def _tap_layers(indices: tuple[int, ...]) -> tuple[int, ...]:
    indices = tuple(indices)
    for place, index in enumerate(indices):
        _at_least("tap-layers", index, 0)
        if index in indices[:place]:
            raise EtkvError(f"tap-layers has {index} twice")
    return indices


def _draft(request: ExportRequest) -> int | None:
    if request.draft is not None:
        for name in ("layers", "tap_layers", "keep_hf"):
            if getattr(request, name):
                raise EtkvError(f"draft and {name.replace('_', '-')} do not go together")
    return _at_least("draft", request.draft, 1)
