"""Programs that run from Python: logits, input and output arrays, and errors after which everything stays usable."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import etkv
import mlx_programs
import reference
from etkv import _capi, _device, _library
from reference import PROMPT, Variant, config

SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


@pytest.fixture(scope="module")
def expected(llama) -> np.ndarray:
    """Return transformers' row of logits for each token of the prompt."""
    return reference.logits(reference.load_hf(llama.hf), PROMPT)


@pytest.fixture
def session(llama):
    with etkv.DecodeSession(config(llama)) as session:
        yield session


def run(program: etkv.Program, ids, start: int = 0) -> np.ndarray:
    return program.forward(list(ids), list(range(start, start + len(ids))))


@pytest.mark.parametrize("kind", [etkv.DecodeSession, etkv.SeqSession, etkv.TreeSession])
def test_logits_are_those_of_transformers(llama, expected, kind):
    with kind(config(llama)) as session, etkv.load(llama.path, session) as program:
        rows = [run(program, PROMPT[:4]), run(program, PROMPT[4:6], 4), run(program, PROMPT[6:], 6)]
        np.testing.assert_allclose(np.concatenate(rows), expected, atol=2e-4)
        assert session.length == len(PROMPT)


@pytest.mark.parametrize("kind", [etkv.DecodeSession, etkv.SeqSession, etkv.TreeSession])
def test_the_last_row_of_text_and_all_of_candidates(llama, kind):
    n = len(PROMPT)
    with kind(config(llama)) as session, etkv.load(llama.path, session) as program:
        prompt, three = run(program, PROMPT), run(program, [7, 8, 9], n)
    with kind(config(llama)) as session, etkv.load(llama.path, session, logits="proposed") as program:
        np.testing.assert_allclose(run(program, PROMPT), prompt[-1:], atol=2e-4)
        np.testing.assert_allclose(run(program, [7, 8, 9], n), three[-1:], atol=2e-4)
        if kind is not etkv.DecodeSession:
            session.rewind(n)
            session.begin_step([0, 0, 0])
            np.testing.assert_allclose(run(program, [7, 8, 9], n), three, atol=2e-4)
        if kind is etkv.TreeSession:
            session.rewind(n)
            session.propose([-1, 0, 1])
            np.testing.assert_allclose(run(program, [7, 8, 9], n), three, atol=2e-4)
            session.commit([0])
            # One of the three tokens is kept.
            np.testing.assert_allclose(run(program, [8, 9], n + 1), three[-1:], atol=2e-4)


def test_the_type_of_inputs_decides_the_type_of_outputs(llama, session, expected):
    positions = list(range(len(PROMPT)))
    with etkv.load(llama.path, session) as program:
        for ids, at, kind in [
            (PROMPT, positions, np.ndarray),
            (np.array(PROMPT), np.array(positions), np.ndarray),
            (np.array([PROMPT], np.int32), np.array(positions, np.int32)[:, None], np.ndarray),
            (torch.tensor(PROMPT), torch.tensor(positions), torch.Tensor),
            (torch.tensor([PROMPT], dtype=torch.int32), np.array(positions), torch.Tensor),
            (torch.tensor([PROMPT, PROMPT]).T[:, 0], torch.tensor(positions), torch.Tensor),
        ]:
            session.clear()
            rows = program.forward(ids, at)
            assert isinstance(rows, kind)
            assert tuple(rows.shape) == expected.shape
            np.testing.assert_allclose(np.asarray(rows), expected, atol=2e-4)


def test_rows_are_copied_by_default(llama, session):
    with etkv.load(llama.path, session, logits="last") as program:
        kept = run(program, PROMPT)
        before = kept.copy()
        shared = program.forward([7], [7], copy=False)
        seen = shared.copy()
        again = program.forward([8], [8], copy=False)
        assert again.ctypes.data == shared.ctypes.data, "the program's own memory"
        assert not np.array_equal(shared, seen)
        np.testing.assert_array_equal(kept, before)
        seen = again.copy()
    # The rows keep their memory alive.
    gc.collect()
    np.testing.assert_array_equal(again, seen)


