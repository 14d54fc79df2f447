"""The files next to a program that a runner needs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etkv.errors import EtkvError
from etkv.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUIRED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
"""Files next to every program."""

TEMPLATE = "chat_template.jinja"
"""The file of the chat template, if the model has one."""

TEMPLATES = "additional_chat_templates"
"""The folder of named chat templates, such as ``tool_use``, if the model has some."""

_PROBES = (
    "Hello, world! It's 2026.",
    "  two spaces\n\tand a tab\n\n",
    "na\u00efve \u65e5\u672c\u8a9e \U0001f642 e\u0301 <|x|>",
)
"""Texts for comparing the ids of the written tokenizer with those of the model's tokenizer."""


def write(folder: Path, tokenizer: PreTrainedTokenizerBase, generation: dict[str, Any]) -> list[str]:
    """Write the files to ``folder``, and return their paths in it.

    Raises :class:`EtkvError` if the tokenizer has behaviour that a ``tokenizer.json`` cannot express.
    """
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    _check(folder, tokenizer)
    names = [name for name in (*REQUIRED, TEMPLATE) if (folder / name).is_file()]
    return names + [f"{TEMPLATES}/{file.name}" for file in sorted((folder / TEMPLATES).glob("*.jinja"))]


def check_places(folder: Path, others: Iterable[str], new: Path | None = None) -> None:
    """Raise :class:`EtkvError` if ``folder`` has a folder where an export writes a file, or a file where it writes a
    folder.

    Without this check, an export would fail at its end. The files are those of this module and ``others``. ``new`` is
    a further folder that the export creates.
    """
    for name in (*REQUIRED, TEMPLATE, *others):
        if (folder / name).is_dir() or (new is not None and folder / name in (new, *new.parents)):
            raise EtkvError(
                f"an export writes the file {folder / name}, where there is a folder or keep-hf needs one; choose "
                "another folder"
            )
    if (folder / TEMPLATES).exists() and not (folder / TEMPLATES).is_dir():
        raise EtkvError(
            f"an export may write the folder {folder / TEMPLATES}, where there is a file; choose another folder"
        )


def changed(scratch: Path, folder: Path, names: list[str], program: str) -> list[str]:
    """Return remarks on files in ``folder`` that :func:`publish` changes although programs other than ``program`` read
    them.
    """
    others = sorted(file.name for file in folder.glob("*.pte") if file.name != program)
    both = (name for name in names if (folder / name).is_file()) if others else ()
    return [
        f"{folder / name} changes, and {', '.join(others)} beside it read it too: keep programs of different models in "
        "different folders"
        for name in both
        if (folder / name).read_bytes() != (scratch / name).read_bytes()
    ]


def publish(scratch: Path, folder: Path, names: list[str]) -> None:
    """Move the files ``names`` from ``scratch`` to ``folder``. Remove templates of an earlier export from
    ``folder``.
    """
    for stale in (folder / TEMPLATE, *(folder / TEMPLATES).glob("*.jinja")):
        if stale.relative_to(folder).as_posix() not in names:
            stale.unlink(missing_ok=True)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (scratch / name).replace(folder / name)


def _check(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare ids and texts of ``tokenizer`` with those of the tokenizer in ``folder``."""
    written = Tokenizer.from_pretrained(folder)
    for text in _PROBES:
        for special in (False, True):
            ids = list(tokenizer(text, add_special_tokens=special).input_ids)
            found = written.encode(text, add_special_tokens=special)
            if ids != found:
                raise EtkvError(
                    f"the tokenizer ({type(tokenizer).__name__}) cannot be written as tokenizer.json: "
                    f"the ids of {text!r} are {ids}, but with that file {found}"
                )
        made, back = tokenizer.decode(ids, skip_special_tokens=True), written.decode(ids)
        if made != back:
            raise EtkvError(
                f"the tokenizer ({type(tokenizer).__name__}) cannot be written as tokenizer.json: "
                f"the text of {ids} is {made!r}, but with that file {back!r}"
            )
