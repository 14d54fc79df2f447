"""Supplies the serialization modules of ExecuTorch's MLX backend, with the nodes that etkv adds.

ExecuTorch's build generates them from ``schema.fbs``: ``mlx_graph_schema``, ``_generated_serializers``, the flatbuffer
classes under ``_generated`` and ``_generated_inspector``. The Linux wheel ships the MLX ahead-of-time code without
these modules, so ``import executorch.backends.mlx`` fails there.

:func:`ensure_available` generates them with the wheel's own generator and ``flatc``, from the wheel's schema and the
nodes of ``mlx_nodes.fbs``. It writes them to a folder in the user's cache. The name of the folder contains a digest of
every input, and an import hook finds the modules there. The installed wheel is never modified: it may be read-only or
shared, and its package manager does not track extra files.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from etkv.errors import EtkvError

_PACKAGE = "executorch.backends.mlx"
_SERIALIZATION = f"{_PACKAGE}.serialization"
_INSPECTOR = f"{_PACKAGE}._generated_inspector"

_NODES = Path(__file__).with_name("mlx_nodes.fbs")
_UNION = "union OpNode {"

# Increase this number if a change alters the generated files without changing any input of the digest.
_LAYOUT = "2"


def ensure_available() -> Path | None:
    """Make ``executorch.backends.mlx`` importable. Safe to call again, and from several processes at once.

    Returns the folder of the generated modules, or ``None`` if the wheel's own modules stay in use. The macOS wheel and
    an ExecuTorch built from source have such modules, without the nodes of etkv. They stay in use if they were imported
    before, or if the wheel lacks the generator.

    Raises :class:`EtkvError` if ExecuTorch is not installed or the generator fails.
    """
    wheel = _wheel_folder()
    for finder in sys.meta_path:
        if isinstance(finder, _GeneratedFinder):
            return finder.folder
    if _is_complete(wheel) and (_SERIALIZATION in sys.modules or not _has_generator(wheel)):
        return None
    folder = _generated_folder(wheel)
    sys.meta_path.insert(0, _GeneratedFinder(folder))
    return folder


class _GeneratedFinder(importlib.abc.MetaPathFinder):
    """Finds the two generated modules of the wheel's package. Other finders find all other modules."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _SERIALIZATION:
            package = self.folder / "serialization"
            return importlib.util.spec_from_file_location(
                fullname, package / "__init__.py", submodule_search_locations=[str(package)]
            )
        if fullname == _INSPECTOR:
            return importlib.util.spec_from_file_location(fullname, self.folder / "_generated_inspector.py")
        return None


def _wheel_folder() -> Path:
    """Return the folder of the installed ``executorch.backends.mlx``. Does not import it.

    Raises :class:`EtkvError` if it is not installed.
    """
    try:
        spec = importlib.util.find_spec(_PACKAGE)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise EtkvError(f"{_PACKAGE} is not installed in {sys.prefix}; run pip install -r requirements.txt")
    return Path(spec.origin).parent


def _is_complete(wheel: Path) -> bool:
    serialization = wheel / "serialization"
    return all(
        path.exists()
        for path in (
            serialization / "mlx_graph_schema.py",
            serialization / "_generated_serializers.py",
            serialization / "_generated" / "mlx_delegate" / "__init__.py",
            wheel / "_generated_inspector.py",
        )
    )


def _has_generator(wheel: Path) -> bool:
    serialization = wheel / "serialization"
    try:
        flatc()
    except EtkvError:
        return False
    return (serialization / "generate.py").exists() and (serialization / "schema.fbs").exists()


def flatc() -> Path:
    """Return the flatbuffer compiler of the installed ExecuTorch.

    Raises :class:`EtkvError` if there is none.
    """
    try:
        spec = importlib.util.find_spec("executorch.data.bin")
    except ModuleNotFoundError:
        spec = None
    if spec is not None and spec.origin is not None:
        compiler = Path(spec.origin).parent / ("flatc.exe" if os.name == "nt" else "flatc")
        if compiler.exists():
            return compiler
    raise EtkvError("the installed executorch package has no data/bin/flatc, which reads and writes programs")