def test_inputs_that_the_method_does_not_take(llama, session):
    with etkv.load(llama.path, session) as program:
        ids, at = torch.tensor([PROMPT]), torch.arange(len(PROMPT))
        for inputs, told in [
            ((ids,), "model.pte has 2 inputs, 1 are given"),
            ((ids[0], at), r"input 0 of model.pte has shape \[7\], expected at most \[1, 64\]"),
            ((ids, torch.arange(65)), r"input 1 of model.pte has shape \[65\], expected at most \[64\]"),
        ]:
            with pytest.raises(etkv.EtkvError, match=told):
                program.execute(*inputs)
        with pytest.raises(etkv.EtkvError):
            program.execute(ids.float(), at)
        assert session.length == 0


def test_bfloat16_rows_are_tensors_or_widened():
    program = reference.program(Variant("tiny-llama", "bf16"))
    with etkv.DecodeSession(config(program)) as session, etkv.load(program.path, session) as loaded:
        assert run(loaded, PROMPT).dtype == np.float32
        session.clear()
        assert loaded.forward(torch.tensor(PROMPT), torch.arange(len(PROMPT))).dtype == torch.bfloat16


def test_the_runtime_of_executorch_runs_it_too(llama, expected):
    etkv.register_backend()
    from executorch.runtime import Runtime

    runtime = Runtime.get()
    assert runtime.backend_registry.is_available("MLXBackend")
    with etkv.SeqSession(config(llama)) as session:
        with session.bound(logits="last"):
            forward = runtime.load_program(llama.path).load_method("forward")
        rows = forward.execute([torch.tensor([PROMPT]), torch.arange(len(PROMPT))])[0]
        np.testing.assert_allclose(rows[0].numpy(), expected[-1:], atol=2e-4)
        assert session.length == len(PROMPT)
        # Outside of the block, programs are not bound.
        alone = runtime.load_program(llama.path).load_method("forward")
        with pytest.raises(RuntimeError):
            alone.execute([torch.tensor([PROMPT]), torch.arange(len(PROMPT))])


def test_bindings_nest_and_belong_to_a_thread(llama):
    """The end of a block, even with an error, removes its binding. No other thread has the binding."""
    etkv.register_backend()
    from executorch.runtime import Runtime

    def loads(into: etkv.Session | None) -> bool:
        """Load a program, and return whether it runs on the cache of ``into``."""
        before = into.length if into else 0
        method = Runtime.get().load_program(llama.path).load_method("forward")
        try:
            method.execute([torch.tensor([[60]]), torch.tensor([before])])
        except RuntimeError:
            return into is None
        return into is not None and into.length == before + 1

    with etkv.DecodeSession(config(llama)) as outer, etkv.DecodeSession(config(llama)) as inner:
        with outer.bound():
            with pytest.raises(RuntimeError, match="within"), inner.bound():
                assert loads(inner)
                raise RuntimeError("within")
            assert loads(outer)
            elsewhere = []
            thread = threading.Thread(target=lambda: elsewhere.append(loads(None)))
            thread.start()
            thread.join()
            assert elsewhere == [True]
        assert loads(None)
        assert (outer.length, inner.length) == (1, 1)


def test_many_sequences_in_a_step(llama, expected):
    """Two sequences in one step, and later a fork of the first, have the same rows as alone."""
    other = [9, 8, 7]
    alone = reference.logits(reference.load_hf(llama.hf), other)
    with etkv.SeqSession(config(llama)) as session, etkv.load(llama.path, session) as program:
        session.begin_step([0] * 4 + [5] * 3)
        rows = program.forward(PROMPT[:4] + other, [0, 1, 2, 3, 0, 1, 2])
        np.testing.assert_allclose(rows[:4], expected[:4], atol=2e-4)
        np.testing.assert_allclose(rows[4:], alone, atol=2e-4)
        session.seq_cp(0, 1)
        assert (session.length, session.sequences()) == (7, [0, 1, 5])
        session.begin_step([1, 1, 1])
        np.testing.assert_allclose(program.forward(PROMPT[4:], [4, 5, 6]), expected[4:], atol=2e-4)
        assert (session.seq_len(0), session.seq_len(1), session.length) == (4, 7, 10)
        session.seq_rm(1, 5)
        assert session.seq_positions(1) == [range(0, 5)]
        session.seq_keep(1)
        session.compact()
        np.testing.assert_allclose(run(program, PROMPT[5:], 5), expected[5:], atol=2e-4)


