"""The real stack that the server tests share: built into a repository of its own, served on free ports."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

PIPELINES = ["hibari", "whisper", "smollm2", "voice_chat"]
COMMAND = str(Path(sysconfig.get_path("scripts")) / "triton-omni")
START_SECONDS = 280


@dataclass(frozen=True)
class StackAddresses:
    """Where the shared stack listens, and the process that runs it."""

    grpc_url: str
    http_url: str
    metrics_url: str
    openai_url: str
    pid: int

    @property
    def root_url(self) -> str:
        """The frontend without ``/v1``."""
        return self.openai_url.removesuffix("/v1")


@contextlib.contextmanager
def serving(pipelines, directory: Path, *arguments: str):
    """A ``triton-omni serve`` of its own; ended, with everything it started, when the block is left."""
    log = directory / "serve.log"
    flags = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [COMMAND, "serve", *pipelines, *flags, f"--log-dir={directory}", *arguments],
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
        )
    try:
        ready = ""
        for line in process.stdout:
            if line.startswith("ready "):
                ready = line
                break
        if not ready:
            raise RuntimeError(f"the stack did not start:\n{log.read_text()[-4000:]}")
        found = dict(re.findall(r"(\w+)=(\S+)", ready))
        yield StackAddresses(
            grpc_url=found["grpc"],
            http_url=found["http"],
            metrics_url=found["metrics"],
            openai_url=found.get("openai", ""),
            pid=process.pid,
        )
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A repository with every family of the tests in it."""
    if os.environ.get("OMNI_TEST_STACK"):
        return None
    repository = tmp_path_factory.mktemp("repository")
    subprocess.run([COMMAND, "build", *PIPELINES, "--repository", str(repository)], check=True, stdout=sys.stderr)
    return repository


@pytest.fixture(scope="session")
def stack(built, tmp_path_factory):
    """Every pipeline on one server. OMNI_TEST_STACK="grpc=… http=… metrics=… openai=…" names one that runs already."""
    if running := os.environ.get("OMNI_TEST_STACK"):
        found = dict(re.findall(r"(\w+)=(\S+)", running))
        yield StackAddresses(found["grpc"], found["http"], found["metrics"], found.get("openai", ""), 0)
        return
    with serving(PIPELINES, tmp_path_factory.mktemp("stack"), "--repository", str(built)) as addresses:
        yield addresses
