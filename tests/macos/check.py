"""Checks the build for macOS on Apple silicon from another system. It compiles for macOS, but does not run anything.

``check.py [--short]``: ``--short`` compiles only the sources of a wheel, and resolves no requirements.

The compiler is PyPI's ``ziglang``, a clang with the headers of macOS. CMake configures this project for Darwin with
it, so files are compiled with the same commands as on a Mac. Undefined symbols are looked up in the libraries of the
macOS wheels of MLX and ExecuTorch, and these wheels must have the files that the build and the package need. All
files are kept in ``build/macos``.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent
BUILD = SOURCE / "build/macos"
SITE = BUILD / "site"
CARGO = SOURCE / "build/cargo"

MACOS = "14.0"
"""The minimum macOS version of etkv."""

PYTHONS = ("3.10", "3.12", "3.13")
"""The CPython releases for which the requirements must resolve. The wheels that this checks are for the second one."""

WHEELS = ("executorch==1.5.1", "mlx==0.32.2", "mlx-metal==0.32.2")

SOURCE_ONLY = {"antlr4-python3-runtime"}
"""Pins without a wheel for any system. They are pure Python, and pip builds them when it installs them."""

ELSEWHERE = {"blas.c", "exits.cpp", "half.cpp"}
"""Sources that are not compiled for macOS: the BLAS for Linux, a test of exits on Linux, and functions that mlx-c
omits on processors without half-precision types."""

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]

failures: list[str] = []
passed = 0


def expect(condition: bool, what: str) -> None:
    global passed
    if condition:
        passed += 1
    else:
        failures.append(what)
        print(f"failed: {what}", flush=True)


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command, and return it with its output. Ends the process with a message if the command fails."""
    arguments = [str(argument) for argument in command]
    done = subprocess.run(arguments, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise SystemExit(
            f"{shlex.join(arguments)}\nended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
        )
    return done


# ---- Tools and wheels ----------------------------------------------------------


def venv(tool: str) -> Path:
    return BUILD / "venv/bin" / tool


LINKS_NOTHING = """\
case " $* " in
*" -c "* | *" -E "* | *" -v "* | *" --version "*) ;;
*) echo "this compiler links nothing" >&2; exit 1 ;;
esac
"""
"""The start of a compiler's script. CMake first tests a compiler by linking a program, for which zig would compile
all of libc++. The script lets this fail, so CMake tests the compiler with an object instead."""


def tools() -> None:
    """Install the tools and unpack the wheels, unless they are up to date."""
    (BUILD / "objects").mkdir(parents=True, exist_ok=True)
    environment = os.environ
    environment["ZIG_GLOBAL_CACHE_DIR"] = environment["ZIG_LOCAL_CACHE_DIR"] = str(BUILD / "zig")
    wanted = (HERE / "requirements.txt").read_text() + " ".join(WHEELS)
    stamp = BUILD / "ready"
    if not stamp.is_file() or stamp.read_text() != wanted:
        install()
        stamp.write_text(wanted)
    (zig,) = (BUILD / "venv").glob("lib/python3*/site-packages/ziglang/zig")
    (BUILD / "bin").mkdir(exist_ok=True)
    targets = {"": f"aarch64-macos.{MACOS}", "linux-": "x86_64-linux-gnu"}
    for prefix, target in targets.items():
        for tool in ("cc", "c++"):
            script(f"{prefix}{tool}", LINKS_NOTHING + f"exec {shlex.quote(str(zig))} {tool} -target {target}")
    for tool in ("ar", "ranlib"):
        script(tool, f"exec {shlex.quote(str(zig))} {tool}")


def install() -> None:
    """Install the tools, and unpack the wheels."""
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "venv", BUILD / "venv")
    run(venv("python"), *pip, "install", "-r", HERE / "requirements.txt")
    download = ["download", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    system = ["--platform", f"macosx_{MACOS.replace('.', '_')}_arm64", "--python-version", PYTHONS[1]]
    run(sys.executable, *pip, *download, *system, "-d", BUILD / "wheels", *WHEELS)
    for wheel in (BUILD / "wheels").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(SITE)


def script(name: str, line: str) -> None:
    path = BUILD / "bin" / name
    path.write_text(f'#!/bin/sh\n{line} "$@"\n')
    path.chmod(0o755)


@functools.cache
def mach_o(library: str) -> object:
    """Return the facts that LIEF reads from a library. The path is relative to the wheels' site-packages."""
    run_in = venv("python")
    reader = (
        "import json, sys, lief\n"
        "found = lief.MachO.parse(sys.argv[1]).at(0)\n"
        "version = found.build_version\n"
        "kinds = lief.MachO.LoadCommand.TYPE\n"
        "own = [each.name for each in found.libraries if each.command == kinds.ID_DYLIB]\n"
        "print(json.dumps({\n"
        "  'name': own[0] if own else None,\n"
        "  'cpu': str(found.header.cpu_type).split('.')[-1],\n"
        "  'loads': [each.name for each in found.libraries if each.command != kinds.ID_DYLIB],\n"
        "  'macos': '.'.join(map(str, version.minos[:2])) if version else None,\n"
        "  'exports': [each.name for each in found.exported_symbols],\n"
        "  'imports': [each.name for each in found.imported_symbols],\n"
        "}))\n"
    )
    return json.loads(run(run_in, "-c", reader, SITE / library).stdout)


# ---- The wheels ----------------------------------------------------------------

MLX = "mlx/lib/libmlx.dylib"
EXECUTORCH = "executorch/lib/libexecutorch.dylib"
THREADPOOL = "executorch/lib/libexecutorch_threadpool.dylib"
THEIRS = "executorch/lib/libexecutorch_backend_mlx.dylib"
EXTENSION = "executorch/extension/pybindings/_C.cpython-312-darwin.so"
REGISTER = "__ZN10executorch7runtime16register_backendERKNS0_7BackendE"
LOOK_UP = "__ZN10executorch7runtime17get_backend_classEPKc"


def wheels() -> None:
    """Check that the wheels have the files, and load the libraries, that CMake, Cargo and the Python package expect."""
    for library in (MLX, EXECUTORCH, THEIRS, EXTENSION):
        file = SITE / library
        expect(file.is_file(), f"the wheels have no {library}")
        if not file.is_file():
            return
        facts = mach_o(library)
        leaf = library.rpartition("/")[2]
        expect(facts["cpu"] == "ARM64", f"{library} is for {facts['cpu']}, expected ARM64")
        # dyld satisfies a request for this name with a library that is already loaded under it. So etkv's libraries,
        # which do not name a folder of MLX or ExecuTorch, use the ones that Python has loaded.
        expect(facts["name"] == f"@rpath/{leaf}", f"{library} is named {facts['name']}, expected @rpath/{leaf}")
        least = tuple(map(int, facts["macos"].split(".")))
        expect(least <= tuple(map(int, MACOS.split("."))), f"{library} needs macOS {facts['macos']}, expected {MACOS}")
        for other in facts["loads"]:
            known = other.startswith(("@rpath/", "/usr/lib/", "/System/Library/"))
            expect(known, f"{library} loads {other}, which is neither in the system nor in a wheel")
    expect((SITE / MLX).with_name("mlx.metallib").is_file(), "MLX's Metal library is not in the folder of libmlx.dylib")
    for file in ("mlx/include/mlx/version.h", "executorch/include/executorch/runtime/backend/interface.h"):
        expect((SITE / file).is_file(), f"the wheels have no {file}")
    for file in (
        "data/bin/flatc",
        "backends/mlx/serialization/schema.fbs",
        "share/cmake/executorch-config-version.cmake",
    ):
        expect((SITE / "executorch" / file).is_file(), f"ExecuTorch's wheel has no {file}")
    ours, theirs = (Path(root, "backends/mlx/serialization/schema.fbs") for root in (executorch(), SITE / "executorch"))
    expect(ours.read_bytes() == theirs.read_bytes(), "schema.fbs differs between the wheels of this system and macOS")

    extension, executorch_exports = mach_o(EXTENSION), set(mach_o(EXECUTORCH)["exports"])
    # These two facts are the reasons why etkv's delegate is loaded before ExecuTorch's extension module, and has a
    # separate id. If the facts change, the order and the id are no longer necessary.
    expect(
        f"@rpath/{THEIRS.rpartition('/')[2]}" in extension["loads"], "_C no longer loads ExecuTorch's own MLX backend"
    )
    expect(REGISTER in mach_o(THEIRS)["imports"], "ExecuTorch's own MLX backend no longer registers itself")
    expect("@rpath/libexecutorch.dylib" in extension["loads"], "_C loads no libexecutorch.dylib, which etkv must share")
    for symbol in (REGISTER, LOOK_UP):
        expect(symbol in executorch_exports, f"libexecutorch.dylib does not export {symbol}")
    torch = [other for other in mach_o(EXECUTORCH)["loads"] if "torch." in other or "torch_" in other]
    expect(not torch, f"libexecutorch.dylib loads {torch}: it cannot be loaded before torch is imported")


def executorch() -> Path:
    """Return the folder of this system's ExecuTorch."""
    script = "import importlib.util as u; print(list(u.find_spec('executorch').submodule_search_locations)[0])"
    return Path(run(sys.executable, "-c", script).stdout.strip())


# ---- Compiling -----------------------------------------------------------------


def commands() -> dict[Path, list[str]]:
    """Return the command that compiles each source for macOS: that of CMake, or that of mlx-sys for Cargo's sources."""
    options = {
        "CMAKE_SYSTEM_NAME": "Darwin",
        "CMAKE_SYSTEM_PROCESSOR": "arm64",
        # CMake tests the compiler with a static library. Linking a program would need a C++ library for macOS.
        "CMAKE_TRY_COMPILE_TARGET_TYPE": "STATIC_LIBRARY",
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_C_COMPILER": BUILD / "bin/cc",
        "CMAKE_CXX_COMPILER": BUILD / "bin/c++",
        "CMAKE_AR": BUILD / "bin/ar",
        "CMAKE_RANLIB": BUILD / "bin/ranlib",
        "ETKV_MLX_DIR": SITE / "mlx",
        "ETKV_EXECUTORCH_DIR": SITE / "executorch",
        "ETKV_CARGO_TARGET_DIR": CARGO,
        "ETKV_PYTHON": sys.executable,
        # Without unity builds, each source has a separate command.
        "ETKV_UNITY": "OFF",
    }
    cmake = BUILD / "cmake"
    run("cmake", "-S", SOURCE, "-B", cmake, "-G", "Ninja", *(f"-D{name}={value}" for name, value in options.items()))
    found: dict[Path, list[str]] = {}
    for entry in json.loads((cmake / "compile_commands.json").read_text()):
        source = Path(entry["file"])
        if source.is_relative_to(BUILD):
            continue
        found[source] = shlex.split(entry["command"])

    aimless = [source.name for source, command in found.items() if f"-mmacosx-version-min={MACOS}" not in command]
    expect(not aimless, f"CMake compiles {len(aimless)} files without a minimum macOS, expected {MACOS}: {aimless[:3]}")

    # The options are those of crates/mlx-sys/build.rs, which disables warnings for the published sources.
    cxx = [str(BUILD / "bin/c++"), "-std=c++20", f"-mmacosx-version-min={MACOS}"]
    mlx_c = published_mlx_c()
    includes = [
        f"-isystem{mlx_c}",
        f"-isystem{SITE / 'mlx/include'}",
        "-include",
        str(SOURCE / "crates/mlx-sys/shim/format.h"),
    ]
    shim = [path for path in sorted((SOURCE / "crates/mlx-sys/shim").glob("*.cpp")) if path.name not in ELSEWHERE]
    for source in shim:
        found[source] = [*cxx, "-Wall", "-Wextra", "-Werror", *includes, "-c", str(source), "-o", ""]
    together = BUILD / "mlx-c.cpp"
    together.write_text("".join(f'#include "{source}"\n' for source in sorted((mlx_c / "mlx/c").glob("*.cpp"))))
    found[together] = [*cxx, "-w", *includes, "-c", str(together), "-o", ""]
    for source in sorted((SOURCE / "tests/package/installed").glob("*.c*")):
        found[source] = program_command(source)
    scratch = BUILD / "headers"
    scratch.mkdir(exist_ok=True)
    for header in sorted((SOURCE / "include/etkv").iterdir()):
        mlx = header.name in ("mlx_cache.hpp", "executorch_mlx_cache.hpp")
        kinds = ["c", "cpp"] if header.suffix == ".h" else ["cpp"]
        for suffix in kinds:
            source = scratch / f"{header.stem}_{header.suffix[1:]}.{suffix}"
            source.write_text(f'#include "etkv/{header.name}"\n' * 2 + "extern int etkv_header_test;\n")
            found[source] = program_command(source, "-std=c++20" if mlx else "-std=c++17")

    listed = run("git", "ls-files", "*.c", "*.cpp", "*.cc", "*.mm", cwd=SOURCE).stdout.split()
    for name in listed:
        elsewhere = Path(name).name in ELSEWHERE
        expect(elsewhere or SOURCE / name in found, f"no command compiles {name} for macOS")
    return found


def program_command(source: Path, cxx_standard: str = "-std=c++17") -> list[str]:
    """Return the command that compiles code of a user for macOS, in C11 or C++."""
    compiler, standard = ("cc", "-std=c11") if source.suffix == ".c" else ("c++", cxx_standard)
    executorch = SITE / "executorch/include"
    folders = [executorch, executorch / "executorch/runtime/core/portable_type/c10", SITE / "mlx/include"]
    folders.append(SOURCE / "tests/cpp/in_tree")
    includes = [f"-I{SOURCE / 'include'}", *(f"-isystem{folder}" for folder in folders)]
    defines = ["-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_EVENT_TRACER_ENABLED"]
    return [str(BUILD / "bin" / compiler), standard, *WARNINGS, *includes, *defines, "-c", str(source), "-o", ""]


def published_mlx_c() -> Path:
    """Return the folder `mlx-c` of the published mlx-sys in Cargo's sources."""
    manifest = SOURCE / "crates/mlx-sys/published/Cargo.toml"
    told = run("cargo", "metadata", "--format-version=1", "--locked", "--manifest-path", manifest).stdout
    (package,) = [each for each in json.loads(told)["packages"] if each["name"] == "mlx-sys"]
    return Path(package["manifest_path"]).parent / "src/mlx-c"


UMBRELLAS = {"etkv_h", "etkv_hpp", "executorch_hpp", "mlx_cache_hpp", "executorch_mlx_cache_hpp"}
"""Headers that include all others. The tests on Linux compile each header separately."""


def in_wheel(source: Path) -> bool:
    """Return whether a source is part of the wheel. Tests and examples are not."""
    path = str(source.relative_to(SOURCE)) if source.is_relative_to(SOURCE) else ""
    if path.startswith("build/macos/headers"):
        return source.stem in UMBRELLAS
    return path.startswith(("cpp/", "crates/mlx-sys/shim", "build/macos/mlx-c"))


def compiled(short: bool) -> dict[Path, Path]:
    """Compile the sources, or only those of the wheel if `short`. Return the objects of those that compile."""
    found = {source: command for source, command in commands().items() if not short or in_wheel(source)}
    objects = BUILD / "objects"

    def compile_one(index: int, source: Path, command: list[str]) -> tuple[Path, Path, str]:
        to = objects / f"{source.stem}-{index}.o"
        command = list(command)
        command[command.index("-o") + 1] = str(to)
        # Optimizing takes a third of the time. Without it an object needs all symbols that its inline functions need.
        done = subprocess.run([*command, "-g0", "-O0", "-fno-sanitize=all"], capture_output=True, text=True, cwd=BUILD)
        return source, to, "" if done.returncode == 0 else done.stderr

    made: dict[Path, Path] = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(compile_one, n, *item) for n, item in enumerate(sorted(found.items()))]
        for job in concurrent.futures.as_completed(jobs):
            source, to, error = job.result()
            lines = [line for line in error.splitlines() if re.search(r"(error|warning):", line)] or error.splitlines()
            expect(not error, f"{source.name} does not compile for macOS:\n  " + "\n  ".join(lines[:6]))
            if not error:
                made[source] = to
    return made