def test_a_token_of_two_sequences(llama, expected):
    with etkv.SeqSession(config(llama)) as session, etkv.load(llama.path, session) as program:
        session.begin_step_shared([[0, 3]] * 4)
        run(program, PROMPT[:4])
        assert (session.length, session.seq_len(0), session.seq_len(3)) == (4, 4, 4)
        session.begin_step([3, 3, 3])
        np.testing.assert_allclose(run(program, PROMPT[4:], 4), expected[4:], atol=2e-4)


def test_a_tree_of_candidates(llama, expected):
    """Each of two branches after a prompt sees its own ancestors, and the accepted branch continues."""
    with etkv.TreeSession(config(llama)) as session, etkv.load(llama.path, session) as program:
        run(program, PROMPT[:4])
        session.propose([-1, -1, 1])
        rows = program.forward([11, PROMPT[4], PROMPT[5]], [4, 4, 5])
        np.testing.assert_allclose(rows[1:], expected[4:6], atol=2e-4)
        session.commit([1, 2])
        assert session.length == 6
        np.testing.assert_allclose(run(program, PROMPT[6:], 6), expected[6:], atol=2e-4)


# ---- Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "positions", "error", "told"),
    [
        ([1], [9], etkv.PositionError, "position 9 leaves a gap: the next is 7"),
        ([1], [-1], etkv.PositionError, "-1"),
        ([1, 2], [7], etkv.EtkvError, "expected a position for each of 2 tokens, got 1"),
        ([320], [7], etkv.StatusError, "from 0 to 319, got 320"),
        ([1] * 58, range(7, 65), etkv.CapacityError, "64"),
        ([1] * 65, range(7, 72), etkv.EtkvError, "the step has 65 tokens, the program takes at most 64"),
        ([], [], etkv.EtkvError, "tokens is empty"),
        ([1.5], [7], etkv.EtkvError, "tokens has dtype torch.float64"),
        ([True], [7], etkv.EtkvError, "tokens has dtype torch.bool"),
    ],
)
def test_a_bad_step_changes_nothing(llama, session, expected, ids, positions, error, told):
    with etkv.load(llama.path, session) as program:
        run(program, PROMPT)
        with pytest.raises(error, match=told):
            program.forward(ids, list(positions))
        assert session.length == len(PROMPT)
        np.testing.assert_allclose(run(program, PROMPT[6:], 6), expected[6:], atol=2e-4)


def test_rows_without_a_session(tmp_path):
    """``logits`` is checked and applied even without a cache."""
    path = mlx_programs.write(
        torch.nn.Sequential(torch.nn.Embedding(16, 32), torch.nn.Linear(32, 16)),
        (torch.zeros((1, 3), dtype=torch.long),),
        tmp_path / "x.pte",
        dynamic_shapes=({1: torch.export.Dim("tokens", min=1, max=8)},),
    )
    with pytest.raises(etkv.EtkvError, match="logits is 'some', expected one of all, last, proposed"):
        etkv.load(path, None, logits="some")
    for logits, rows in (("all", 5), ("last", 1), ("proposed", 1)):
        with etkv.load(path, None, logits=logits) as program:
            assert program.execute(torch.arange(5).reshape(1, 5))[0].shape == (1, rows, 16)


def test_no_session_overrides_the_block(llama, session):
    """A program that is loaded without a session has no session, even in a block that binds another one."""
    with session.bound(), etkv.load(llama.path, None) as program:
        assert program.session is None
        with pytest.raises(etkv.NoCacheError, match="loaded without one"):
            run(program, PROMPT)
        assert session.length == 0
        # The binding of the block is still in force.
        with etkv.load(llama.path, session) as bound:
            run(bound, PROMPT)
        assert session.length == len(PROMPT)


