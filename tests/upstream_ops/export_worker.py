"""A worker that exports configurations with the wheel's code."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from etkv.errors import first_line

from . import cases, fast_exports, wheel, worker


def prepare() -> Callable[[int | None], Any]:
    """Import the wheel's tests, and return the function that exports one configuration by its index.

    The function returns None. Called without an index, it returns the folders of all configurations.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    utils = wheel.test_utils()
    configurations = wheel.configurations()
    fast_exports.prepare()
    fast_exports.solve_codebooks_faster()
    names = [cases.folder_name(index, configuration.name) for index, configuration in enumerate(configurations)]

    def export(index: int | None) -> Any:
        if index is None:
            return names
        _export(utils, configurations[index], names[index])
        return None

    return export


def _export(utils: Any, configuration: Any, folder: str) -> None:
    case = cases.Case(
        folder=folder,
        test=type(configuration).__name__,
        rtol=configuration.rtol,
        atol=configuration.atol,
        timeout=configuration.timeout,
        comparable=not configuration.skip_comparison,
        kv_cache=configuration.kv_cache,
        expected_segments=configuration.expected_mlx_segments,
        expected_nodes=configuration.expected_node_counts,
        stamp=cases.stamp(),
    )
    # The folder to which the wheel's code writes the program, the inputs and the outputs. The default is the test's
    # folder.
    configuration.get_test_dir = lambda: case.path
    case.path.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    try:
        # Some tests trace code that earlier tests have traced with different sizes.
        torch.compiler.reset()
        path, _, _ = configuration.generate_test_files()
        case.segments = utils.count_mlx_delegate_segments(path)
        case.nodes = utils.get_mlx_node_counts(path)
    except Exception as error:
        case.error = f"{type(error).__name__}: {first_line(error)}"
    case.seconds = round(time.monotonic() - begin, 2)
    case.write()


if __name__ == "__main__":
    worker.serve(prepare)