# ---- Symbols -------------------------------------------------------------------

READ_OBJECTS = (
    "import json, sys, lief\n"
    "found = {}\n"
    "for path in sys.stdin.read().split('\\n'):\n"
    "    binary = lief.MachO.parse(path).at(0)\n"
    "    undefined, defined, hidden = [], [], []\n"
    "    for symbol in binary.symbols:\n"
    "        if symbol.raw_type & 0x0E == 0:\n"
    "            undefined.append(symbol.name)\n"
    "        elif symbol.raw_type & 0x10:\n"
    "            hidden.append(symbol.name)\n"
    "        elif symbol.raw_type & 0x01:\n"
    "            defined.append(symbol.name)\n"
    "    found[path] = [undefined, defined, hidden]\n"
    "print(json.dumps(found))\n"
)


def symbols(objects: dict[Path, Path]) -> None:
    """Check that the wheels have the objects' undefined symbols, and that the C headers declare all exported ones."""
    listing = run(venv("python"), "-c", READ_OBJECTS, input="\n".join(map(str, objects.values()))).stdout
    read = json.loads(listing)
    of_mlx, *of_executorch = (set(mach_o(library)["exports"]) for library in (MLX, EXECUTORCH, THREADPOOL))
    own = {name for undefined, defined, hidden in read.values() for name in (*defined, *hidden)}
    needed: dict[str, set[str]] = {"MLX": set(), "ExecuTorch": set()}
    for undefined, _, _ in read.values():
        for name in set(undefined) - own:
            bare = re.sub(r"^__ZN?K?(T[VIS]N?)?", "", name)
            if bare.startswith("3mlx4core"):
                needed["MLX"].add(name)
            elif bare.startswith(("10executorch", "5torch8executor")) or name.startswith(("_et_pal_", "_pthreadpool_")):
                needed["ExecuTorch"].add(name)
    for what, exports in (("MLX", of_mlx), ("ExecuTorch", set().union(*of_executorch))):
        missing = sorted(needed[what] - exports)
        print(f"         {len(needed[what])} symbols of {what}")
        expect(bool(needed[what]), f"the objects need no symbol of {what}: nothing was looked up")
        expect(not missing, f"{len(missing)} symbols of {what} are in no library of its wheel: {missing[:5]}")

    headers = "".join(header.read_text() for header in (SOURCE / "include/etkv").glob("*.h"))
    declared = set(re.findall(r"\b(etkv_\w+)\s*\(", headers))
    for source, to in objects.items():
        if not in_wheel(source):
            continue
        exported = {name.removeprefix("_") for name in read[str(to)][1] if name.startswith("_etkv_")}
        open_ones = {name for name in exported if not name.startswith("etkv_private_")} - declared
        expect(not open_ones, f"{source.name} defines {sorted(open_ones)}, which no C header declares: hide it")


