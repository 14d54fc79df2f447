"""Chat templates that try to exhaust memory, time or stack return an error or a text, in Python and in the runners."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

import hostile_templates
import reference
import runner_tokenizer
from reference import EVERYTHING

TEMPLATES = list(hostile_templates.templates(seed=7, count=1000))[:: 1 if EVERYTHING else 50]
ADDRESS_SPACE = 2 << 30
SECONDS = 20
"""Maximum seconds of a rendering. On an idle machine none takes 5 seconds, but tests share the cores."""

MESSAGES = [{"role": "user", "content": "Hi there"}]

_RENDER = """
import json, resource, sys, time
import etkv
from etkv import Tokenizer
tokenizer = Tokenizer.from_pretrained(sys.argv[1])
with open("/proc/self/statm") as file:
    mapped = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + int(sys.argv[2]),) * 2)
for line in sys.stdin:
    tokenizer.hf.chat_template = json.loads(line)
    began = time.monotonic()
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi there"}], tokenize=False)
    except etkv.EtkvError:
        pass
    print(round(time.monotonic() - began, 2), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a tokenizer."""
    made = tmp_path_factory.mktemp("hostile")
    vocabulary = {"a": 0, "<unk>": 1}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    (made / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
@pytest.mark.timeout(3600)
def test_python_renders_or_refuses(folder):
    words = [sys.executable, "-W", "ignore", "-c", _RENDER, folder, ADDRESS_SPACE]
    given = "".join(json.dumps(template) + "\n" for template in TEMPLATES)
    done = reference.run(words, stdin=None, input=given, timeout=3000)
    seconds = [float(line) for line in done.stdout.split()]
    assert (done.returncode, len(seconds)) == (0, len(TEMPLATES)), done.stderr[-2000:] + TEMPLATES[len(seconds)][:2000]
    slowest = max(range(len(TEMPLATES)), key=seconds.__getitem__)
    assert seconds[slowest] < SECONDS, TEMPLATES[slowest][:2000]


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
@pytest.mark.timeout(3600)
def test_the_runners_render_or_refuse(folder):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))

    given = json.dumps({"messages": MESSAGES}).encode().hex()
    asked = f"open {str(folder).encode().hex()}\nrender {given}\n"
    for template in TEMPLATES:
        (folder / "chat_template.jinja").write_text(template)
        ran = subprocess.run(
            [runner_tokenizer.TOOL],
            input=asked,
            text=True,
            capture_output=True,
            preexec_fn=limited,
            check=False,
            timeout=SECONDS,
        )
        assert ran.returncode == 0, f"{ran} of {template[:2000]}"
        assert len(ran.stdout.splitlines()) == 2
