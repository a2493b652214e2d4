"""Whatever a stage does, the caller of a pipeline gets exactly one end."""

from pathlib import Path

import pytest
from omni_runtime.kserve import text

from tests.fault.conftest import ask, connected, serves, tritonserver
from tests.server.contract.conftest import Model
from tests.server.contract.subjects import Subject

RELAY = Subject("relay", short={"text": "fine"}, compare={}, long={"text": "fine"})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = Path(__file__).parent / "models"
    with tritonserver(tmp_path_factory.mktemp("ends"), ["faulty", "relay"], models) as server:
        yield server


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "one-shot"])
@pytest.mark.parametrize(
    ("wanted", "kind", "chunks"),
    [
        ("fine", None, 3),
        ("empty", None, 0),
        ("error on the first", "Internal", 0),
        ("error on the tenth", "Internal", 9),
        ("two finals", None, 3),
        ("silent", "DeadlineExceeded", 0),
        ("dies", "StageUnavailable", 3),
    ],
)
async def test_the_caller_gets_one_end(server, wanted, kind, chunks, stream):
    async with connected(server) as connection:
        await serves(connection, "relay", {"text": "fine"})
        data, finals, errors = await Model(connection, RELAY).events({"text": wanted, "stream": stream})
        assert finals + len(errors) == 1
        assert [type(error).__name__ for error in errors] == ([kind] if kind else [])
        if errors:
            assert errors[0].stage
        if stream:
            # What a stage sent before it died may have died with it.
            assert len(data) == chunks or wanted == "dies"
        else:
            assert len(data) == (1 if chunks and not kind else 0)
        await serves(connection, "relay", {"text": "fine"})


async def test_the_next_request_is_whole(server):
    async with connected(server) as connection:
        outcome = await ask(connection, "relay", {"text": "fine", "stream": True})
        assert outcome.kind == "success"
        assert "".join(text(chunk, "text") for chunk in outcome.chunks) == "0 1 2 "