# ---- Code for one system only ---------------------------------------------------


def spelled() -> None:
    """Check that code that names a library with the suffix of Linux also mentions macOS in the lines around it."""
    literal = re.compile(r"[\w}]\.so\b(?![\w.]*\()")
    for name in run("git", "ls-files", "*.py", "*.cmake", "*.rs", "CMakeLists.txt", cwd=SOURCE).stdout.split():
        path = SOURCE / name
        if path == Path(__file__).resolve():
            continue
        lines = path.read_text().splitlines()
        for n, line in enumerate(lines):
            code = line.split("#")[0] if not name.endswith(".rs") else line.split("//")[0]
            if not literal.search(code) or "`" in code:
                continue
            near = "\n".join(lines[max(0, n - 6) : n + 4])
            other = re.search(r"darwin|apple|macos|dylib|linux", near, re.IGNORECASE)
            expect(other is not None, f"{name}:{n + 1} names a library with the suffix of Linux only: {line.strip()}")


def run_paths() -> None:
    """Check that each package that uses MLX passes MLX's folder to the linker, since dyld searches no other folder."""
    told = run("cargo", "metadata", "--format-version=1", "--locked", cwd=SOURCE).stdout
    metadata = json.loads(told)
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    names = {package["id"]: package["name"] for package in metadata["packages"]}

    def reaches_mlx(package: str, seen: set[str]) -> bool:
        if names[package] == "mlx-sys":
            return True
        seen.add(package)
        normal = [d["pkg"] for d in nodes[package]["deps"] if any(kind["kind"] != "build" for kind in d["dep_kinds"])]
        return any(other not in seen and reaches_mlx(other, seen) for other in normal)

    for package in metadata["workspace_members"]:
        if not reaches_mlx(package, set()):
            continue
        name = names[package]
        built = CARGO.glob(f"release/build/{name}-*/output")
        outputs = sorted((path for path in built if path.parent.name.rpartition("-")[0] == name), key=mtime)
        said = [output.read_text() for output in outputs if "rustc-link-" in output.read_text()]
        if not outputs:
            manifest = next(each for each in metadata["packages"] if each["id"] == package)["manifest_path"]
            script = Path(manifest).with_name("build.rs")
            said = [script.read_text()] if script.is_file() else []
        found = bool(said) and "rustc-link-arg=-Wl,-rpath," in said[-1]
        expect(found, f"the package {name} uses MLX, but its build script sets no run path for its tests")


