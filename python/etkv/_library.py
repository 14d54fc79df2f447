"""Finds and loads the native libraries, and the MLX and ExecuTorch libraries that they need.

libetkv and libetkv_mlx_backend contain no path to MLX or ExecuTorch. This module first loads both from the installed
packages. So the process has one copy of each library, which ``import mlx`` and ``import executorch`` use too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import sys
import threading
import types
from pathlib import Path

from etkv.errors import EtkvError

_PACKAGE = Path(__file__).resolve().parent
_OWN = (_PACKAGE / "lib", _PACKAGE.parents[1] / "build" / "lib")
"""The folders of the native libraries in a wheel and in a checkout."""

_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"

MLX_VERSION = "0.32.2"
EXECUTORCH_VERSION = "1.5.1"

MLX_BACKEND = "MLXBackend"
"""The backend id in MLX programs."""

OWN_BACKEND = "EtkvForMLX"
"""The id under which the delegate is always registered, see ``etkv/backend_id.hpp``. Programs with recurrent layers
have this id."""

FOR_MLX = frozenset({MLX_BACKEND, OWN_BACKEND})
"""The ids of delegates in MLX programs."""

CPU_DELEGATE = "EtkvForCPU"
"""The id of etkv's delegates in CPU programs."""

_EXTENSION = "executorch.extension.pybindings.portable_lib"
"""ExecuTorch's extension module for Python."""

EXECUTORCH_CALLS = threading.RLock()
"""Held while ExecuTorch's Python module loads or runs anything.

That module redirects the process's ``std::cerr`` during each call. Two concurrent calls leave ``std::cerr`` with a
pointer to a freed buffer, and the next log line crashes the process.
"""


@functools.cache
def etkv() -> Path:
    """Load MLX, then libetkv, which has the caches. Return the path of libetkv.

    Needs neither torch nor ExecuTorch. Raises :class:`EtkvError` if MLX or a library is missing, is of another release
    or cannot be loaded.
    """
    _require("mlx", MLX_VERSION, "pip install 'mlx[cpu]==%s'" if sys.platform != "darwin" else "pip install mlx==%s")
    mlx = installed("mlx", f"mlx/lib/libmlx{_SUFFIX}")
    if not mlx.is_file():
        raise EtkvError(
            f"mlx {MLX_VERSION} is installed without the part that computes: pip install 'mlx[cpu]=={MLX_VERSION}', "
            "or mlx[cuda13] for NVIDIA GPUs"
        )
    blas = folder() / f"libetkv_blas{_SUFFIX}"
    if sys.platform == "linux" and blas.is_file():
        # libetkv_blas replaces MLX's matrix products, so it is loaded before MLX. It needs OpenBLAS to be loaded
        # already. Without OpenBLAS, MLX's own products run.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            openblas = installed("scipy-openblas32", "scipy_openblas32/lib/libscipy_openblas.so")
            if openblas.is_file():
                _load(openblas)
        _load(blas)
    _load(mlx)
    library = folder() / f"libetkv{_SUFFIX}"
    _load(library)
    return library


def backends() -> str:
    """Load the delegates into ExecuTorch's runtime. Return the id of the backend for MLX programs.

    The id is ``MLXBackend``, or :data:`OWN_BACKEND` if another backend was registered as ``MLXBackend`` before. Imports
    torch and the runtime, which takes a second.

    Raises :class:`EtkvError` if ExecuTorch, MLX or the native libraries are missing or of another release, or if the
    process has two copies of libexecutorch.
    """
    _delegate()
    portable_lib = runtime()

    # The CPU backend needs libraries of ExecuTorch that the import has loaded.
    _load(folder() / f"libetkv_cpu_backend{_SUFFIX}")
    for library, backend in (("libetkv_mlx_backend", OWN_BACKEND), ("libetkv_cpu_backend", CPU_DELEGATE)):
        if not portable_lib._is_available(backend):
            raise EtkvError(
                f"{library} is loaded, but {backend} is not registered in ExecuTorch: libexecutorch is loaded twice; "
                "start a new process, and import nothing that loads another copy"
            )
    return MLX_BACKEND if _backend(MLX_BACKEND) == _backend(OWN_BACKEND) else OWN_BACKEND


