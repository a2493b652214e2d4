"""One module per family of models: what it fetches, how it is converted, which version dirs it fills.

A family has the name of the pipeline that it brings.
"""

import importlib
from pathlib import Path

from omni_runtime.errors import InvalidRequest, NotFound

from omni_build.report import Report, Terminal
from omni_build.store import Store
from omni_build.target import Target

NAMES = ("hibari", "whisper", "smollm2", "voice_chat")


def build(
    family: str,
    store: Store,
    repository: Path,
    ensembles: Path,
    report: Report | None = None,
    checkpoint: str | None = None,
) -> None:
    """Fetch and make what `family` needs, and fill its version dirs; what is there and sound is left alone.

    `checkpoint`, a directory or a model's id, replaces the weights of a family that takes one.
    Raises NotFound for an unknown family, InvalidRequest for a checkpoint that it does not take, StageUnavailable for
    weights that cannot be had, Internal for corrupt ones.
    """
    if family not in NAMES:
        raise NotFound(f"no family {family!r}; there are: {', '.join(NAMES)}", param="family")
    module = importlib.import_module(f"omni_build.families.{family}")
    if checkpoint is not None and not getattr(module, "TAKES_CHECKPOINT", False):
        raise InvalidRequest(f"{family} has weights of its own and takes no checkpoint", param="checkpoint")
    target = Target(store, Path(repository), Path(ensembles), report or Terminal())
    if checkpoint is None:
        module.build(target)
    else:
        module.build(target, checkpoint)