def test_after_close(llama):
    session = etkv.DecodeSession(config(llama))
    program = etkv.load(llama.path, session)
    session.close()
    with pytest.raises(etkv.EtkvError, match=r"the session of model.pte is closed: load the program"):
        run(program, PROMPT)
    program.close()
    program.close()
    for use in (
        lambda: run(program, PROMPT),
        lambda: program.metadata,
        lambda: program.eos_token_ids,
        lambda: program.method_names,
        lambda: etkv.generate_tokens(program, PROMPT),
    ):
        with pytest.raises(etkv.EtkvError, match=r"model.pte is closed: load it again"):
            use()
    with pytest.raises(etkv.EtkvError, match="closed"):
        etkv.load(llama.path, session)


def test_a_cache_of_other_layers(llama):
    with etkv.DecodeSession(etkv.CacheConfig([etkv.LayerConfig(2, 16)] * 3, 10)) as session:
        with pytest.raises(etkv.StatusError) as caught:
            etkv.load(llama.path, session)
        assert caught.value.status == etkv.Status.SHAPE
        assert "3" in str(caught.value)


@pytest.mark.parametrize("chooser", ["device", "host", "cpu"])
def test_steps_beyond_the_context(llama, chooser, monkeypatch):
    """Steps beyond the context are refused even if the session has room, unless an option allows them. Answers end
    there.
    """
    path = reference.program(Variant("tiny-llama", backend="cpu")).path if chooser == "cpu" else llama.path
    facts = etkv.read_kv_cache_metadata(path)
    context = facts.max_context_length
    prompt = [(7 * n) % 250 for n in range(context - 4)]
    if chooser == "host":
        monkeypatch.setattr(_device.DeviceAnswer, "make", lambda *_: None)
    options = {"max_tokens": 20, "eos_token_ids": []}
    with etkv.DecodeSession(etkv.CacheConfig(facts.layers, context + 40), backend=facts.backend) as session:
        with etkv.load(path, session, logits="last") as program:
            assert program.context == context
            answer = etkv.generate_tokens(program, prompt, **options)
            # Four tokens of the answer run, and the fifth is chosen at the last position.
            assert (len(list(answer)), answer.finish_reason, session.length) == (5, "capacity", context)
            told = f"position {context} is beyond the context of {context} tokens that model.pte was exported for"
            for step in (
                lambda: program.forward([1], [context]),
                lambda: list(etkv.generate_tokens(program, [1], **options)),
                lambda: program.forward([1, 2], [context - 1, context]),
            ):
                with pytest.raises(etkv.CapacityError, match=told):
                    step()
            assert session.length == context
            session.clear()
            assert list(etkv.generate_tokens(program, prompt, **{**options, "max_tokens": 5})) == answer.token_ids
        session.clear()
        with etkv.load(path, session, logits="last", beyond_context=True) as program:
            longer = etkv.generate_tokens(program, prompt, **options)
            assert (list(longer)[:5], longer.finish_reason) == (answer.token_ids, "length")
    whole = etkv.CacheConfig(facts.layers, context)
    with etkv.DecodeSession(whole, backend=facts.backend) as session, etkv.load(path, session) as program:
        assert program.context is None


