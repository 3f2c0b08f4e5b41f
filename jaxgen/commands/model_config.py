"""The config of a model that is planned or filled at random: a file, or a shape shipped with us."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jaxgen.hub import local_model
from jaxgen_checkpoints.errors import RefusedInput
from jaxgen_checkpoints.json_file import read_json_object

_SHAPES = files("jaxgen.bench") / "shapes"


def with_weights(model: str) -> Path:
    """The local folder or file of a model that has weights. RefusedInput where a shape is named."""
    if not Path(model).exists() and (_SHAPES / f"{model}.json").is_file():
        raise RefusedInput(
            f"{model} is a shape shipped with jaxgen and has no weights: name a checkpoint, or "
            "add --load-format dummy (bench, serve) for random ones"
        )
    return local_model(model)


def read_model_config(model: str) -> dict[str, Any]:
    """What config.json holds. model: that file, its folder, or the name of a shipped shape."""
    shape = _SHAPES / f"{model}.json"
    if shape.is_file():
        return json.loads(shape.read_text())
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        known = ", ".join(sorted(Path(str(s)).stem for s in _SHAPES.iterdir()))
        raise RefusedInput(
            f"{model}: expected a config.json, a folder that has one, or one of the shapes {known}"
        )
    return read_json_object(file)
