"""A package index on loopback that can break off, lie and count, and a wheel to fetch from it."""

import hashlib
import http.server
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from omni_build.index import Settings
from omni_build.store import Store
from omni_build.wheels import Wheel
from rich.console import Console

FILENAME = "tiny_weights-1.0-py3-none-any.whl"
CONTENT = bytes(range(256)) * 4096


@dataclass
class Index:
    """`breaks`: after how many bytes each coming transfer ends early; `ranges`, `json`: what the server knows."""

    body: bytes
    url: str = ""
    breaks: list[int] = field(default_factory=list)
    ranges: bool = True
    json: bool = False
    #: the Range header of every transfer, None for a whole one
    transfers: list[str | None] = field(default_factory=list)

    @property
    def settings(self) -> Settings:
        return Settings(indexes=(f"{self.url}/simple",))


class Said:
    """A report that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.console = Console(file=io.StringIO(), width=200)

    def say(self, line: str) -> None:
        self.lines.append(line)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def report() -> Said:
    return Said()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture(scope="session")
def wheel_bytes() -> bytes:
    """A stored wheel, so that breaking off at a byte is breaking off in the weights."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("tiny_weights/model.bin"), CONTENT)
        archive.writestr(zipfile.ZipInfo("tiny_weights/__init__.py"), "")
    return buffer.getvalue()


@pytest.fixture
def wheel(wheel_bytes: bytes) -> Wheel:
    return Wheel(
        project="Tiny_Weights",
        filename=FILENAME,
        size=len(wheel_bytes),
        sha256=hashlib.sha256(wheel_bytes).hexdigest(),
        members={"tiny_weights/model.bin": hashlib.sha256(CONTENT).hexdigest()},
    )


@pytest.fixture
def index(wheel_bytes: bytes) -> Iterator[Index]:
    state = Index(wheel_bytes)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/simple/tiny-weights/":
                self.page()
            elif self.path == f"/files/{FILENAME}":
                self.file()
            else:
                self.send_error(404)

        def page(self) -> None:
            link = f"../../files/{FILENAME}"
            if state.json:
                body = json.dumps({"files": [{"filename": FILENAME, "url": link, "hashes": {}}]})
                kind = "application/vnd.pypi.simple.v1+json"
            else:
                body = f'<html><a href="{link}#sha256=00">{FILENAME}</a> <a href="other.whl">other.whl</a></html>'
                kind = "text/html"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def file(self) -> None:
            wanted = self.headers.get("Range")
            state.transfers.append(wanted)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.ranges else 0
            data = state.body[start:]
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(state.body) - 1}/{len(state.body)}")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: state.breaks.pop(0)] if state.breaks else data)

        def log_message(self, *arguments: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()
