"""Imports the wheel's tests, and replaces modules that the Linux wheel lacks."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from etkv import _mlx_serialization

TESTS = "executorch.backends.mlx.test"


def test_utils() -> Any:
    """Return the wheel's module that saves, loads and compares tensors. The import takes ten seconds."""
    _mlx_serialization.ensure_available()
    return importlib.import_module(f"{TESTS}.test_utils")


def configurations() -> list[Any]:
    """Return all configurations, as instances of their tests' classes, in the order of the wheel's file."""
    utils = test_utils()
    find_torchtune()
    importlib.import_module(f"{TESTS}.test_ops")
    return [configuration for _, configuration in utils.get_all_test_configs()]


def find_torchtune() -> None:
    """Make torchtune's modules importable as empty modules if the package is not installed."""
    if importlib.util.find_spec("torchtune") is None:
        sys.meta_path.append(_TorchtuneFinder())


class _TorchtuneFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchtune's modules and loads them as empty modules.

    A package of ExecuTorch imports them, and the tests import another module of that package.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torchtune":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        import torch

        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            # `isinstance` needs a class. No object is an instance of this class.
            return type(name, (torch.nn.Module,), {})

        module.__getattr__ = attribute  # type: ignore[method-assign]