def mtime(path: Path) -> float:
    return path.stat().st_mtime


def recipes() -> None:
    """Check that the Makefile sets SHELL.

    Apple's make is 3.81. It looks up the commands of simple recipes with the PATH of its environment and ignores the
    Makefile's, unless SHELL is not /bin/sh.
    """
    makefile = (SOURCE / "Makefile").read_text()
    shell = re.search(r"^SHELL\s*:?=\s*(\S+)", makefile, re.MULTILINE)
    found = shell and shell[1] != "/bin/sh"
    expect(bool(found), "the Makefile exports PATH but does not set SHELL: Apple's make ignores this PATH")


# ---- Clang on Linux, requirements -------------------------------------------------


def c_interface() -> None:
    """Compile the tests of the C interface for Linux with clang, which has warnings that gcc lacks."""
    for source in sorted((SOURCE / "tests/cpp").glob("*.c")):
        # The build generates the rows of the call table from the headers.
        folders = [SOURCE / "include", SOURCE / "build/cmake/tests/cpp"]
        flags = ["-std=c11", *WARNINGS, *(f"-I{folder}" for folder in folders), '-DETKV_TEST_VERSION="0"']
        to = BUILD / "objects" / f"linux-{source.stem}.o"
        command = [BUILD / "bin/linux-cc", *flags, "-c", source, "-o", to]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=BUILD)
        expect(done.returncode == 0, f"{source.name} does not compile with clang for Linux:\n{done.stderr[:1500]}")


