"""What `triton-omni serve` works out before it starts a process."""

from __future__ import annotations

from pathlib import Path

from omni_client.launch.progress import Display
from omni_client.launch.serve import ServeOptions, prepare

MODELS = {"reader": "", "reads": 'parameters { key: "task" value: { string_value: "chat" } }', "talks": ""}
MODELS["talks"] = MODELS["reads"] + ' parameters { key: "stages" value: { string_value: "reads, reader" } }'


def test_without_names_every_pipeline_is_served(tmp_path: Path) -> None:
    for name, parameters in MODELS.items():
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(f'name: "{name}" backend: "python" {parameters}')
    options = ServeOptions(repositories=(tmp_path / "models",), store=tmp_path / "store", log_dir=tmp_path)
    assert [set(level) for level in prepare(options, Display()).levels] == [{"reads", "reader"}, {"talks"}]
