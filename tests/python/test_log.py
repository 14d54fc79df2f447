"""Records of the library in :mod:`logging`: names, levels, and no records that no logger accepts."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import pytest

import etkv
from etkv import _capi, _log


@pytest.fixture(autouse=True)
def levels():
    # Other tests disable all records.
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    yield
    logging.disable(disabled)
    for name in ("etkv", *_log.NAMES):
        logging.getLogger(name).setLevel(logging.NOTSET)
    _capi.follow_log_levels()


def config() -> etkv.CacheConfig:
    return etkv.CacheConfig([etkv.LayerConfig(2, 32)] * 2, 64)


def told(caplog) -> list[tuple[str, int, str]]:
    found = [(record.name, record.levelno, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


def test_records_have_the_names_and_levels_of_messages(caplog):
    etkv.set_log_level(logging.DEBUG)
    with etkv.DecodeSession(config()) as session:
        caplog.clear()
        session.convert("f32")
        converted = told(caplog)
        assert converted[0] == (
            "etkv.core",
            logging.INFO,
            "convert{k_format=f32 v_format=f32}: the cache is converted k_format=f32 v_format=f32",
        )
        assert converted[1][2].startswith("convert{k_format=f32 v_format=f32}: done took_us=")
        with pytest.raises(etkv.PositionError):
            session.rewind(-1)
        [(name, level, message)] = told(caplog)
        assert (name, level) == ("etkv.api", logging.DEBUG)
        assert message.startswith("a call fails status=Position error=")
        etkv.set_log_level("INFO")
        session.convert("f16")
        assert [level for _, level, _ in told(caplog)] == [logging.INFO]
        etkv.set_log_level("WARNING")
        session.convert("f32")
        assert told(caplog) == []


def test_each_logger_has_a_level_of_its_own(caplog):
    logging.getLogger("etkv.core").setLevel(logging.DEBUG)
    etkv.set_log_level(logging.ERROR)
    with etkv.DecodeSession(config()) as session:
        caplog.clear()
        session.convert("f32")
        with pytest.raises(etkv.PositionError):
            session.rewind(-1)
    assert {name for name, _, _ in told(caplog)} == {"etkv.core"}
    assert _log.wanted() == "etkv::core=debug,etkv::program=error,etkv::file=error,etkv::api=error"


def test_levels_are_read_when_a_session_is_made(caplog):
    with etkv.DecodeSession(config()):
        logging.getLogger("etkv").setLevel(logging.INFO)
        with etkv.DecodeSession(config()) as session:
            session.convert("f32")
    assert [level for _, level, _ in told(caplog)] == [logging.INFO]


def test_steps_are_logged(caplog, exported):
    path = exported("tiny-llama") / "model.pte"
    facts = etkv.read_kv_cache_metadata(path)
    etkv.set_log_level(_log.TRACE)
    caplog.set_level(_log.TRACE)
    with etkv.DecodeSession(etkv.CacheConfig(facts.layers, 64)) as session, etkv.load(path, session) as program:
        assert any(name == "etkv.program" and "a program is loaded" in text for name, _, text in told(caplog))
        program.forward([1, 2, 3], [0, 1, 2])
        lines = told(caplog)
        step = "forward: step{tokens=3 first=0 mask=causal read=3}: "
        assert sum(text.startswith(f"{step}a layer layer=") for _, level, text in lines if level == 5) == 2
        assert any(text.startswith(f"{step}done took_us=") for _, _, text in lines)
        etkv.set_log_level(logging.WARNING)
        with pytest.raises(etkv.PositionError):
            program.forward([1], [9])
        refused, failed = told(caplog)
        assert refused[:2] == ("etkv.core", logging.WARNING)
        assert "a step is refused tokens=1 first=9 status=Position" in refused[2]
        assert failed[:2] == ("etkv.program", logging.WARNING)


def test_handlers_may_use_the_library():
    """Records arrive after the call, so the library holds no lock while a handler runs."""
    seen = []

    class Asks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((session.length, session.report()["formats"]["k"]))

    handler = Asks()
    logging.getLogger("etkv").addHandler(handler)
    try:
        etkv.set_log_level("INFO")
        with etkv.DecodeSession(config()) as session:
            threads = [threading.Thread(target=session.convert, args=(name,)) for name in ("f32", "bf16")]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
    finally:
        logging.getLogger("etkv").removeHandler(handler)
    assert len(seen) == 2


def test_steps_and_calls_of_other_threads(caplog, exported):
    """A thread that runs a program holds Python's lock and waits for MLX's lock, which a logging thread may hold."""
    path = exported("tiny-llama") / "model.pte"
    facts = etkv.read_kv_cache_metadata(path)
    etkv.set_log_level(_log.TRACE)
    with etkv.DecodeSession(etkv.CacheConfig(facts.layers, 64)) as session, etkv.load(path, session) as program:
        other = etkv.DecodeSession(config())

        def convert() -> None:
            for n in range(100):
                other.convert(("f32", "bf16")[n % 2])

        thread = threading.Thread(target=convert, daemon=True)
        thread.start()
        while thread.is_alive():
            program.forward([1, 2, 3], [0, 1, 2])
        thread.join()
    converted = [text for name, level, text in told(caplog) if level == logging.INFO and "is converted" in text]
    assert len(converted) == 100


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words, environment = [sys.executable, "-c", script], {**os.environ, **environment}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=True)


MAKE = """
import logging, etkv
from etkv import _capi
def use():
    session = etkv.DecodeSession(etkv.CacheConfig([etkv.LayerConfig(2, 32)], 64))
    session.convert("f32")
    return session
"""


def test_without_a_handler_there_is_no_filter():
    """Without a handler the library has no filter. Setting only a level does not set a filter."""
    done = run(MAKE + "logging.getLogger('etkv').setLevel('DEBUG'); use(); print(repr(_capi._log_filter))")
    assert (done.stdout, done.stderr) == ("''\n", "")


def test_a_process_ends_while_it_listens():
    done = run(MAKE + "logging.basicConfig(level='INFO', format='%(name)s %(message)s'); kept = use()")
    # Spans are logged only at `debug` and below, so the span around the message is not logged.
    assert done.stderr == "etkv.core the cache is converted k_format=f32 v_format=f32\n"


def test_a_variable_of_the_environment_asks_for_lines():
    code = (
        "import etkv\n"
        "with etkv.DecodeSession(etkv.CacheConfig([etkv.LayerConfig(1, 8)], 8), backend='cpu') as session:\n"
        "    try:\n"
        "        session.rewind(3)\n"
        "    except etkv.EtkvError:\n"
        "        pass\n"
    )

    def lines(told: str) -> str:
        return run(code, ETKV_LOG=told).stderr

    assert "DEBUG etkv.api: a call fails" in lines("debug")
    assert "DEBUG etkv.api: a call fails" in lines("off,etkv::api=debug")
    assert lines("") == lines("error") == lines("debug,etkv::api=off") == ""
    assert "ETKV_LOG has 'loud'" in lines("loud")
