"""Splits a rendered conversation into the template's text and the ids of answers, so that answers keep their ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Messages: TypeAlias = Sequence[Mapping[str, Any]]

_MARK = "\uf8fe"
"""A private-use character that no text has. In a rendering with marks, the index of a message, enclosed in two of
these characters, replaces the message's text.
"""


def parts(
    messages: Messages, answers: Mapping[int, Sequence[int]], render: Callable[[Messages], str]
) -> list[str | list[int]]:
    """Render a conversation. Return its text, in which lists of ids replace the text of answers.

    ``answers`` maps the index of a message to its ids. A message that the template changes stays text: some templates
    remove the reasoning of earlier answers. Raises what ``render`` raises for ``messages``.
    """
    text = render(messages)
    kept = {n: list(ids) for n, ids in answers.items() if ids}
    while kept:
        marked_messages = [
            {**message, "content": f"{_MARK}{n}{_MARK}"} if n in kept else message for n, message in enumerate(messages)
        ]
        try:
            marked = render(marked_messages)
        except Exception:
            # The template refuses the marks.
            break
        result = _split(text, marked, messages, kept)
        if isinstance(result, list):
            return result
        if result not in kept:
            break
        del kept[result]
    return [text]


def _split(
    text: str, marked: str, messages: Messages, kept: Mapping[int, list[int]]
) -> list[str | list[int]] | int | None:
    """Split ``text`` at the messages that are marked in ``marked``, the rendering with marks.

    If the two renderings do not match, return the index of the last marked message before the mismatch, or None if
    there is no such message.
    """
    # The pieces alternate: text, index of a message, text.
    before, *pieces = marked.split(_MARK)
    if len(pieces) % 2 or not all(number.isdecimal() and int(number) in kept for number in pieces[::2]):
        # The template cut a mark off, or a message contains the mark character.
        return None
    last = int(pieces[0]) if pieces else None
    if not text.startswith(before):
        return last
    rest = text[len(before) :]
    split: list[str | list[int]] = []
    for number, after in zip(pieces[::2], pieces[1::2], strict=True):
        last = int(number)
        content = str(messages[last]["content"])
        # Many templates trim messages. All ids of the answer are kept nevertheless, because the cache has them.
        for written in (content, content.strip(), content.lstrip(), content.rstrip()):
            if rest.startswith(written + after):
                rest = rest[len(written + after) :]
                break
        else:
            return last
        split += [before, kept[last]]
        before = after
    return last if rest else [*split, before]
