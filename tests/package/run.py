"""Tests the package: builds and runs projects that use etkv in every documented way.

The ways are an installed tree that was moved, pkg-config, etkv's sources in a subdirectory, a Rust crate as in
docs/embedding.md, and the Python wheel as in docs/python.md.

``run.py CMAKE_BUILD [--short]``: CMAKE_BUILD is the folder of etkv's build. With ``--short``, the ways that compile
etkv again are left out, and so is docs/python.md, whose model takes a minute to export. The first time, Cargo's output
is copied from ``build/cargo``.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import bounded

import document

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent

SECONDS = 3600
"""The time limit of a command, in seconds. Compiling all of etkv takes minutes."""

MODELS = SOURCE / "build/models"
PROGRAM = MODELS / "tiny-llama-f32/model.pte"
CPU_PROGRAM = MODELS / "cpu-tiny-llama-f32/model.pte"

# The same packages as in etkv's build, so that dependencies have the same features and are not compiled again.
PACKAGES = "--package;etkv-capi;--package;etkv-tokenizer"

CARGO, CARGO_WITHOUT_MLX = SOURCE / "build/package/cargo", SOURCE / "build/package/cargo-without-mlx"
"""Cargo's output for projects with other features than etkv's build. `build/lib` stays as it is."""

DARWIN = sys.platform == "darwin"

UNOPTIMIZED = "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG"
"""For C++ that runs one small program: optimizing it takes longer than running it."""

# With this option, which some systems set by default, the linker drops libraries that no symbol needs.
AS_NEEDED = [] if DARWIN else ["-DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed"]


class Failed(Exception):  # noqa: N818
    """A failed check. The message has the value that was found."""


def run(*command: object, env: dict[str, str] | None = None, cwd: Path | None = None, fails: bool = False) -> str:
    """Run `command`, and return its output on stdout and stderr.

    Raises :class:`Failed` if it fails, or if it succeeds although `fails` is set, or after `SECONDS`.
    """
    arguments = [str(argument) for argument in command]
    environment = {**os.environ, **(env or {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = bounded.run(arguments, SECONDS, cwd=cwd, env=environment, **streams)
    except subprocess.TimeoutExpired as late:
        raise Failed(f"{' '.join(arguments)}\nwas ended after {SECONDS} s:\n{told(late.output)}") from late
    if (done.returncode != 0) != fails:
        raise Failed(f"{' '.join(arguments)}\nended with {done.returncode}:\n{done.stdout[-6000:]}")
    return done.stdout


def told(output: bytes | str | None) -> str:
    """Return the last 6,000 characters of the output of a command that was ended."""
    return (output.decode(errors="replace") if isinstance(output, bytes) else output or "")[-6000:]


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise Failed(what)


def package(name: str) -> Path:
    """Return the folder of a Python package. Does not import it. Raises :class:`Failed` if there is none."""
    spec = importlib.util.find_spec(name)
    expect(spec is not None and bool(spec.submodule_search_locations), f"this Python has no {name}")
    return Path(next(iter(spec.submodule_search_locations)))


def configure(source: Path, build: Path, *options: object, fails: bool = False) -> str:
    return run("cmake", "-S", source, "-B", build, "-G", "Ninja", *options, fails=fails)


def libraries(program: Path) -> str:
    """Return the list of libraries that a program or library loads, as otool or ldd prints it."""
    return run(*(["otool", "-L"] if DARWIN else ["ldd"]), program)


class Package:
    def __init__(self, build: Path, scratch: Path, short: bool) -> None:
        self.build = build
        self.short = short
        self.scratch = scratch
        self.prefix = scratch / "moved/to/etkv"
        self.python = os.environ.get("ETKV_PYTHON", sys.executable)

    def install(self) -> None:
        """Install etkv and move the tree. Check that its files do not name a folder of the build."""
        first = self.scratch / "installed"
        run("cmake", "--install", self.build, "--prefix", first)
        self.prefix.parent.mkdir(parents=True)
        shutil.move(first, self.prefix)
        texts = [*self.prefix.rglob("*.cmake"), *self.prefix.rglob("*.pc")]
        expect(len(texts) > 4, f"CMake's package has only {texts}")
        for text in texts:
            for line in text.read_text().splitlines():
                named = [path for path in (SOURCE, self.build, first) if str(path) in line]
                # This line names the MLX of the build. Users of the file can replace it.
                expect(not named or line.startswith("mlxlibdir="), f"{text.name}: {line}")
        if not DARWIN:
            for library in self.prefix.glob("lib*/*.so"):
                runpath = [line for line in run("readelf", "-d", library).splitlines() if "PATH)" in line]
                expect([line.split()[-1] for line in runpath] == ["[$ORIGIN]"], f"{library.name}: {runpath}")

    def installed(self) -> None:
        """Use find_package: C and C++, caches and delegate, shared and static."""
        build = self.scratch / "installed-build"
        options = [f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DETKV_PYTHON={self.python}", *AS_NEEDED]
        configure(HERE / "installed", build, *options)
        # With --short, one of the programs that log: the shared and the static ones differ only in their libraries.
        logged = ("",) if self.short else ("", "_static")
        names = [f"{name}{kind}" for kind in ("", "_static") for name in ("caches_c", "caches_cpp", "on_mlx", "on_cpu")]
        targets = ("--target", *names, *(f"logged_mlx{kind}" for kind in logged)) if self.short else ()
        run("cmake", "--build", build, *targets)
        for kind in logged:
            *log, report = run(build / f"logged_mlx{kind}", PROGRAM).splitlines()
            step = "4 etkv::core forward: step{tokens=4 first=0 mask=causal read=4}: done took_us="
            expect(any(line.startswith(step) for line in log), "\n".join(["no line of the step:", *log]))
            found = json.loads(report)
            expect((found["length"], found["sequences"][0]["next"]) == (4, 4), report)
        for kind in ("", "_static"):
            expect("MLX" in run(build / f"caches_c{kind}"), "caches_c does not print the version of MLX")
            expect(run(build / f"caches_cpp{kind}") == "0 of 64 positions\n", "caches_cpp")
            expect(run(build / f"on_mlx{kind}", PROGRAM) == "4 positions of 4\n", "on_mlx")
            expect(run(build / f"on_cpu{kind}", CPU_PROGRAM).endswith("4 positions of 4\n"), "on_cpu")
            loaded = libraries(build / f"on_mlx{kind}")
            expect(DARWIN or loaded.count("libmlx.so =>") == 1, f"expected one MLX in the process, got:\n{loaded}")
            expect(("libetkv." in loaded) == (kind == ""), f"on_mlx{kind} loads:\n{loaded}")
            expect(DARWIN or "libetkv_blas." in loaded, f"on_mlx{kind} does not use etkv's BLAS:\n{loaded}")
            expect(DARWIN or kind != "" or str(self.prefix) in loaded, f"not the moved tree:\n{loaded}")
            expect("executorch" not in libraries(build / f"caches_c{kind}"), "caches alone load ExecuTorch")

    def caches_only(self) -> None:
        """Use find_package without ExecuTorch and Python, and check its messages if something is missing."""
        build = self.scratch / "caches-only"
        source = HERE / "installed"
        mlx, nothing = package("mlx"), shutil.which("false")
        given = [f"-DCMAKE_PREFIX_PATH={self.prefix}", f"-DETKV_PYTHON={nothing}"]
        said = configure(source, build, *given, "-DCACHES_ONLY=ON", f"-DETKV_MLX_DIR={mlx}", *AS_NEEDED)
        expect("etkv::mlx_backend is left out" in said, said)
        run("cmake", "--build", build)
        for program in ("caches_c", "caches_cpp", "caches_c_static", "caches_cpp_static"):
            run(build / program)

        def refused(words: Iterable[str], *options: str) -> None:
            said = " ".join(configure(source, build, *given, *options, fails=True).split())
            for word in words:
                expect(word in said, f"{options}: no `{word}` in:\n{said}")

        refused(["executorch==1.5.1", "ETKV_EXECUTORCH_DIR", f"{nothing} has none"], "-DCACHES_ONLY=OFF")
        refused(["==0.32.2", "ETKV_PYTHON", f"{nothing} has none"], "-DCACHES_ONLY=ON", "-DETKV_MLX_DIR=")
        other = self.scratch / "mlx/include/mlx"
        other.mkdir(parents=True)
        numbers = zip(("MAJOR", "MINOR", "PATCH"), (0, 31, 0), strict=True)
        (other / "version.h").write_text("".join(f"#define MLX_VERSION_{name} {number}\n" for name, number in numbers))
        refused(["needs mlx 0.32.2", "is mlx 0.31.0", "==0.32.2"], f"-DETKV_MLX_DIR={other.parent.parent}")
        refused(["has no include/mlx"], f"-DETKV_MLX_DIR={self.scratch}")

    def without_mlx(self) -> None:
        """Build, install and use etkv for the CPU only, without MLX."""
        build, prefix, user = (self.scratch / f"cpu-{part}" for part in ("build", "prefix", "user"))
        executorch = [f"-DETKV_PYTHON={shutil.which('false')}", f"-DETKV_EXECUTORCH_DIR={package('executorch')}"]
        options = ["-DETKV_MLX=OFF", "-DETKV_BUILD_EXAMPLES=OFF", "-DETKV_BUILD_TESTS=OFF", UNOPTIMIZED, *executorch]
        # Without MLX, the tokenizer's dependencies have other features, and Cargo would have to compile them for this
        # test only.
        packages = f"--package;etkv-capi;--config;{HERE / 'quick.toml'}"
        cargo = [f"-DETKV_CARGO_TARGET_DIR={CARGO_WITHOUT_MLX}", f"-DETKV_RUST_PACKAGES={packages}"]
        configure(SOURCE, build / "cmake", *options, *cargo)
        run("cmake", "--build", build / "cmake")
        run("cmake", "--install", build / "cmake", "--prefix", prefix)
        configure(HERE / "installed", user, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCPU_ONLY=ON", *executorch, *AS_NEEDED)
        run("cmake", "--build", user)
        for kind in ("", "_static"):
            expect(run(user / f"on_cpu{kind}", CPU_PROGRAM).endswith("4 positions of 4\n"), "on_cpu")
            loaded = libraries(user / f"on_cpu{kind}")
            expect("mlx" not in loaded, f"on_cpu{kind} loads:\n{loaded}")
            said = run(user / f"on_cpu{kind}", PROGRAM, fails=True)
            expect("MLXBackend" in said, said)

    def pkg_config(self) -> None:
        """Build a C program with one command that uses pkg-config."""
        if shutil.which("pkg-config") is None:
            print("    skipped: there is no pkg-config")
            return
        found = list(self.prefix.rglob("etkv.pc"))
        expect(len(found) == 1, f"etkv.pc: {found}")
        env = {"PKG_CONFIG_PATH": str(found[0].parent)}
        flags = run("pkg-config", "--cflags", "--libs", "etkv", env=env).split()
        program = self.scratch / "with-pkg-config"
        run("cc", HERE / "installed/caches.c", "-o", program, *flags)
        run(program)

    def subdirectory(self) -> None:
        """Use add_subdirectory: shared and static."""
        build = self.scratch / "subdirectory-build"
        options = [f"-DETKV_SOURCE={SOURCE}", f"-DETKV_PYTHON={self.python}", *AS_NEEDED]
        configure(
            HERE / "subdirectory",
            build,
            *options,
            f"-DETKV_CARGO_TARGET_DIR={CARGO}",
            f"-DETKV_RUST_PACKAGES={PACKAGES}",
        )
        run("cmake", "--build", build)
        for program in ("delegate", "delegate_static"):
            for model in (PROGRAM, CPU_PROGRAM):
                expect(run(build / program, model).endswith("4 positions of 4\n"), f"{program} {model}")

    def documentation(self) -> None:
        """Follow docs/embedding.md: write its files, run its commands and compare their output."""
        home = self.scratch / "home"
        home.mkdir()
        (home / "etkv").symlink_to(SOURCE)
        (home / "model.pte").symlink_to(PROGRAM)
        without = "" if shutil.which("pkg-config") else "pkg-config"
        problem = document.follow(SOURCE / "docs/embedding.md", home, without)
        expect(problem is None, str(problem))

    def crate(self) -> None:
        """Build a Rust crate outside of the checkout as in docs/embedding.md, which includes a patch of mlx-sys."""
        home = self.scratch / "crate"
        files = [step for step in document.steps((SOURCE / "docs/embedding.md").read_text()) if hasattr(step, "path")]
        files = [file for file in files if file.path.startswith("counter/")]
        expect(len(files) == 3, f"the page has {[file.path for file in files]}")
        for file in files:
            path = home / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text.replace("../etkv", str(SOURCE)))
        # The crate has the same versions and profile as etkv, so that Cargo reuses built packages.
        shutil.copy(SOURCE / "Cargo.lock", home / "counter")
        with (home / "counter/Cargo.toml").open("a") as manifest:
            manifest.write("\n[profile.release]\ncodegen-units = 1\n")
            # Packages with a path have a different identity here, so they are compiled for this test only.
            for name in ("etkv", "etkv-core", "etkv-cuda", "etkv-file", "etkv-delegate", "mlx-rs", "mlx-sys"):
                manifest.write(f"[profile.release.package.{name}]\nopt-level = 0\n")
        built = ["--release", "--quiet", "--target-dir", CARGO]
        environment = {"ETKV_PYTHON": str(self.python)}
        said = run("cargo", "tree", "--package", "mlx-sys", "--depth", "0", env=environment, cwd=home / "counter")
        expect(str(SOURCE / "crates/mlx-sys") in said, f"not etkv's mlx-sys: {said}")
        run("cargo", "build", *built, env=environment, cwd=home / "counter")
        # Run it directly, without the library paths that Cargo sets.
        said = run(CARGO / "release/counter")
        expect(said.endswith("0 of 4096 positions\n"), said)

    def wheel(self) -> None:
        """Build the Python wheel, install it outside of the checkout, and follow docs/python.md or run a program."""
        wheels = self.scratch / "wheels"
        settings = {
            "build-dir": self.scratch / "wheel",
            "cmake.define.ETKV_CARGO_TARGET_DIR": CARGO,
            "cmake.define.ETKV_RUST_PACKAGES": PACKAGES,
        }
        options = [f"--config-settings={name}={value}" for name, value in settings.items()]
        offline = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        run(self.python, "-m", "pip", "wheel", SOURCE, *offline, "--wheel-dir", wheels, *options)
        (wheel,) = wheels.glob("*.whl")
        expect(wheel.name.startswith("etkv-") and "-py3-none-" in wheel.name, wheel.name)
        expect("etkv/py.typed" in zipfile.ZipFile(wheel).namelist(), "the wheel has no etkv/py.typed")

        venv = self.scratch / "venv"
        run(self.python, "-m", "venv", venv)
        python = venv / "bin/python"
        # The wheel's dependencies are those of the current environment, which a .pth file adds. Python does not read
        # .pth files in a folder that a .pth file names, so the checkout is not added.
        (site,) = venv.glob("lib/python3*/site-packages")
        (site / "dependencies.pth").write_text(f"{package('executorch').parent}\n")
        run(python, "-m", "pip", "install", *offline[:1], *offline[2:], wheel)
        told = run(
            python, "-c", "import etkv, etkv._library as at; print(etkv.__file__, at.folder(), at.capi_tables())"
        )
        expect(told.count(str(site)) == 3, f"not from the wheel alone: {told}")
        if self.short:
            run(python, "-m", "etkv", "generate", PROGRAM, "Hi", "--max-tokens", "4")
            return
        said = run(python, SOURCE / "tests/python/document.py", SOURCE / "docs/python.md", cwd=SOURCE)
        # The page saves a conversation in the current folder, because its paths of models are relative to it.
        (SOURCE / "chat.safetensors").unlink(missing_ok=True)
        expect(said.endswith("the page is right\n"), said)


def main(build: Path, short: bool) -> int:
    if not PROGRAM.exists() or not CPU_PROGRAM.exists():
        run(sys.executable, SOURCE / "tests/python/cpp_programs.py")
    # Only the main thread may set a handler.
    bounded.take_interruptions()
    # Settings in the environment would affect all projects below.
    for name in ("CMAKE_PREFIX_PATH", "LD_LIBRARY_PATH", "PKG_CONFIG_PATH", "MAKEFLAGS", "MAKELEVEL"):
        os.environ.pop(name, None)
    for target in [CARGO] if short else [CARGO, CARGO_WITHOUT_MLX]:
        if not target.exists():
            copy_cargo(target)
    with tempfile.TemporaryDirectory(prefix="etkv-package-") as scratch:
        tests = Package(build.resolve(), Path(scratch).resolve(), short)
        # The other tests use the tree that this one installs. The longest tests begin first.
        results = [result(tests.install)]
        others = (
            *(() if short else (tests.crate, tests.without_mlx, tests.subdirectory, tests.caches_only)),
            tests.wheel,
            tests.installed,
            tests.documentation,
            tests.pkg_config,
        )
        # Most tests wait for a single compiler or linker.
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            results += pool.map(result, others)
    print(f"{results.count(True)} passed, {results.count(False)} failed")
    return 0 if all(results) else 1


def copy_cargo(target: Path) -> None:
    """Copy Cargo's output, most of which the projects can reuse. The times of files must be the same for Cargo.

    Leaves out programs, such as tests: they are most of the bytes, and have no suffix.
    """

    def programs(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder).name == "deps" and "." not in name]

    copied = target.with_name("copied")
    shutil.rmtree(copied, ignore_errors=True)
    for folder in ("release", "cxxbridge"):
        shutil.copytree(SOURCE / "build/cargo" / folder, copied / folder, symlinks=True, ignore=programs)
    copied.rename(target)


def result(test: Callable[[], None]) -> bool:
    """Run `test` and return whether it passes. Print its seconds, and the failure if there is one."""
    started = time.monotonic()
    failure = ""
    try:
        test()
    except Failed as problem:
        failure = f"failed: {test.__name__}: {problem}\n"
    print(f"{failure}{time.monotonic() - started:6.1f} s  {test.__name__}", flush=True)
    return not failure


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), "--short" in sys.argv[2:]))
