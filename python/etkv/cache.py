"""The interfaces of a cache: :class:`Cache` for every kind, :class:`SeqCache` and :class:`TreeCache`.

Their methods call the functions of ``etkv.h``, whose rules on threads apply. The sessions of :mod:`etkv.session`
implement these interfaces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from etkv import _capi
from etkv._capi import (
    ask,
    ask_list,
    ask_text,
    ask_tokens,
    call,
    encoded,
    encoded_path,
    ffi,
    int32,
    int32s,
    lib,
    text_options,
)
from etkv.errors import EtkvError
from etkv.memory import Memory, read_memory
from etkv.prefix import Prefix


class Cache:
    """The interface of every cache: admission, length, rollback, memory."""

    def __init__(self, handle: Any) -> None:
        """Take ownership of an ``etkv_cache*``. Applications create sessions instead."""
        self._cache = ffi.gc(handle, lib().etkv_cache_free)

    def _raw(self) -> Any:
        return self._cache

    def _fact(self, function: str) -> Any:
        """Return a property of the cache. The library returns 0 or NULL for a handle that was freed."""
        fact = getattr(lib(), function)(self._raw())
        if not fact:
            raise EtkvError("another thread closed the session during the call")
        return fact

    def _count(self, function: str) -> int:
        """Return a property that may be 0. If it is 0, check the capacity, which is 0 only for a handle that was
        freed.
        """
        count = int(getattr(lib(), function)(self._raw()))
        if count == 0:
            self._fact("etkv_cache_capacity")
        return count

    @property
    def capacity(self) -> int:
        """Maximum number of positions in the cache."""
        return int(self._fact("etkv_cache_capacity"))

    @property
    def length(self) -> int:
        """The number of positions that the cache holds now. A position that several sequences share counts once."""
        return ask("etkv_cache_length", "int32_t", self._raw())

    @property
    def n_layers(self) -> int:
        """The number of attention layers. It is 0 only in a cache with recurrent layers."""
        return self._count("etkv_cache_n_layers")

    @property
    def n_recurrent_layers(self) -> int:
        """The number of recurrent layers."""
        return self._count("etkv_cache_n_recurrent_layers")

    @property
    def max_step_tokens(self) -> int:
        """Maximum tokens of one step: ``max_step_tokens`` of the config if a window slides or ``quantized_kv_start``
        is set, else the capacity. The maximum of a program may be lower.
        """
        return int(self._fact("etkv_cache_max_step_tokens"))

    @property
    def kind(self) -> str:
        """``contiguous``, ``seq`` or ``tree``, or the name of a kind that Rust code added."""
        return _capi.text(self._fact("etkv_cache_kind"))

    @property
    def formats(self) -> tuple[str, str]:
        """The present formats of keys and values."""
        k, v = ffi.new("const char**"), ffi.new("const char**")
        call("etkv_cache_formats", self._raw(), k, v)
        return _capi.text(k[0]), _capi.text(v[0])

    def can_extend(self, n: int = 1) -> bool:
        """Return whether ``n`` more positions fit."""
        return ask("etkv_cache_can_extend", "bool", self._raw(), int32(n, "n"))

    def clear(self, *, release: bool = False) -> None:
        """Remove every position, and free the buffers if ``release``. Restore the formats of the config."""
        call("etkv_cache_clear", self._raw(), bool(release))

    def rewind(self, length: int) -> None:
        """Remove the only sequence's positions at or after ``length``.

        Raises :class:`~etkv.PositionError` if ``length`` is greater than the next position, or if layers with windows
        have dropped rows that the next query would see.
        """
        call("etkv_cache_rewind", self._raw(), int32(length, "length"))

    def rewindable_to(self) -> int:
        """Return the smallest length above 0 that :meth:`rewind` accepts now."""
        return ask("etkv_cache_rewindable_to", "int32_t", self._raw())

    def reachable(self, position: int) -> int:
        """Return the greatest length, at most ``position``, that :meth:`rewind` accepts now.

        :meth:`rewind` accepts 0, the checkpoints of :meth:`mark`, and every length at or above :meth:`rewindable_to`.
        Raises :class:`~etkv.PositionError` if ``position`` is negative, and :class:`~etkv.EtkvError` if the cache
        holds several sequences.
        """
        return ask("etkv_cache_reachable", "int32_t", self._raw(), int32(position, "position"))

    def mark(self, position: int) -> int:
        """Make a checkpoint of the only sequence at ``position``. Return the checkpoint's position, or 0 for none.

        If the sequence can be rewound to ``position``, the checkpoint exists at once. Otherwise it is made when a step
        reaches the position. In a cache with recurrent layers, the checkpoint's position is rounded down to a
        multiple of 64. If there is no room for another checkpoint, the least useful one is dropped. Removing the text
        before a checkpoint drops the checkpoint too.

        Raises :class:`~etkv.PositionError` if ``position`` is negative or can no longer be reached,
        :class:`~etkv.EtkvError` if the cache holds several sequences, and :class:`~etkv.UnsupportedError` for a
        ``contiguous`` cache with window layers and no recurrent ones.
        """
        return ask("etkv_cache_mark", "int32_t", self._raw(), int32(position, "position"))

    def mark_turn(self, end: int) -> None:
        """Mark the start and the end of a turn's prompt, before the prompt runs.

        Later requests of the chat can then continue from these two positions, even if they change the answer or the
        first message of the prompt. ``end`` is the length of the sequence after the prompt. Does nothing for a model
        without recurrent layers.
        """
        call("etkv_cache_mark_turn", self._raw(), int32(end, "end"))

    def rewind_to_reachable(self, length: int) -> int:
        """Rewind to the greatest length, at most ``length``, that :meth:`rewind` accepts, and return that length.

        Call it for a text that shares its first ``length`` tokens with the cache. If the returned length is below
        ``length``, run the tokens between the two lengths again. The method marks ``length``, so the next text that
        differs from the cache at this position runs fewer tokens.
        """
        return ask("etkv_cache_rewind_to_reachable", "int32_t", self._raw(), int32(length, "length"))

    def convert(self, k_format: str, v_format: str | None = None) -> None:
        """Convert the stored rows to other formats. Later rows get these formats too, until the cache is cleared."""
        v_format = k_format if v_format is None else v_format
        call("etkv_cache_convert", self._raw(), encoded(k_format, "k_format"), encoded(v_format, "v_format"))

    def report(self) -> dict[str, Any]:
        """Return a report for monitoring and debugging; ``docs/reports.md`` lists the fields."""
        report: dict[str, Any] = json.loads(ask_text("etkv_cache_report", self._raw()))
        return report

    def save(self, path: str | os.PathLike[str], *, tokens: Sequence[int] = (), fingerprint: str = "") -> None:
        """Write the contents to a file: rows in their storage format, positions, sequences and trees, and ``tokens``.

        An older file stays until the new file is complete and on the disk. ``fingerprint`` identifies the model; it can
        be :func:`~etkv.fingerprint` of the program. Raises :class:`~etkv.CacheFileError` if the file cannot be written.
        """
        options, _keep = text_options(tokens, fingerprint)
        call("etkv_cache_save", self._raw(), encoded_path(path), options)

    def load(self, path: str | os.PathLike[str], *, fingerprint: str = "") -> list[int]:
        """Replace the contents of the cache by a file's contents, and return the file's tokens.

        Raises :class:`~etkv.CacheFileError` for a file that cannot be read, is damaged, or is of another version, model
        or config. After an error the contents are unchanged.
        """
        return ask_tokens("etkv_cache_load", self._raw(), encoded_path(path), encoded(fingerprint, "fingerprint"))

    def freeze(self) -> Prefix:
        """Freeze the contents of the cache as a prefix, and attach this cache to it.

        Other caches of the same layers and formats can :meth:`attach` to the prefix without a copy. The cache must
        hold only sequence 0, which begins at position 0 and has no gaps or candidates. Otherwise raises
        :class:`~etkv.EtkvError`. Raises :class:`~etkv.UnsupportedError` for a backend that cannot share memory.
        """
        return Prefix(ask("etkv_cache_freeze", "etkv_prefix*", self._raw()))

    def attach(self, prefix: Prefix, length: int | None = None) -> None:
        """Attach the empty cache to the first ``length`` positions of a prefix; None for all. No rows are copied.

        Raises :class:`~etkv.EtkvError` if the cache is not empty, if the prefix does not fit, or if ``length`` is
        below :attr:`Prefix.rewindable_to` or above :attr:`Prefix.length`.
        """
        n = prefix.length if length is None else int32(length, "length")
        call("etkv_cache_attach", self._raw(), prefix._prefix, n)

    def memory(self) -> Memory:
        """Return the bytes of the buffers."""
        counts = self.n_layers, self.n_recurrent_layers
        return read_memory(*counts, lambda memory: call("etkv_cache_memory", self._raw(), memory))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise EtkvError(f"a {type(self).__name__} cannot be copied or sent to another process: create one there")

    def __repr__(self) -> str:
        k, v = self.formats
        stored = k if k == v else f"{k} and {v}"
        layers = f"{self.n_layers} layers"
        if self.n_recurrent_layers:
            layers += f" and {self.n_recurrent_layers} recurrent layers"
        return f"<{type(self).__name__}: {self.length} of {self.capacity} positions in {layers}, {stored}>"


class SeqCache(Cache):
    """The interface of a cache that several sequences share.

    Sequences have numbers from 0 to 255. They need no creation: a sequence without positions is empty. Ranges of
    positions include ``begin`` and exclude ``end``. An ``end`` of None is the end of the sequence.
    """

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._sequences = ffi.gc(ask("etkv_cache_as_seq", "etkv_seq_cache*", handle), lib().etkv_seq_cache_free)

    def _seq(self) -> Any:
        self._raw()
        return self._sequences

    def begin_step(self, sequences: Sequence[int]) -> None:
        """Declare the sequence of each token of the next step.

        The declaration holds until a step commits or another declaration replaces it.
        """
        call("etkv_seq_cache_begin_step", self._seq(), int32s(sequences, "sequences"), len(sequences))

    def begin_step_shared(self, sequences: Sequence[Sequence[int]]) -> None:
        """Declare the sequences of each token of the next step. The sequences of a token share its cell."""
        numbers = [number for members in sequences for number in members]
        counts = [len(members) for members in sequences]
        call(
            "etkv_seq_cache_begin_step_shared",
            self._seq(),
            int32s(numbers, "sequences"),
            len(numbers),
            int32s(counts, "counts"),
            len(counts),
        )

    def cancel_step(self) -> None:
        """Withdraw the declaration of ``begin_step`` or ``begin_step_shared`` for a step that will not run."""
        call("etkv_seq_cache_cancel_step", self._seq())

    def seq_cp(self, source: int, target: int, begin: int = 0, end: int | None = None) -> None:
        """Make ``target`` share the cells of ``source`` in a range of positions. No rows are copied."""
        numbers = int32(source, "source"), int32(target, "target"), int32(begin, "begin"), _end(end)
        call("etkv_seq_cache_cp", self._seq(), *numbers)

    def seq_rm(self, sequence: int, begin: int = 0, end: int | None = None) -> None:
        """Remove the positions in a range from a sequence. Cells that no sequence owns become free."""
        numbers = int32(sequence, "sequence"), int32(begin, "begin"), _end(end)
        call("etkv_seq_cache_rm", self._seq(), *numbers)

    def seq_keep(self, sequence: int) -> None:
        """Remove every sequence but one."""
        call("etkv_seq_cache_keep", self._seq(), int32(sequence, "sequence"))

    def seq_len(self, sequence: int) -> int:
        """Return the number of positions that a sequence holds."""
        return ask("etkv_seq_cache_len", "int32_t", self._seq(), int32(sequence, "sequence"))

    def seq_next(self, sequence: int) -> int:
        """Return the position of a sequence's next token. It exceeds the length if positions at the front were
        removed.
        """
        return ask("etkv_seq_cache_next", "int32_t", self._seq(), int32(sequence, "sequence"))

    def seq_rewindable_to(self, sequence: int) -> int:
        """Return :meth:`rewindable_to` for one of several sequences."""
        return ask("etkv_seq_cache_rewindable_to", "int32_t", self._seq(), int32(sequence, "sequence"))

    def seq_reachable(self, sequence: int, position: int) -> int:
        """Return :meth:`reachable` for one of several sequences."""
        numbers = int32(sequence, "sequence"), int32(position, "position")
        return ask("etkv_seq_cache_reachable", "int32_t", self._seq(), *numbers)

    def seq_mark_turn(self, sequence: int, end: int) -> None:
        """Mark the end of a turn's prompt in one of several sequences, as :meth:`mark_turn` does."""
        call("etkv_seq_cache_mark_turn", self._seq(), int32(sequence, "sequence"), int32(end, "end"))

    def seq_mark(self, sequence: int, position: int) -> int:
        """Make a checkpoint of one of several sequences, as :meth:`mark` does."""
        numbers = int32(sequence, "sequence"), int32(position, "position")
        return ask("etkv_seq_cache_mark", "int32_t", self._seq(), *numbers)

    def seq_positions(self, sequence: int) -> list[range]:
        """Return the positions that a sequence holds, as ranges in order."""
        return ask_list(
            "etkv_seq_cache_positions",
            "etkv_range",
            self._seq(),
            int32(sequence, "sequence"),
            of=lambda item: range(item.begin, item.end),
        )

    def sequences(self) -> list[int]:
        """Return the sequences that hold positions or have trees, in order."""
        return ask_list("etkv_seq_cache_sequences", "int32_t", self._seq())

    def seq_save(
        self, sequence: int, path: str | os.PathLike[str], *, tokens: Sequence[int] = (), fingerprint: str = ""
    ) -> None:
        """Write one sequence to a file. The file equals that of a cache that holds only this sequence, as sequence 0.

        Raises what :meth:`save` raises, and :class:`~etkv.EtkvError` for a sequence without positions or with
        candidates.
        """
        options, _keep = text_options(tokens, fingerprint)
        call("etkv_seq_cache_save", self._seq(), int32(sequence, "sequence"), encoded_path(path), options)

    def seq_load(self, sequence: int, path: str | os.PathLike[str], *, fingerprint: str = "") -> list[int]:
        """Load the only sequence of a file as ``sequence``, which must be empty, and return the file's tokens.

        Other sequences do not change. Raises :class:`~etkv.EtkvError` if ``sequence`` holds positions or candidates,
        :class:`~etkv.CapacityError` if the free cells are too few, and :class:`~etkv.CacheFileError` as :meth:`load`
        does. A file with values that are not finite also raises it. After an error the contents are unchanged.
        """
        number = int32(sequence, "sequence")
        model = encoded(fingerprint, "fingerprint")
        return ask_tokens("etkv_seq_cache_load", self._seq(), number, encoded_path(path), model)

    def compact(self) -> None:
        """Move each sequence to contiguous cells, as far as shared cells allow. Contiguous cells need no mask."""
        call("etkv_seq_cache_compact", self._seq())


