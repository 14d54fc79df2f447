"""Compares etkv's speed and memory with mlx-lm and with MLX alone, in one run.

Contestants run in turns: a round of each, then the next round. Each round is a separate process. The report is a
folder: report.json with every figure of every round, report.md with tables of medians and ratios, and plots. The
report names contestants that cannot run, with the reason.

In a checkout ``make bench`` runs the comparison on the programs of SmolLM2. ``make bench-pack`` creates a folder that
works without a checkout: in it, ``python3 -m run`` runs the comparison on any machine whose Python has MLX, with or
without a GPU. MLX chooses the device.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from . import batch, decode, fork, formats, lengths, models, op, plots, report, speculation, startup
from .measure import PEER, Bench, Figures, NotRunError, json_lines, run_process, say

TOPICS = {topic.NAME: topic for topic in (decode, lengths, formats, batch, fork, speculation, startup, op)}

PACK = Path(__file__).resolve().parents[1]
"""The parent folder of this package: benches/ in a checkout, or a pack of binaries."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 0, or 2 after a wrong argument."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a short run, which checks that everything runs")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TOPIC", help=f"one of {', '.join(TOPICS)}; may be repeated"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each contestant (3; with --quick 1)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="the folder of the report (build/bench)")
    parser.add_argument("--binaries", type=Path, metavar="FOLDER", help="of etkv's executables, or its parent")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=PTE:FOLDER",
        help="a program, and the folder with its weights for mlx-lm; may be repeated. Most topics use only the first",
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[], metavar="N", help="contexts of the topic decode")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="the limit for one process (1800)")
    parser.add_argument(
        "--draw",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="only write tables and plots of a folder's report.json, or of several, to --output or the first",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only if name not in TOPICS]
    if unknown:
        parser.error(f"unknown topic {unknown[0]}: there are {', '.join(TOPICS)}")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.draw:
        try:
            made = report.joined([json.loads((folder / "report.json").read_text()) for folder in options.draw])
        except (OSError, ValueError) as error:
            parser.error(str(error))
        output = options.output or options.draw[0]
        output.mkdir(parents=True, exist_ok=True)
        finish(made, output)
        return 0
    carried = (PACK / "bin").is_dir()
    output = (options.output or (PACK / "report" if carried else models.ROOT / "build" / "bench")).resolve()
    output.mkdir(parents=True, exist_ok=True)
    folders = folders_of(options.binaries.resolve() if options.binaries else None, carried)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        compared = [models.named(text) for text in options.model]
    except ValueError as error:
        parser.error(str(error))
    if not compared:
        compared = models.of_pack(PACK) if carried else models.of_checkout(quick=options.quick)
    bench = Bench(
        models=compared,
        folders=folders,
        output=output,
        environment=environment(folders),
        rounds=options.rounds or (1 if options.quick else 3),
        quick=options.quick,
        limit=options.limit,
        contexts=options.contexts,
    )
    finish(run(bench, options.only or list(TOPICS)), output)
    return 0


def folders_of(binaries: Path | None, carried: bool) -> list[Path]:
    """Returns the folders with etkv's executables."""
    if binaries:
        return [binaries, binaries / "bin"]
    if carried:
        return [PACK / "bin"]
    return [models.ROOT / "build" / "bin", models.ROOT / "build" / "cmake" / "benches"]


def environment(folders: list[Path]) -> dict[str, str]:
    """Returns the environment of the processes.

    Executables of a pack find etkv's libraries in ``lib`` next to ``bin``, MLX's in its Python package, and CUDA's in
    NVIDIA's packages. Executables of a checkout have run paths.
    """
    found = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    library = "libetkv.0.dylib" if sys.platform == "darwin" else "libetkv.so.0"
    carried = [folder.parent / "lib" for folder in folders if (folder.parent / "lib" / library).exists()]
    carried = [folder for folder in carried if folder != models.ROOT / "build" / "lib"]
    if carried:
        places = [*carried, *packaged("mlx", "lib"), *packaged("nvidia", "*/lib"), Path("/usr/local/cuda/lib64")]
        before = [found["LD_LIBRARY_PATH"]] if found.get("LD_LIBRARY_PATH") else []
        found["LD_LIBRARY_PATH"] = ":".join([*map(str, places), *before])
    return found


def packaged(package: str, pattern: str) -> list[Path]:
    """Returns the folders of an installed Python package that match a pattern. The package is not imported."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return [folder for place in places or [] for folder in sorted(Path(place).glob(pattern)) if folder.is_dir()]


def run(bench: Bench, names: list[str]) -> Figures:
    """Runs topics; returns the report."""
    started = datetime.datetime.now(datetime.timezone.utc)
    clock = time.monotonic()
    found, why = facts(bench)
    bench.device = found["device"]
    made: Figures = {
        "format": report.FORMAT,
        "started": started.strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(found),
        "versions": {**version_of_etkv(), "MLX": found["mlx"], "mlx-lm": found["mlx_lm"]},
        "options": {
            "quick": bench.quick,
            "rounds": bench.rounds,
            "models": [
                {"name": one.name, "program": str(one.program), "weights": str(one.weights)} for one in bench.models
            ],
        },
        "topics": [],
    }
    for name in TOPICS:
        if name not in names:
            continue
        bench.topic = name
        try:
            topic = TOPICS[name].measure(bench)
        except NotRunError as reason:
            topic = report.Topic(name, name, "", not_run=[str(reason)])
        if why:
            topic.not_run.append(f"mlx-lm: {why}")
        made["topics"].append(report.topic_as_json(topic))
        # If the run is stopped, the figures so far are kept.
        made["seconds"] = time.monotonic() - clock
        made["samples"] = bench.samples
        report.write(made, bench.output)
    for file in ("job.json", "ids.txt"):
        (bench.output / file).unlink(missing_ok=True)
    return made


def facts(bench: Bench) -> tuple[Figures, str | None]:
    """Returns the versions and the device that MLX in Python reports. If they are unknown, returns a substitute with
    the reason."""
    job = bench.output / "job.json"
    job.write_text(json.dumps({"work": "facts"}))
    try:
        return json_lines(run_process([sys.executable, str(PEER), str(job)], bench.environment, 600))[-1], None
    except NotRunError as reason:
        nothing = {"mlx": None, "mlx_lm": None, "device": "cpu", "device_name": "unknown device"}
        return nothing, str(reason)


def machine(found: Figures) -> Figures:
    """Returns a description of the machine for the report."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "device": found["device"],
        "device_name": found["device_name"],
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": pages / 2**30,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def version_of_etkv() -> dict[str, str]:
    """Returns etkv's version: the commit of the checkout, or of the pack."""
    file = PACK / "version.txt"
    if file.exists():
        return {"etkv": file.read_text().strip()}
    command = ["git", "-C", str(PACK), "describe", "--always", "--dirty"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return {"etkv": "unknown"}
    return {"etkv": ended.stdout.strip() or "unknown"}


def finish(made: Figures, output: Path) -> None:
    """Writes the tables and plots of a report, and prints the tables."""
    report.write(made, output)
    try:
        drawn = plots.draw(made, output)
    except NotRunError as reason:
        drawn = []
        print(f"no plots: {reason}; --draw draws them from report.json on another machine", file=sys.stderr)
    say("")
    print(report.markdown(made))
    print(f"{output}: report.json, report.md{''.join(f', {name}' for name in drawn)}")


if __name__ == "__main__":
    sys.exit(main())
