import json
import struct
from pathlib import Path

import pytest
from omni_build import memory
from omni_build.plan import plan
from omni_build.repository import Repository
from omni_runtime.errors import InvalidRequest, NotFound

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A pipeline over a language model of 10 Mi elements in float16 and a network in two instances."""
    for name, text in {
        "brain": 'backend: "omni_ar" instance_group [{ count: 1 kind: KIND_MODEL }]',
        "mouth": 'backend: "omni_module" instance_group [{ count: 2 kind: KIND_CPU }]',
        "talk": 'backend: "python" parameters { key: "stages" value { string_value: "brain, mouth" } }',
        "graph": 'platform: "ensemble" ensemble_scheduling { step [{ model_name: "mouth" }] }',
    }.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(text)
    brain, mouth = tmp_path / "brain" / "1", tmp_path / "mouth" / "1"
    header = {"__metadata__": {}, "w": {"dtype": "F16", "shape": [10, MIB], "data_offsets": [0, 20 * MIB]}}
    data = json.dumps(header).encode()
    with (brain / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + 20 * MIB)
    network = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    (brain / "config.json").write_text(json.dumps(network))
    arguments = {"device": "auto", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 1024}
    (brain / "model.json").write_text(json.dumps(arguments))
    (mouth / "model.onnx").write_bytes(bytes(3 * MIB))
    (mouth / "model.json").write_text('{"threads": 1}')
    return tmp_path


def test_adds_weights_caches_and_instances(root: Path) -> None:
    made = plan(["talk"], Repository([root]), free={"cpu": 64 * GIB})
    brain, mouth, talk = made.needs
    assert [need.model for need in made.needs] == ["brain", "mouth", "talk"]
    assert brain.weights == 10 * MIB * 4
    # keys and values, 4 layers, 2 heads of 64, 4 bytes, for 4 sequences of 1024 tokens
    assert brain.cache == 2 * 4 * 2 * 64 * 4 * 4 * 1024
    assert mouth.weights == 2 * 3 * MIB
    assert talk.weights == talk.cache == 0
    assert made.total("cpu") == sum(need.weights + need.cache + need.process for need in made.needs)
    assert any(line.startswith("brain") for line in made.lines())


def test_auto_is_the_gpu_where_there_is_one(root: Path) -> None:
    made = plan(["talk"], Repository([root]), free={"cpu": 64 * GIB, "cuda:0": 64 * GIB})
    assert made.total("cuda:0") == made.needs[0].weights + made.needs[0].cache
    assert made.needs[1].device == "cpu"


def test_given_cache_bytes_count(root: Path) -> None:
    file = root / "brain" / "1" / "model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"kv_cache_bytes": 12345, "dtype": "bfloat16"}))
    need = plan(["brain"], Repository([root]), free={"cpu": 64 * GIB}).needs[0]
    assert (need.weights, need.cache) == (20 * MIB, 12345)


def test_refuses_and_names_the_stage_and_the_numbers(root: Path) -> None:
    with pytest.raises(
        InvalidRequest, match=r"brain does not fit: it needs \d+ MiB on cpu .*weights 40.*100 of 100"
    ) as caught:
        plan(["talk"], Repository([root]), free={"cpu": 100 * MIB})
    assert caught.value.stage == "brain"
    with pytest.raises(InvalidRequest, match=r"mouth does not fit"):
        plan(["talk"], Repository([root]), free={"cpu": 600 * MIB})
    with pytest.raises(InvalidRequest, match=r"on cuda:0"):
        plan(["talk"], Repository([root]), free={"cpu": 64 * GIB, "cuda:0": MIB})


def test_what_is_not_built_is_named(root: Path) -> None:
    (root / "mouth" / "1" / "model.json").unlink()
    with pytest.raises(NotFound, match="mouth is not built"):
        plan(["talk"], Repository([root]), free={"cpu": 64 * GIB})
    link = root / "brain" / "1" / "tokenizer.json"
    link.symlink_to(root / "gone")
    with pytest.raises(NotFound, match=r"tokenizer\.json links to .*gone"):
        plan(["brain"], Repository([root]), free={"cpu": 64 * GIB})


def test_an_ensemble_takes_nothing_of_its_own(root: Path) -> None:
    made = plan(["graph"], Repository([root]), free={"cpu": 64 * GIB})
    assert [(need.model, need.process > 0) for need in made.needs] == [("mouth", True), ("graph", False)]


def test_this_machine_has_memory() -> None:
    assert memory.free()["cpu"] > 0


def _group(folder: Path, limit: str, current: int, cache: int, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{'total_' if v1 else ''}inactive_file {cache}\n")


@pytest.mark.parametrize(
    ("version", "limits", "expected"),
    [
        (2, {"": "max", "box": "max"}, 8 * GIB),
        (2, {"box": str(4 * GIB)}, 4 * GIB - 2 * GIB + GIB),
        (2, {"": str(3 * GIB), "box": str(16 * GIB)}, 3 * GIB - 2 * GIB + GIB),
        (1, {"box": str(4 * GIB)}, 4 * GIB - 2 * GIB + GIB),
        (1, {"": str(2**63 - 4096)}, 8 * GIB),
    ],
)
def test_the_control_groups_limit_counts(tmp_path: Path, version: int, limits: dict[str, str], expected: int) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    line = "0::/box" if version == 2 else "4:memory:/box"
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    base = tmp_path / "sys/fs/cgroup" / ("" if version == 2 else "memory")
    for name, limit in limits.items():
        _group(base / name, limit, 2 * GIB, GIB, v1=version == 1)
    assert memory.cpu(tmp_path) == expected