class TreeCache(SeqCache):
    """The interface of a cache whose sequences may have trees of candidates. The default sequence is 0."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self._trees = ffi.gc(ask("etkv_cache_as_tree", "etkv_tree_cache*", handle), lib().etkv_tree_cache_free)

    def _tree(self) -> Any:
        self._raw()
        return self._trees

    def propose(self, parents: Sequence[int], sequence: int = 0) -> None:
        """Append a frontier of candidates: the queries of the next step.

        A parent is the number of an earlier node, counted over all frontiers of the tree; -1 is the sequence itself.
        """
        n = len(parents)
        call("etkv_tree_cache_propose", self._tree(), int32(sequence, "sequence"), int32s(parents, "parents"), n)

    def commit(self, accepted: Sequence[int], sequence: int = 0) -> None:
        """Add a chain of candidates to the sequence, and remove the rest of its tree. ``[]`` removes the whole tree."""
        n = len(accepted)
        call("etkv_tree_cache_commit", self._tree(), int32(sequence, "sequence"), int32s(accepted, "accepted"), n)

    def tree_len(self, sequence: int = 0) -> int:
        """Return the number of nodes in the tree of a sequence; 0 without a tree."""
        return ask("etkv_tree_cache_len", "size_t", self._tree(), int32(sequence, "sequence"))


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Return the fingerprint of a file, such as a program, for :meth:`Cache.save` and :meth:`Cache.load`.

    Files with equal bytes have equal fingerprints. Reads the whole file. Raises :class:`~etkv.CacheFileError` if the
    file cannot be read.
    """
    return ask_text("etkv_fingerprint", encoded_path(path))


def _end(end: int | None) -> int:
    return _capi.INT32_MAX if end is None else int32(end, "end")
