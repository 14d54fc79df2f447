"""mlx-lm's side of a round, in a separate process: reads a job (JSON) from a file, and prints its figures as JSON.

``WORK`` has the functions of the jobs. Decoding has two loops. ``pipelined`` is mlx-lm's own loop, which enqueues the
next step before it reads a token. ``waiting`` reads each token before the next step begins, as a program must if it
inspects every token.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

STEP = 2048
"""The number of tokens of a prefill step: mlx-lm's default."""

UNIT = 1 if sys.platform == "darwin" else 1024
"""The number of bytes of the unit in which the system reports memory."""


def installed(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed as a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def facts(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the versions and the device."""
    import mlx.core as mx

    device = "gpu" if mx.default_device() == mx.Device(mx.gpu, 0) else "cpu"
    try:
        name = str(mx.device_info().get("device_name", device))
    except Exception:
        name = device
    return {
        "mlx": installed("mlx"),
        "mlx_lm": installed("mlx-lm"),
        "device": device,
        "device_name": name,
    }


class Peer:
    """A model of mlx-lm, and functions that run it."""

    def __init__(self, job: dict[str, Any]) -> None:
        start = time.perf_counter()
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        self.mx = mx
        self.make_prompt_cache = make_prompt_cache
        self.import_seconds = time.perf_counter() - start
        start = time.perf_counter()
        self.model, _ = load_model(Path(job["folder"]))
        self.load_seconds = time.perf_counter() - start

    def next(self, tokens: Any, cache: Any) -> Any:
        """Returns the greedy tokens after ``tokens`` ([sequences, n]), without evaluating them."""
        return self.mx.argmax(self.model(tokens, cache=cache)[:, -1], axis=-1)

    def prefill(self, ids: list[list[int]]) -> tuple[Any, Any]:
        """Runs prompts of equal length. Returns the cache and the next tokens. The host has read these tokens."""
        mx = self.mx
        cache = self.make_prompt_cache(self.model)
        tokens = mx.array(ids)
        n, at = tokens.shape[1], 0
        while n - at > 1:
            part = min(STEP, n - at - 1)
            self.model(tokens[:, at : at + part], cache=cache)
            mx.eval([layer.state for layer in cache])
            at += part
        chosen = self.next(tokens[:, at:], cache)
        chosen.tolist()
        return cache, chosen

    def steps(self, chosen: Any, cache: Any, n: int, loop: str) -> tuple[list[float], list[list[int]]]:
        """Runs ``n`` steps. Returns the seconds of each and the tokens. Pipelined steps all have the mean time."""
        mx = self.mx
        tokens, seconds = [], []
        if loop == "waiting":
            for _ in range(n):
                start = time.perf_counter()
                chosen = self.next(chosen[:, None], cache)
                tokens.append(chosen.tolist())
                seconds.append(time.perf_counter() - start)
            return seconds, tokens
        start = time.perf_counter()
        chosen = following = self.next(chosen[:, None], cache)
        mx.async_eval(chosen)
        for i in range(n):
            if i + 1 < n:
                following = self.next(chosen[:, None], cache)
                mx.async_eval(following)
            tokens.append(chosen.tolist())
            chosen = following
        return [(time.perf_counter() - start) / n] * n, tokens

    def memory(self) -> dict[str, int]:
        return {
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT,
            "peak_mlx_bytes": self.mx.get_peak_memory(),
        }


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Reads a prompt and decodes after it, ``repeat`` times. Reports the last of these runs."""
    peer = Peer(job)
    ids, n = job["ids"], job["decode"]
    for _ in range(job["repeat"]):
        start = time.perf_counter()
        if job["loop"] == "pipelined":
            from mlx_lm.generate import generate_step

            produced, times = [], []
            for token, _ in generate_step(peer.mx.array(ids), peer.model, max_tokens=n + 1, prefill_step_size=STEP):
                produced.append(int(token))
                times.append(time.perf_counter())
            prefill, took = times[0] - start, times[-1] - times[0]
        else:
            cache, chosen = peer.prefill([ids])
            produced = chosen.tolist()
            prefill = time.perf_counter() - start
            seconds, tokens = peer.steps(chosen, cache, n, "waiting")
            produced += [row[0] for row in tokens]
            took = sum(seconds)
    return {
        "load_seconds": peer.load_seconds,
        "prefill_seconds": prefill,
        "decode_seconds": took,
        "ids": produced,
        **peer.memory(),
    }


def startup(job: dict[str, Any]) -> dict[str, Any]:
    """Loads the model, and runs the first prompt of the process until the first token."""
    peer = Peer(job)
    start = time.perf_counter()
    peer.prefill([job["ids"]])
    first = time.perf_counter() - start
    return {
        "import_seconds": peer.import_seconds,
        "load_seconds": peer.load_seconds,
        "first_token_seconds": first,
        **peer.memory(),
    }


def lengths(job: dict[str, Any]) -> dict[str, Any]:
    """Measures the same as ``etkv_lengths``: prompts of new lengths, the same lengths again, and steps of tokens."""
    peer = Peer(job)
    ids = job["ids"]

    cache: Any = None

    def prompt(n: int) -> float:
        nonlocal cache
        start = time.perf_counter()
        cache, _ = peer.prefill([ids[:n]])
        return 1e3 * (time.perf_counter() - start)

    def step(n: int) -> float:
        start = time.perf_counter()
        at = cache[0].offset
        peer.next(peer.mx.array([ids[at : at + n]]), cache).tolist()
        return 1e3 * (time.perf_counter() - start)

    first, second = prompt(40), prompt(41)
    fresh, again = [], []
    for n in job["lengths"]:
        fresh.append(prompt(n))
        again.append(prompt(n))
    measured = []
    most = max(case["tokens"] for case in job["steps"])
    for case in job["steps"]:
        n, repeat = case["tokens"], case["repeat"]
        behind = case["context"] + (n if n > 1 else 0)
        if cache[0].offset < behind:
            prompt(case["context"] + most)
        for layer in cache:
            layer.trim(layer.offset - behind)
        times = []
        for _ in range(repeat):
            times.append(step(n))
            for layer in cache:
                layer.trim(n - 1)
        measured.append({"context": case["context"], "tokens": n, "ms": times})
    return {"first_ms": first, "second_ms": second, "fresh_ms": fresh, "again_ms": again, "steps": measured}


def batch(job: dict[str, Any]) -> dict[str, Any]:
    """Decodes sequences of equal length together: one array of tokens, and one cache with a row for each sequence."""
    peer = Peer(job)
    cache, chosen = peer.prefill(job["ids"])
    peer.steps(chosen, cache, 2, job["loop"])
    seconds, _ = peer.steps(chosen, cache, job["steps"], job["loop"])
    return {"load_seconds": peer.load_seconds, "step_seconds": seconds, **peer.memory()}


def fork(job: dict[str, Any]) -> dict[str, Any]:
    """Copies the cache of a prompt for each branch, as mlx-lm's prompt caches do; then decodes the branches together.

    The copies are merged into one cache with a row for each branch, as in mlx-lm's batches. MLX copies no bytes
    before that: a copied array shares its buffer until one of the two changes.
    """
    peer = Peer(job)
    mx, n = peer.mx, job["sequences"]
    cache, chosen = peer.prefill([job["ids"]])
    before = mx.get_active_memory()
    start = time.perf_counter()
    branches = [cache, *(copy.deepcopy(cache) for _ in range(n - 1))]
    merged = [type(layer).merge([branch[i] for branch in branches]) for i, layer in enumerate(cache)]
    mx.eval([(layer.keys, layer.values) for layer in merged])
    forked = time.perf_counter() - start
    copied = mx.get_active_memory() - before
    tokens = mx.repeat(chosen, n)
    peer.steps(tokens, merged, 2, "pipelined")
    seconds, _ = peer.steps(tokens, merged, job["steps"], "pipelined")
    return {"fork_seconds": forked, "fork_bytes": copied, "step_seconds": seconds, **peer.memory()}


def forwards(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a prompt twice in steps of a fixed size, with all rows of logits. Reports a step of the second run."""
    peer = Peer(job)
    mx, ids, n = peer.mx, job["ids"], job["tokens"]
    for _ in range(2):
        cache = peer.make_prompt_cache(peer.model)
        start = time.perf_counter()
        for at in range(0, len(ids), n):
            mx.eval(mx.argmax(peer.model(mx.array([ids[at : at + n]]), cache=cache), axis=-1))
        seconds = time.perf_counter() - start
    return {"step_seconds": seconds / (len(ids) / n)}


WORK = {work.__name__: work for work in (facts, decode, startup, lengths, batch, fork, forwards)}


def main() -> None:
    """Runs the job in the file that the command line names."""
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        print(json.dumps(WORK[job["work"]](job)), flush=True)
    except Exception as error:
        # Print the error in one line, which the report shows as the reason.
        said = str(error).splitlines()
        raise SystemExit(f"mlx-lm: {type(error).__name__}: {said[0] if said else ''}") from None
    # With MLX on CUDA, a process that exits normally may abort after all its work.
    os._exit(0)


if __name__ == "__main__":
    main()
