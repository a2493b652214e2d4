"""Where pip would find a file: indexes, links, proxies and certificates of the user's own pip configuration."""

import ast
import html.parser
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import httpx
from omni_runtime.errors import StageUnavailable

PYPI = "https://pypi.org/simple"
SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"


@dataclass(frozen=True)
class Settings:
    """The part of pip's configuration that says where files come from."""

    indexes: tuple[str, ...] = (PYPI,)
    find_links: tuple[str, ...] = ()
    proxy: str | None = None
    cert: str | None = None
    client_cert: str | None = None
    trusted_hosts: frozenset[str] = field(default_factory=frozenset)
    timeout: float = 15.0

    @classmethod
    def of_pip(cls) -> "Settings":
        """What `pip install` of this environment would use: files, then environment."""
        values = _pip_values()
        indexes: tuple[str, ...] = ()
        if str(values.get("no-index", "")).lower() not in ("1", "true", "yes", "on"):
            indexes = (values.get("index-url") or PYPI, *values.get("extra-index-url", "").split())
        return cls(
            indexes=indexes,
            find_links=tuple(values.get("find-links", "").split()),
            proxy=values.get("proxy") or None,
            cert=values.get("cert") or None,
            client_cert=values.get("client-cert") or None,
            trusted_hosts=frozenset(values.get("trusted-host", "").split()),
            timeout=float(values.get("timeout") or values.get("default-timeout") or 15),
        )

    def client(self, url: str) -> httpx.Client:
        """A client for `url`. Proxies of the environment (HTTPS_PROXY …) and ~/.netrc count as well."""
        host = urlsplit(url).netloc.rpartition("@")[2]
        verify: ssl.SSLContext | bool = True
        if {host, host.partition(":")[0]} & self.trusted_hosts:
            verify = False
        elif self.cert or self.client_cert:
            found = self.cert and Path(self.cert)
            where = {"capath" if found.is_dir() else "cafile": str(found)} if found else {}
            verify = ssl.create_default_context(**where)  # type: ignore[arg-type]  # either is a path
            if self.client_cert:
                verify.load_cert_chain(self.client_cert)
        return httpx.Client(verify=verify, proxy=self.proxy, timeout=self.timeout, follow_redirects=True, auth=_netrc())


def locate(project: str, filename: str, settings: Settings) -> Iterator[str]:
    """URLs (`file:` for local files) under which `filename` is offered, the nearest first.

    An index that fails is passed over; StageUnavailable, naming what each said, when nothing was found.
    """
    failures = []
    found = False
    for place in settings.find_links:
        path = _local(place)
        try:
            if path is not None and path.is_dir():
                links = {path.joinpath(filename).absolute().as_uri()} if (path / filename).is_file() else set()
            else:
                links = set(_matching(_page(place, settings), filename))
        except (OSError, httpx.HTTPError, ValueError) as error:
            failures.append(f"{_shown(place)}: {why(error)}")
            continue
        found |= bool(links)
        yield from links
    name = re.sub(r"[-_.]+", "-", project).lower()
    for index in settings.indexes:
        page = f"{index.rstrip('/')}/{name}/"
        try:
            links = set(_matching(_page(page, settings), filename))
        except (OSError, httpx.HTTPError, ValueError) as error:
            failures.append(f"{_shown(page)}: {why(error)}")
            continue
        if not links:
            failures.append(f"{_shown(page)}: not among its files")
        found |= bool(links)
        yield from links
    if not found:
        raise StageUnavailable(
            f"{filename} was not found ({'; '.join(failures) or 'no index is configured'}): where there is no network, "
            "put the file into a folder and name the folder in PIP_FIND_LINKS"
        )


def why(error: Exception) -> str:
    """One short line; httpx's own for a status carries the URL twice, password and all."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.response.status_code} {error.response.reason_phrase}"
    return f"{type(error).__name__} {' '.join(str(error).split())}".strip()


def _page(place: str, settings: Settings) -> Iterator[str]:
    """The links of an index page, JSON or HTML, absolute."""
    path = _local(place)
    if path is not None:
        file = path / "index.html" if path.is_dir() else path
        base = file.absolute().as_uri()
        body, kind = file.read_text(), "text/html"
    else:
        with settings.client(place) as client:
            answer = client.get(place, headers={"Accept": f"{SIMPLE_JSON}, text/html;q=0.1"})
            answer.raise_for_status()
            base, body, kind = str(answer.url), answer.text, answer.headers.get("content-type", "")
    if "json" in kind:
        links: list[str] = [entry["url"] for entry in json.loads(body)["files"]]
    else:
        parser = _Links()
        parser.feed(body)
        links = parser.links
    yield from (urljoin(base, link) for link in links)


def _matching(links: Iterator[str], filename: str) -> Iterator[str]:
    for link in links:
        url = urldefrag(link).url
        if unquote(urlsplit(url).path).rpartition("/")[2] == filename:
            yield url


def local_file(url: str) -> Path | None:
    """The path of a `file:` URL; None for any other."""
    return _local(url) if url.startswith("file:") else None


def _local(place: str) -> Path | None:
    if place.startswith("file:"):
        return Path(unquote(urlsplit(place).path))
    return None if "://" in place else Path(place).expanduser()


def _shown(url: str) -> str:
    """Without the password that a private index's URL carries."""
    return re.sub(r"//[^/@]*@", "//", url)


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _netrc() -> httpx.NetRCAuth | None:
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return httpx.NetRCAuth(str(file)) if file.is_file() else None


def _pip_values() -> Mapping[str, Any]:
    """pip's settings by name: the environment wins over a command's section, that one over `global`."""
    ranks: dict[str, tuple[int, str]] = {}
    # Where pip is not installed (uv), its variables still say where files come from.
    for name, value in os.environ.items():
        if name.startswith("PIP_") and value:
            ranks[name[4:].lower().replace("_", "-")] = (3, value)
    if "index-url" not in ranks and (uv := os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")):
        ranks["index-url"] = (0, uv)
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False, timeout=60
    )
    sections = {"global": 1, "install": 2, "download": 2, ":env:": 3}
    for line in listing.stdout.splitlines():
        key, _, quoted = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections and sections[section] >= ranks.get(name, (-1, ""))[0]:
            ranks[name] = (sections[section], str(ast.literal_eval(quoted)))
    return {name: value for name, (_, value) in ranks.items()}
