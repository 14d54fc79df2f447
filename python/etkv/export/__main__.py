"""The command ``python -m etkv.export``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from etkv.errors import EtkvError
from etkv.export import export_program, families, is_current
from etkv.export.progress import Progress, native_noise, third_party_noise
from etkv.export.request import (
    BACKENDS,
    DEFAULT_MAX_CONTEXT,
    DEFAULT_PREFILL_CHUNK,
    DTYPES,
    GROUP_SIZES,
    LOGITS,
    QUANTIZATIONS,
    ExportRequest,
)

_WRONG_USE = 2
_INTERRUPTED = 130


class _Once(argparse.Action):
    """Stores the value of an option, and refuses a second one, which would replace the first in silence."""

    _was_given = False

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if self._was_given:
            parser.error(f"argument {self.option_strings[0]} is given twice; leave one out")
        self._was_given = True
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line, like every other error."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # The action of options that name none.
        self.register("action", None, _Once)

    def error(self, message: str) -> NoReturn:
        raise EtkvError(message)


def _indices(text: str) -> tuple[int, ...]:
    """Return the numbers in ``text``, such as ``5,11,17``."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers, such as 5,11,17") from None


class _List(argparse.Action):
    """Prints the families that can be exported, and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(families.table())
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m etkv.export",
        description="Export a causal language model as an ExecuTorch program (.pte) for MLX or the CPU, with its "
        "caches outside the graph: keys and values, and the states of recurrent layers. The tokenizer, its "
        "configuration, the chat template, the generation settings and export.json, a record of the export, are "
        "written next to the program.",
    )
    parser.add_argument(
        "--list",
        action=_List,
        nargs=0,
        default=argparse.SUPPRESS,
        help="print the families of models that tests compare, with their parts and backends, and exit",
    )
    parser.add_argument(
        "--model",
        required=True,
        type=Path,
        metavar="DIR|FILE.gguf",
        help="a Hugging Face model folder or a GGUF file, whose weights may be quantized",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="X.pte", help="the program to write")
    parser.add_argument(
        "--backend",
        default="mlx",
        metavar="NAME",
        help="the backend of the program: mlx, for Apple silicon, NVIDIA GPUs and trials on a CPU, or cpu, for XNNPACK "
        "and ExecuTorch's kernels (default: mlx)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        metavar="NAME",
        help=f"type of activations and of weights that are not quantized: {', '.join(DTYPES)}; "
        "activations of backend cpu are float32 (default: float32)",
    )
    parser.add_argument(
        "--quantize",
        metavar="NAME",
        help="quantize weights, "
        + ", ".join(f"on {name}: {' or '.join(known)}" for name, known in BACKENDS.items())
        + " (default: not quantized)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help=f"number of weights that share a scale: {', '.join(map(str, GROUP_SIZES))} "
        f"(default: {QUANTIZATIONS['4w']} for 4w and 8da4w, a whole row for 8w and 8da8w)",
    )
    parser.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="tokens of context that the program declares, at most the model's context "
        f"(default: the model's, but at most {DEFAULT_MAX_CONTEXT})",
    )
    parser.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="tokens in one execution, at most the context and the smallest sliding window "
        f"(default: that limit, but at most {DEFAULT_PREFILL_CHUNK}). With 2048 a fast GPU reads long prompts faster, "
        "but needs more memory",
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="export only the model's first N layers, with its final norm and its head: a draft of the model for "
        "speculative decoding (default: all)",
    )
    parser.add_argument(
        "--draft",
        type=int,
        metavar="N",
        help="export the model's last N layers as a draft that reads the hidden states of the layer below, which the "
        "whole model returns with --tap-layers. A predictor of these hidden states is fitted on texts that the model "
        "generates, which takes minutes",
    )
    parser.add_argument(
        "--logits",
        default="all",
        metavar="ROWS",
        help=f"rows of logits that a step returns, {' or '.join(LOGITS)}: a row for each token, or only the row of the "
        "last token, which suffices to decode one token a step (default: all)",
    )
    parser.add_argument(
        "--tap-layers",
        type=_indices,
        default=(),
        metavar="I,J,...",
        help="indices of layers, from 0; the program also returns their joined outputs: hidden states for a draft",
    )
    parser.add_argument(
        "--keep-hf",
        type=Path,
        metavar="DIR",
        help="also write the exported weights, dequantized, as a Hugging Face folder for comparisons",
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run the program on a few tokens and compare it with the model before it is written (default: for models "
        "of less than a billion parameters)",
    )
    parser.add_argument(
        "--if-changed",
        action="store_true",
        help="do nothing if the program was exported from the same model and arguments with the same versions",
    )
    parser.add_argument("--verbose", action="store_true", help="show what torch, transformers and ExecuTorch print")
    return parser


@contextlib.contextmanager
def _cleanup_at_signals() -> Iterator[None]:
    """Let an export clean up if it is terminated or its terminal closes, as it does after an interrupt."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    # A signal that this process ignores, as under nohup, must stay ignored.
    handlers = {number: handler for number, handler in handlers.items() if handler is signal.SIG_DFL}
    try:
        for number in handlers:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return numbers that differ between a file and the file that replaces it; None if there is no file."""
    try:
        status = file.stat()
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_mtime_ns


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return its exit status: 0, 2 after a wrong argument or model, or 130 after an interrupt."""
    arguments = sys.argv[1:] if arguments is None else arguments
    verbose = "--verbose" in arguments
    request, before = None, None
    try:
        options = vars(_parser().parse_args(arguments))
        if_changed, verbose = options.pop("if_changed"), options.pop("verbose")
        request = ExportRequest(**options)
        if if_changed and is_current(request):
            print(f"{request.output} is current", file=sys.stderr)
            return 0
        before = _stamp(request.output)
        with _cleanup_at_signals(), third_party_noise(allowed=verbose), native_noise(allowed=verbose) as stream:
            export_program(request, Progress(stream))
    except EtkvError as error:
        if verbose:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return _WRONG_USE
    except KeyboardInterrupt:
        # A signal that arrives while files get their final names is delivered afterwards.
        is_written = request is not None and _stamp(request.output) != before
        print(f"interrupted; the program was {'already' if is_written else 'not'} written", file=sys.stderr)
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
