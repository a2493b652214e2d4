"""Where the repositories and the backends lie: in the checkout, or in the share folder of an installed wheel."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def root() -> Path:
    """The folder that holds `model_repository`, `ensembles` and `backends`."""
    checkout = _HERE.parent.parent
    if (checkout / "model_repository").is_dir() and (checkout / "backends" / "omni_module").is_dir():
        return checkout
    return _HERE / "share"


def model_repository() -> Path:
    """Stage models: one folder each, config.pbtxt and version dir."""
    return root() / "model_repository"


def ensembles() -> Path:
    """Pipelines: one folder each."""
    return root() / "ensembles"


def backends() -> Path:
    """Our Triton backends, `omni_<kind>/model.py`."""
    return root() / "backends"
