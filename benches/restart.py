"""Measures the time of a prompt after a restart, with and without a prefix store.

Every figure is the time until the first token of the answer, in seconds, in a new process that has loaded the
program. Both ways run in turns, and the file is in the page cache. Another comparison, also in turns, is between the
first load in a process that does nothing else, and a ``read`` of the same file into as much new memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CHUNK = 512


def prompt(n: int) -> list[int]:
    """Return token ids for a vocabulary of 49,152."""
    return [5 + i * 7919 % 40000 for i in range(n)]


def measure(way: str, model: str, n: int, folder: str) -> dict[str, float]:
    """Measure one of the ways, with or without a prefix store, in this process. Return its times in seconds."""
    import etkv

    facts = etkv.read_kv_cache_metadata(model)
    config = etkv.CacheConfig(facts.layers, n + 2, k_format="f32", v_format="f32")
    seconds = {}

    def lap(name: str, since: float) -> float:
        now = time.perf_counter()
        seconds[name] = now - since
        return now

    ids = prompt(n)
    with etkv.DecodeSession(config, backend=facts.backend) as session:
        store = etkv.PrefixStore(folder, 1 << 40)
        if way == "load":
            start = time.perf_counter()
            assert store.load(session, ids[:-1], fingerprint="measured") == n - 1
            lap("load", start)
            return seconds
        with etkv.load(model, session) as program:
            start = now = time.perf_counter()
            if way == "stored":
                assert store.load(session, ids[:-1], fingerprint="measured") == n - 1
                now = lap("load", now)
            held = session.length
            for first in range(held, n, CHUNK):
                end = min(first + CHUNK, n)
                logits = program.forward(ids[first:end], list(range(first, end)))
            seconds["token"] = float(np.argmax(logits[..., -1, :]))
            lap("all", start)
            if way == "save":
                session.rewind(n - 1)
                assert store.save(session, ids[:-1], fingerprint="measured")
    return seconds


def read(path: Path) -> float:
    """Return the seconds that reading a file into new memory takes."""
    start = time.perf_counter()
    held = bytearray(path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        view = memoryview(held)
        while view and (n := file.readinto(view)):
            view = view[n:]
    return time.perf_counter() - start


def child(*words: object) -> dict[str, float]:
    """Measure in a new process."""
    command = [sys.executable, __file__, "--child", *map(str, words)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def spread(values: list[float]) -> str:
    """Return the median, the minimum and the maximum."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    """Print the figures."""
    if sys.argv[1:2] == ["--child"]:
        way, model, n, folder = sys.argv[2:]
        if way == "read":
            (file,) = Path(folder).glob("*.safetensors")
            print(json.dumps({"read": read(file)}))
        else:
            print(json.dumps(measure(way, model, int(n), folder)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=ROOT / "build/models/smollm2-135m-cpu/model.pte", type=Path)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8190])
    parser.add_argument("--turns", type=int, default=5, help="runs of each way, including the first (5)")
    options = parser.parse_args()
    for n in options.tokens:
        with tempfile.TemporaryDirectory() as folder:
            cold = [child("save", options.model, n, folder)]
            (file,) = Path(folder).glob("*.safetensors")
            stored, alone, plain = [], [], []
            for turn in range(options.turns):
                if turn > 0:
                    cold.append(child("cold", options.model, n, folder))
                stored.append(child("stored", options.model, n, folder))
                alone.append(child("load", options.model, n, folder)["load"])
                plain.append(child("read", options.model, n, folder)["read"])
            assert len({run["token"] for run in cold + stored}) == 1
            whole, again = ([run["all"] for run in runs] for runs in (cold, stored))
            print(f"{n} tokens, {file.stat().st_size / 1e6:.0f} MB, median of {options.turns} (minimum to maximum), s")
            print("  without the store  ", spread(whole))
            print("  with the store     ", spread(again))
            print("  of that, load      ", spread([run["load"] for run in stored]))
            print(f"  share               {statistics.median(again) / statistics.median(whole):.3f}")
            print("  first load, alone  ", spread(alone))
            print("  read of the file   ", spread(plain))
            print(f"  speed of read       {statistics.median(plain) / statistics.median(alone):.2f}", flush=True)


if __name__ == "__main__":
    main()
