"""The command ``python -m etkv``: inspects and runs programs. ``export`` is :mod:`etkv.export`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from etkv import __version__
from etkv.errors import EtkvError

if TYPE_CHECKING:
    from etkv.graph_cache import GraphCache
    from etkv.runtime import Program

_WRONG_USE = 2
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        raise EtkvError(message)


def _parser() -> argparse.ArgumentParser:
    from etkv import inspection

    parser = _Parser(prog="python -m etkv", description="The KV cache of an ExecuTorch program, as a library.")
    parser.add_argument("--version", action="version", version=f"etkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect",
        help="report a program's contents, whether this build runs it, and the bytes of its cache",
        description="Report a program's contents, whether this build runs it, and the bytes of its cache.",
    )
    inspection.add_arguments(inspect)
    generate = commands.add_parser(
        "generate", help="answer a prompt", description="Answer a prompt with a program and the tokenizer next to it."
    )
    generate.add_argument("program", type=Path, metavar="MODEL.pte")
    generate.add_argument("prompt", metavar="TEXT")
    generate.add_argument("--raw", action="store_true", help="continue the text without the chat template")
    generate.add_argument("--max-tokens", type=int, default=256, metavar="N", help="maximum tokens (default: 256)")
    generate.add_argument("--capacity", type=int, metavar="N", help="positions of the cache (default: the program's)")
    generate.add_argument(
        "--kv-format", metavar="NAME", help="storage format of keys and values (default: the program's dtype)"
    )
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    generate.add_argument("--top-k", type=int, default=0, metavar="N", help="sample from the N best (default: 0, all)")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling (default: 1, off)")
    generate.add_argument("--seed", type=int, metavar="N", help="seed of sampling")
    generate.add_argument("--show-special", action="store_true", help="write the special tokens of the answer too")
    generate.add_argument("--progress", action="store_true", help="show bars on stderr")
    # This parser only adds the command to the list of commands: etkv.export parses its own arguments.
    commands.add_parser("export", help="export a model; the same as python -m etkv.export", add_help=False)
    return parser


@contextlib.contextmanager
def _loaded(options: argparse.Namespace) -> Iterator[Program]:
    """Load the program. It gets a session, unless it has its cache in its graph."""
    import etkv
    from etkv.export.progress import without_warnings
    from etkv.metadata import describes_layers
    from etkv.pte import constant_methods

    # The imports of torch and ExecuTorch warn.
    with without_warnings():
        etkv.register_backend()
        constants = constant_methods(options.program)
    if not describes_layers(constants):
        with etkv.load(options.program, None) as program:
            if isinstance(program.cache, etkv.GraphCache):
                _fit(program.cache, options)
                print("the cache is part of the program: there is no session", file=sys.stderr)
                yield program
                return
    facts = etkv.read_kv_cache_metadata(options.program)
    context = facts.max_context_length
    if options.capacity is not None and 0 < context < options.capacity:
        raise EtkvError(
            f"--capacity {options.capacity} is above {context}, the context length that {options.program} was exported "
            "for"
        )
    config = etkv.CacheConfig(
        facts.layers,
        (context or 4096) if options.capacity is None else options.capacity,
        k_format=options.kv_format,
        v_format=options.kv_format,
        max_step_tokens=facts.prefill_chunk_size,
    )
    with (
        etkv.DecodeSession(config, backend=facts.backend) as session,
        etkv.load(options.program, session, logits="last") as program,
    ):
        yield program


def _fit(cache: GraphCache, options: argparse.Namespace) -> None:
    """Apply the cache options to a cache in a graph. Raises :class:`EtkvError` for options that do not apply."""
    if options.kv_format:
        raise EtkvError("--kv-format does not apply: the program has its cache in its graph, in a fixed format")
    if options.capacity is not None:
        if not 1 <= options.capacity <= cache.capacity:
            raise EtkvError(f"--capacity is {options.capacity}, expected 1 to {cache.capacity}, the program's capacity")
        cache.capacity = options.capacity


def _generate(options: argparse.Namespace) -> None:
    import etkv

    tokenizer = etkv.Tokenizer.from_pretrained(options.program)
    messages = [{"role": "user", "content": options.prompt}]
    prompt = options.prompt if options.raw else tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    with _loaded(options) as program:
        responses = etkv.stream_generate(
            program,
            tokenizer,
            prompt,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            progress=options.progress,
            skip_special_tokens=not options.show_special,
        )
        finish_reason = None
        for response in responses:
            print(response.text, end="", flush=True)
            finish_reason = response.finish_reason
        print()
        if finish_reason == "capacity" and program.cache is not None:
            print(f"the cache is full: {program.cache.capacity} positions", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return its exit status: 0, 2 after an error, or 130 after an interrupt."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["export"]:
        from etkv.export.__main__ import main as export

        return export(arguments[1:])
    from etkv import inspection
    from etkv.export.progress import third_party_noise

    try:
        options = _parser().parse_args(arguments)
        if options.command == "inspect":
            with third_party_noise(allowed=False):
                lines = inspection.run(options)
            print("\n".join(lines), flush=True)
        else:
            _generate(options)
    except EtkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return _WRONG_USE
    except BrokenPipeError:
        # The program that reads stdout closed the pipe, as `head` does. Python flushes stdout at exit, and the flush
        # would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