def runtime() -> types.ModuleType:
    """Import ExecuTorch's runtime, without its exporter if possible. Return its extension module.

    The runtime imports one class from a package whose import loads the whole exporter. Loading the exporter takes 4 of
    the 5 seconds of a first import.
    """
    name = "executorch.exir._warnings"
    import executorch  # A namespace package.

    spec = None
    if not {_EXTENSION, "executorch.exir"} & sys.modules.keys() and not hasattr(executorch, "exir"):
        file = installed("executorch", "executorch/exir/_warnings.py")
        spec = importlib.util.spec_from_file_location(name, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        return importlib.import_module(_EXTENSION)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The import statement in the runtime takes the class from these two places. They are emptied again afterwards, so
    # that a later import of the exporter loads all of the exporter.
    package = types.SimpleNamespace(_warnings=module)
    sys.modules[name], executorch.exir = module, package
    try:
        return importlib.import_module(_EXTENSION)
    finally:
        if sys.modules.get(name) is module:
            del sys.modules[name]
        if getattr(executorch, "exir", None) is package:
            del executorch.exir


def go_first() -> None:
    """Load the delegate, if possible, before ExecuTorch's extension module is imported.

    On macOS that module registers ExecuTorch's own ``MLXBackend``, and the first backend of a name keeps the name.
    Errors are ignored here; :func:`backends` raises them when a program needs the delegate.
    """
    with contextlib.suppress(EtkvError):
        _delegate()


@functools.cache
def _delegate() -> None:
    _require("executorch", EXECUTORCH_VERSION, "pip install executorch==%s")
    etkv()
    # The extension module finds this copy too. Loading this copy needs no torch.
    _load(_libexecutorch())
    _load(folder() / f"libetkv_mlx_backend{_SUFFIX}")


def _libexecutorch() -> Path:
    return installed("executorch", f"executorch/lib/libexecutorch{_SUFFIX}")


def _backend(name: str) -> int | None:
    """Return the address of the backend with this id, or None. ExecuTorch's Python API exposes only the ids."""
    look_up = ctypes.CDLL(str(_libexecutorch()))["_ZN10executorch7runtime17get_backend_classEPKc"]
    look_up.restype, look_up.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    address: int | None = look_up(name.encode())
    return address


@functools.cache
def folder() -> Path:
    """Return the folder of the native libraries, in the wheel or in the build of a checkout.

    The environment variable ``ETKV_LIBRARY_DIR`` overrides both. Raises :class:`EtkvError` if there is no library.
    """
    override = os.environ.get("ETKV_LIBRARY_DIR")
    for candidate in [Path(override)] if override else _OWN:
        if (candidate / f"libetkv{_SUFFIX}").is_file():
            return candidate
    if override:
        raise EtkvError(f"ETKV_LIBRARY_DIR is {override}, which has no libetkv{_SUFFIX}")
    raise EtkvError(
        f"{_PACKAGE} has no native library: install a wheel (pip install .), or in a checkout run `make build`"
    )


def capi_tables() -> Path:
    """Return the path of the module that the build generated from ``etkv.h``: next to the library, or in the package.

    Raises :class:`EtkvError` if there is none.
    """
    for candidate in (folder(), *_OWN):
        path = candidate / "capi_tables.py"
        if path.is_file():
            return path
    raise EtkvError(f"{folder()} has no capi_tables.py: build it again, with a Python that has cffi (ETKV_PYTHON)")


def _require(package: str, version: str, install: str) -> None:
    """Raise :class:`EtkvError` unless exactly ``version`` of ``package`` is installed.

    The C++ interfaces of MLX and ExecuTorch change from release to release. ``install`` is a pip command with ``%s``
    for the version.
    """
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise EtkvError(f"etkv needs {package} {version}, which is not installed: {install % version}") from None
    if installed != version:
        raise EtkvError(f"etkv needs {package} {version}, {installed} is installed: {install % version}")


def installed(package: str, file: str) -> Path:
    """Return the path of a ``file`` of an installed ``package``. Does not import it."""
    return Path(str(importlib.metadata.distribution(package).locate_file(file)))


def _load(library: Path) -> None:
    try:
        # RTLD_GLOBAL, so that the delegate finds symbols of the runtime, and both find symbols of MLX.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise EtkvError(f"{library} cannot be loaded: {error}") from error