def requirements() -> None:
    """Check that every pin of the full set has a wheel for macOS for each CPython release."""
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": MACOS, "UV_CACHE_DIR": str(BUILD / "uv")}
    pins = BUILD / "pins.txt"
    lines = [(SOURCE / name).read_text() for name in ("requirements.txt", "requirements-nodeps.txt")]
    wanted = [line for line in "\n".join(lines).splitlines() if line.partition("==")[0] not in SOURCE_ONLY]
    pins.write_text("\n".join(wanted) + "\n")
    for python in PYTHONS:
        command = [venv("uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-deps"]
        system = ["--only-binary=:all:", "--python-platform=aarch64-apple-darwin", f"--python-version={python}"]
        to = BUILD / f"pins-{python}.txt"
        command = [*map(str, command), *system, str(pins), "-o", str(to)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        told = f"the pins cannot be installed on macOS with Python {python}:\n{done.stderr[-1500:]}"
        expect(done.returncode == 0, told)
        if done.returncode == 0:
            chosen = to.read_text()
            expect("mlx-metal==" in chosen, f"with Python {python} there is no mlx-metal, MLX's Metal backend")
            expect("mlx-cpu" not in chosen, f"with Python {python} there is mlx-cpu, which is for Linux")


def steps(short: bool) -> Iterator[Callable[[], None]]:
    yield wheels
    yield spelled
    yield recipes
    yield run_paths
    yield c_interface
    if not short:
        yield requirements

    def compile_and_look_up() -> None:
        symbols(compiled(short))

    yield compile_and_look_up


def main(short: bool) -> int:
    tools()
    for step in steps(short):
        started = time.monotonic()
        step()
        print(f"{time.monotonic() - started:6.1f} s  {step.__name__}", flush=True)
    print(f"{passed} passed, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main("--short" in sys.argv[1:]))