def test_the_exporter_is_not_imported(llama):
    """A process that runs programs does not import ExecuTorch's exporter, which takes seconds, but can do so later."""
    done = script(
        """
        import sys
        with etkv.DecodeSession(config) as session, etkv.load(path, session) as program:
            print(program.forward([1], [0]).shape[0])
        print([name for name in sys.modules if name.startswith("executorch.exir") and name.count(".") < 2])
        import executorch.exir._warnings, executorch.exir
        from executorch.extension.pybindings import portable_lib
        print(callable(executorch.exir.to_edge), executorch.exir._warnings.ExperimentalWarning.__name__)
        """,
        str(llama.path),
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.splitlines() == ["1", "[]", "True ExperimentalWarning"]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_only_the_application_writes(llama, backend):
    """Neither imports nor a program's first step write to stdout or stderr. ExecuTorch's lines are logged."""
    path = reference.program(Variant("tiny-llama", backend="cpu")).path if backend == "cpu" else llama.path
    script = f"""
        import logging, sys
        import etkv
        class Kept(logging.Handler):
            lines = []
            def emit(self, record):
                self.lines.append(record.getMessage())
        logging.getLogger("etkv.executorch").addHandler(Kept())
        logging.getLogger("etkv.executorch").setLevel(logging.DEBUG)
        facts = etkv.read_kv_cache_metadata({str(path)!r})
        config = etkv.CacheConfig(facts.layers, 32)
        with etkv.DecodeSession(config, backend=facts.backend) as s, etkv.load({str(path)!r}, s) as p:
            assert len(list(etkv.generate_tokens(p, [1, 2, 3], max_tokens=2, eos_token_ids=[]))) == 2
        assert all("\\n" not in line for line in Kept.lines)
        if facts.backend == "cpu" and sys.platform == "linux":
            assert any("cpuinfo" in line for line in Kept.lines), Kept.lines
        print("the application's own line", file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "the application's own line\n")


def test_files_that_are_not_programs(llama, session, tmp_path):
    with pytest.raises(etkv.EtkvError, match="cannot be read: No such file"):
        etkv.load(tmp_path / "nowhere.pte", session)
    file = tmp_path / "x.pte"
    file.write_bytes(b"0123456789")
    with pytest.raises(etkv.EtkvError, match="is not an ExecuTorch program"):
        etkv.load(file, session)
    file.write_bytes(llama.path.read_bytes()[:5000])
    with pytest.raises(etkv.ProgramError, match="is damaged"):
        etkv.load(file, session)
    file.write_bytes(llama.path.read_bytes().replace(b"MLX0", b"MLX7"))
    with pytest.raises(etkv.ProgramError, match="MLX0"):
        etkv.load(file, session)
    with pytest.raises(etkv.EtkvError, match="has no method 'backward'; it has forward"):
        etkv.load(llama.path, session, method="backward")
    with pytest.raises(etkv.EtkvError, match="logits is 'none', expected one of all, last"):
        etkv.load(llama.path, session, logits="none")
    with pytest.raises(etkv.EtkvError, match="session is 'cache-0', expected a DecodeSession"):
        etkv.load(llama.path, "cache-0")


def test_a_missing_library_is_reported(llama, tmp_path):
    """A second use raises the same error as the first."""
    missing = [f"ETKV_LIBRARY_DIR is {tmp_path}, which has no libetkv{SUFFIX}"]
    assert two_uses(tmp_path) == missing * 2
    library = tmp_path / f"libetkv{SUFFIX}"
    library.write_bytes(b"not a library")
    first, second = two_uses(tmp_path)
    assert first == second
    assert first.startswith(f"{library} cannot be loaded: ")
    library.unlink()
    # This library loads, but its interface is older than the package's.
    source = tmp_path / "old.c"
    source.write_text("unsigned etkv_abi_version(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True, timeout=60)
    told = f"{library} has interface 1, this package needs {_capi.ABI_VERSION}: build it again"
    assert two_uses(tmp_path) == [told] * 2


def test_the_tables_beside_a_library_come_first(tmp_path, monkeypatch):
    own, other = tmp_path / "own", tmp_path / "other"
    monkeypatch.setattr(_library, "_OWN", (own,))
    monkeypatch.setattr(_library, "folder", lambda: other)
    with pytest.raises(etkv.EtkvError, match=f"^{other} has no capi_tables.py: build it again"):
        _library.capi_tables()
    for folder in (own, other):
        folder.mkdir()
        (folder / "capi_tables.py").touch()
        assert _library.capi_tables() == folder / "capi_tables.py"


def two_uses(libraries: Path) -> list[str]:
    """Return the messages of two uses with the native libraries in this folder."""
    use = "try: etkv.row_bytes('f16', 64)\nexcept etkv.EtkvError as error: print(error)\n"
    environment = {**os.environ, "ETKV_LIBRARY_DIR": str(libraries)}
    command = [sys.executable, "-c", "import etkv\n" + use * 2]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_loaded_on_one_thread_and_run_on_another(llama, session, expected):
    with etkv.load(llama.path, session) as program:
        rows = []
        thread = threading.Thread(target=lambda: rows.append(run(program, PROMPT)))
        thread.start()
        thread.join()
        np.testing.assert_allclose(rows[0], expected, atol=2e-4)


def test_the_cache_outlives_the_session_for_the_program(llama):
    """A session without references is closed, but the program keeps the cache alive."""
    program = etkv.load(llama.path, etkv.DecodeSession(config(llama)))
    assert run(program, PROMPT).shape[0] == len(PROMPT)
    assert program.session.length == len(PROMPT)


@pytest.mark.parametrize(
    ("ids", "positions", "told"),
    [
        ([[1, 2], [3, 4]], [0, 1, 2, 3], r"tokens has shape \[2, 2\], expected \[T\] or \[1, T\]"),
        ([[1], [2]], [0, 1], r"tokens has shape \[2, 1\]"),
        ([1, 2], [[0, 0], [1, 1]], r"positions has shape \[2, 2\], expected \[T\], \[T, 1\] or \[1, T\]"),
        (["a"], [0], r"tokens is \['a'\], expected 64-bit integers"),
        ([1], None, "positions is None, expected 64-bit integers"),
        ([[1], [2, 3]], [0], r"tokens is \[\[1\], \[2, 3\]\]"),
        ([2**63], [0], rf"tokens is \[{2**63}\]"),
        (torch.zeros(1, dtype=torch.long, device="meta"), [0], r"tokens is a torch\.strided tensor on meta, expected"),
        (torch.tensor([1]).to_sparse(), [0], r"tokens is a torch\.sparse_coo tensor on cpu, expected a dense"),
    ],
)
def test_invalid_tokens_and_positions(llama, session, ids, positions, told):
    with etkv.load(llama.path, session) as program, pytest.raises(etkv.EtkvError, match=told):
        program.forward(ids, positions)
    assert session.length == 0


def test_arrays_however_they_lie_in_memory(llama, session, expected):
    read_only = np.array(PROMPT)
    read_only.setflags(write=False)
    with etkv.load(llama.path, session) as program:
        for ids in (np.array(PROMPT[::-1])[::-1], np.repeat(PROMPT, 3)[::3], np.array(PROMPT, ">i8"), read_only):
            session.clear()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                rows = program.forward(ids, np.arange(len(PROMPT)))
            np.testing.assert_allclose(rows, expected, atol=2e-4)


def script(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run code in a separate process, so that a crash or a hang does not affect the tests."""
    begin = "import sys, etkv\npath = sys.argv[1]\n"
    begin += "config = etkv.CacheConfig(etkv.read_kv_cache_metadata(path).layers, 64)\n"
    command = [sys.executable, "-c", begin + textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_failures_on_several_threads_at_once(llama):
    """ExecuTorch logs each failure, and all threads share one log."""
    done = script(
        """
        import threading
        refused = []
        def fail():
            with etkv.DecodeSession(config) as session, etkv.load(path, session) as program:
                for _ in range(300):
                    try:
                        program.forward([1], [9])
                    except etkv.PositionError:
                        refused.append(1)
        threads = [threading.Thread(target=fail) for _ in range(3)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(refused))
        """,
        str(llama.path),
    )
    assert (done.returncode, done.stdout) == (0, "900\n"), done.stderr[-1000:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_process_is_refused(llama):
    done = script(
        """
        import os
        session = etkv.DecodeSession(config)
        program = etkv.load(path, session)
        if os.fork() == 0:
            for use in (lambda: program.forward([1], [0]), lambda: etkv.load(path, session)):
                try:
                    use()
                except etkv.EtkvError as error:
                    print("was forked from" in str(error), flush=True)
            os._exit(0)
        os.wait()
        print(program.forward([1], [0]).shape[0])
        """,
        str(llama.path),
    )
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n1\n"), done.stderr[-1000:]
