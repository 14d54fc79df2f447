"""Follows a page of instructions: writes its files, runs its commands and compares their output.

A file is a fenced block after a line that ends in the file's name, as in ``... `app/main.cpp`:``. Commands are the
lines of ```` ```console ```` blocks that begin with ``$ ``; a backslash continues a line. The lines after a command
are its expected output. Other blocks are ignored.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import bounded

SECONDS = 3600
"""The time limit of a command, in seconds."""

FENCE = re.compile(r"^```(\w*)$")
FILE = re.compile(r"`([\w./-]+)`:$")


@dataclass
class Command:
    text: str
    prints: list[str] = field(default_factory=list)


@dataclass
class Content:
    path: str
    text: str


def steps(page: str) -> list[Command | Content]:
    """Return the files and commands of a page, in order."""
    found: list[Command | Content] = []
    language, block, above = None, [], ""
    for line in page.splitlines():
        fence = FENCE.match(line)
        if language is None:
            if fence:
                language, block = fence[1], []
            elif line.strip():
                above = line
        elif not fence:
            block.append(line)
        else:
            if language == "console":
                found += commands(block)
            elif name := FILE.search(above):
                found.append(Content(name[1], "\n".join(block) + "\n"))
            language, above = None, ""
    return found


def commands(block: list[str]) -> list[Command]:
    found: list[Command] = []
    continued = False
    for line in block:
        if line.startswith("$ "):
            found.append(Command(line[2:]))
        elif continued:
            found[-1].text += f"\n{line}"
        elif found:
            found[-1].prints.append(line)
        continued = line.endswith("\\")
    return found


def follow(page: Path, home: Path, without: str = "") -> str | None:
    """Follow `page` in the folder `home`. Return None, or a message about the first failure or difference.

    Skips commands that contain `without`, the name of a tool.
    """
    todo = steps(page.read_text())
    n_commands = sum(isinstance(step, Command) for step in todo)
    if n_commands == 0 or n_commands == len(todo):
        return f"{page.name} has {n_commands} commands and {len(todo) - n_commands} files"
    # Rust's tools are in the home folder of the user.
    rust = {"CARGO_HOME": str(Path.home() / ".cargo"), "RUSTUP_HOME": str(Path.home() / ".rustup")}
    environment = {**rust, **os.environ, "HOME": str(home)}
    folder = str(home)
    for step in todo:
        if isinstance(step, Content):
            path = home / step.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text)
            continue
        if without and without in step.text:
            continue
        # Each command starts in the folder in which the previous one ended.
        words = ["bash", "-ec", f"{step.text}\npwd > ~/.folder"]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        try:
            done = bounded.run(words, SECONDS, cwd=folder, env=environment, **streams)
        except subprocess.TimeoutExpired:
            return f"`{step.text}` was ended after {SECONDS} s"
        if done.returncode != 0:
            return f"`{step.text}` ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
        printed = done.stdout.splitlines()
        if step.prints and printed != step.prints:
            return f"`{step.text}` printed\n" + "\n".join(printed) + "\nand not\n" + "\n".join(step.prints)
        folder = (home / ".folder").read_text().strip()
    return None
