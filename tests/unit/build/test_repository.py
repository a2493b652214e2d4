from pathlib import Path

import pytest
from omni_build import paths
from omni_build.repository import Repository
from omni_runtime.errors import InvalidRequest, NotFound


def _model(root: Path, name: str, text: str = 'backend: "omni_module"') -> None:
    (root / name).mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(text)


def _calls(*stages: str) -> str:
    listed = ", ".join(stages)
    return f'backend: "python" parameters {{ key: "stages" value {{ string_value: "{listed}" }} }}'


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    stages, pipelines = tmp_path / "stages", tmp_path / "pipelines"
    for name in ("ears", "brain", "mouth"):
        _model(stages, name)
    _model(pipelines, "listen", _calls("ears"))
    _model(pipelines, "talk", _calls("listen", "brain", "mouth"))
    _model(
        pipelines,
        "graph",
        'platform: "ensemble" ensemble_scheduling { step [{ model_name: "brain" }, { model_name: "mouth" }] }',
    )
    _model(pipelines, "round", _calls("round"))
    _model(pipelines, "broken", "backend: \n max_batch: }")
    return Repository([stages, pipelines])


def test_names_and_parameters(repository: Repository) -> None:
    assert repository.names() == ["brain", "broken", "ears", "graph", "listen", "mouth", "round", "talk"]
    assert repository.parameters("listen") == {"stages": "ears"}
    assert repository.task("listen") is None


def test_stages_come_before_what_calls_them(repository: Repository) -> None:
    assert repository.calls("talk") == ["listen", "brain", "mouth"]
    assert repository.stages_of("talk") == ["ears", "listen", "brain", "mouth"]
    assert repository.stages_of("graph") == ["brain", "mouth"]
    assert repository.stages_of("ears") == []


def test_errors_name_the_file_and_the_models(repository: Repository) -> None:
    with pytest.raises(NotFound, match="no model 'nose'; there are: brain, "):
        repository.config("nose")
    with pytest.raises(InvalidRequest, match=r"broken/config\.pbtxt:2:"):
        repository.config("broken")
    with pytest.raises(InvalidRequest, match="round -> round"):
        repository.stages_of("round")


def test_a_model_in_two_repositories_is_refused(tmp_path: Path) -> None:
    _model(tmp_path / "a", "ears")
    _model(tmp_path / "b", "ears")
    with pytest.raises(InvalidRequest, match=r"model ears is in .*a and in .*b"):
        Repository([tmp_path / "a", tmp_path / "b"])


def test_version_dir_is_the_highest(repository: Repository) -> None:
    folder = repository.folder("ears")
    assert repository.version_dir("ears") == folder / "1"
    for version in ("2", "10"):
        (folder / version).mkdir()
    assert repository.version_dir("ears") == folder / "10"


def test_a_changed_file_is_read_anew(repository: Repository) -> None:
    assert repository.config("ears").max_batch_size == 0
    (repository.folder("ears") / "config.pbtxt").write_text('backend: "omni_module" max_batch_size: 7')
    assert repository.config("ears").max_batch_size == 7


def test_our_own_pipelines_name_stages_that_exist() -> None:
    ours = Repository([paths.model_repository(), paths.ensembles()])
    pipelines = [name for name in ours.names() if ours.task(name)]
    assert {"hibari", "whisper", "smollm2", "voice_chat"} <= set(pipelines)
    for name in pipelines:
        assert all(ours.folder(stage) for stage in ours.stages_of(name))