def _generated_folder(wheel: Path) -> Path:
    """Return the folder with the generated modules for this wheel. Generates them unless the folder exists."""
    compiler = flatc()
    name = f"mlx-serialization-{_digest(wheel, compiler)}"
    root = _cache_root()
    if root is not None:
        folder = root / name
        if folder.is_dir():
            return folder
        with contextlib.suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root, ignore_cleanup_errors=True) as scratch:
                _generate(wheel, compiler, Path(scratch))
                _publish(Path(scratch), folder)
            return folder
    # Without a writable cache, use a private folder for this process. In a shared temporary folder with a predictable
    # name, another user could place code.
    folder = Path(tempfile.mkdtemp(prefix="etkv-"))
    _generate(wheel, compiler, folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _cache_root() -> Path | None:
    """Return the cache folder of this package: ``$ETKV_CACHE_DIR``, or a folder in the platform's cache folder.

    Return None without a home folder.
    """
    explicit = os.environ.get("ETKV_CACHE_DIR")
    if explicit:
        return Path(explicit)
    if sys.platform == "darwin":
        base = Path("~/Library/Caches")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return base.expanduser() / "etkv"
    except RuntimeError:  # no home folder
        return None


def _digest(wheel: Path, flatc: Path) -> str:
    """Return a digest of the wheel's modules, both schemas and ``flatc``, so that each version has its own folder."""
    digest = hashlib.sha256(_LAYOUT.encode())
    serialization = wheel / "serialization"
    for path in (*sorted(serialization.glob("*.py")), serialization / "schema.fbs", _NODES, flatc):
        digest.update(path.name.encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _publish(scratch: Path, folder: Path) -> None:
    """Rename a finished folder to ``folder``. If another process was first, its equal folder stays."""
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _generate(wheel: Path, flatc: Path, out: Path) -> None:
    """Run the wheel's generator, and write the modules to ``out``.

    The C++ loader is not generated: it needs two templates that are not in the wheel, and Python does not use it.

    Raises :class:`EtkvError` if ``flatc`` fails.
    """
    source = wheel / "serialization"
    package = out / "serialization"
    package.mkdir()
    # The package's __init__ imports the schema module from its own folder, so the hand-written modules are copied too.
    for path in source.glob("*.py"):
        shutil.copyfile(path, package / path.name)
    runtime = out / "runtime"
    runtime.mkdir()

    whole, flat = out / "schema.fbs", out / "flat.fbs"
    joined = _with_nodes((source / "schema.fbs").read_text(), _NODES.read_text())
    whole.write_text(joined)
    # The generator accepts only names in a union, not numbers.
    before, union = joined.split(_UNION)
    members, after = union.split("}", 1)
    flat.write_text(before + _UNION + re.sub(r"\s*=\s*\d+", "", members) + "}" + after)

    generator = _load_generator(source / "generate.py")
    generator.SCHEMA_FBS = whole
    generator.GENERATED_DIR = package / "_generated"
    generator.RUNTIME_DIR = runtime
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        if not generator.run_flatc(str(flatc)):
            raise EtkvError(f"{flatc} failed on {source / 'schema.fbs'}: {' '.join(log.getvalue().split())}")
        generator._fixup_flatc_imports()
        schema = generator.parse_fbs(flat)
        (package / "mlx_graph_schema.py").write_text(generator.generate_python_schema(schema))
        (package / "_generated_serializers.py").write_text(generator.generate_python_serializers(schema))
        (out / "_generated_inspector.py").write_text(generator.generate_inspector(schema))
    (package / "_generated" / "__init__.py").touch()
    flat.unlink()
    shutil.rmtree(runtime)


def _with_nodes(schema: str, nodes: str) -> str:
    """Return ``schema`` with the tables of ``nodes`` added, and the members of their union appended to its union."""
    tables, members = nodes.split(_UNION)
    before, union = schema.split(_UNION)
    of_schema, after = union.split("}", 1)
    return f"{before}{tables}{_UNION}{of_schema}, {members.split('}', 1)[0]}}}{after}"


def _load_generator(path: Path) -> ModuleType:
    """Load the generator from its file. Its package would import the modules that it generates."""
    name = "_etkv_mlx_generate"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EtkvError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    # The module's dataclasses look up the module by name while its body runs.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module
