"""Runs the tests of stores in buckets with moto, an S3 server on this machine: ``buckets.py COMMAND…``.

The server is installed into build/buckets. The command's environment has the address of an empty bucket in
ETKV_TEST_BUCKET, and credentials and endpoint for ``object_store``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PACKAGES = ["moto[s3]==5.2.5", "flask", "flask-cors"]
FOLDER = Path(__file__).resolve().parents[2] / "build" / "buckets"
BUCKET = "etkv-test"


def install() -> Path:
    """Install the server if it is missing, and return its program."""
    server = FOLDER / "env" / "bin" / "moto_server"
    ready = FOLDER / "ready"
    if not ready.is_file() or ready.read_text() != "\n".join(PACKAGES):
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER / "env"], check=True)
        pip = [FOLDER / "env" / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PACKAGES], check=True)
        ready.write_text("\n".join(PACKAGES))
    return server


def wait_for(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    """Create the bucket as soon as the server answers."""
    until = time.monotonic() + 120
    while True:
        try:
            request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
            with urllib.request.urlopen(request, timeout=10):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > until:
                raise
            time.sleep(0.2)


def main() -> int:
    """Run the server and the command, and return the command's exit status."""
    server = install()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    with (FOLDER / "server.log").open("wb") as log:
        words = [server, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        wait_for(endpoint, process)
        given = {
            "ETKV_TEST_BUCKET": f"s3://{BUCKET}",
            "AWS_ENDPOINT": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
        }
        return subprocess.run(sys.argv[1:], env={**os.environ, **given}, check=False).returncode
    finally:
        process.terminate()
        process.wait(timeout=30)


if __name__ == "__main__":
    sys.exit(main())
