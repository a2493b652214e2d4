"""`--replicas NAME=N`: a model repository made for one run, in which a model stands N times under names of its own.

Triton refuses a model that lies in two repositories, so this one replaces all the others: models that are not
replicated are links to their folders, those that are have a config.pbtxt of their own and links beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from google.protobuf import text_format
from omni_build.repository import CONFIG, Repository
from omni_runtime.errors import InvalidRequest, NotFound

REPLICAS = "replicas"
REPLICA_OF = "replica_of"


def names_of(model: str, count: int) -> tuple[str, ...]:
    """The names under which a model of `count` replicas is served: NAME, NAME_1, NAME_2 …"""
    return (model, *(f"{model}_{number}" for number in range(1, count)))


def check(wanted: Mapping[str, int], served: Iterable[str], repository: Repository) -> None:
    """See whether these replicas can be made of models that are `served`.

    Raises:
        NotFound: one is of a model that is not served.
        InvalidRequest: a count below 1, or a replica's name that a model of the repository has.
    """
    served = set(served)
    for model, count in wanted.items():
        if model not in served:
            there = ", ".join(sorted(served))
            raise NotFound(f"--replicas {model}={count}: {model} is not served here; {there} are", param="replicas")
        if count < 1:
            raise InvalidRequest(f"--replicas {model}={count}: one is the least", param="replicas")
        for name in names_of(model, count)[1:]:
            if name in repository.names():
                raise InvalidRequest(f"--replicas {model}={count}: there is a model {name} already", param="replicas")


def write(wanted: Mapping[str, int], repository: Repository, folder: Path) -> Repository:
    """Make the repository in `folder`, which does not exist yet. NAME's `replicas` lists its copies beside what it
    listed before; a copy has `replica_of` instead."""
    folder.mkdir(parents=True)
    for model in repository.names():
        count = wanted.get(model, 1)
        if count == 1:
            (folder / model).symlink_to(repository.folder(model).resolve())
            continue
        for name in names_of(model, count):
            _copy(repository, model, folder / name, names_of(model, count)[1:])
    return Repository([folder])


def levels_with(wanted: Mapping[str, int], levels: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """`levels` with every replica beside the model that it is of."""
    return tuple(tuple(name for model in level for name in names_of(model, wanted.get(model, 1))) for level in levels)


def _copy(repository: Repository, model: str, folder: Path, replicas: tuple[str, ...]) -> None:
    config = type(repository.config(model))()
    config.CopyFrom(repository.config(model))
    if config.name:
        config.name = folder.name
    listed = [name.strip() for name in config.parameters[REPLICAS].string_value.split(",") if name.strip()]
    if folder.name == model:
        config.parameters[REPLICAS].string_value = ", ".join(dict.fromkeys([*listed, *replicas]))
    else:
        del config.parameters[REPLICAS]
        config.parameters[REPLICA_OF].string_value = model
    folder.mkdir()
    (folder / CONFIG).write_text(text_format.MessageToString(config))
    for entry in repository.folder(model).iterdir():
        if entry.name != CONFIG:
            (folder / entry.name).symlink_to(entry.resolve())
