"""The index of a sharded checkpoint: which file holds which tensor.

The index comes with the checkpoint, so the names in it are untrusted: they must be plain names of
files in the same folder.
"""

from collections.abc import Mapping
from pathlib import Path

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.json_file import read_json_object

INDEX_NAME = "model.safetensors.index.json"


def read_index(path: Path, *, suffix: str = ".safetensors") -> Mapping[str, str]:
    """Read the index at `path`: tensor name -> shard file name in the same folder, all present.

    Raises `CheckpointError` if it is not an index, if a shard has another than a plain file name
    that ends in `suffix`, or if a shard is missing.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: expected a non-empty object 'weight_map' of tensor name -> file name"
        )
    for shard in weight_map.values():
        _check_shard_name(path, shard, suffix)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path.parent / shard).exists(follow_symlinks=False)]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of its {len(shards)} shards are not in the folder: "
            f"{', '.join(missing)}; the download may be incomplete"
        )
    return weight_map


def _check_shard_name(path: Path, shard: object, suffix: str) -> None:
    if not isinstance(shard, str):
        raise CheckpointError(f"{path}: expected file names in weight_map, got {shard!r:.80}")
    if any(c in "/\\:" or not c.isprintable() for c in shard) or shard in ("", ".", ".."):
        raise CheckpointError(
            f"{path}: shard {shard!r:.200} must be the plain name of a file in the same folder; "
            "paths are not followed"
        )
    if not shard.endswith(suffix):
        raise CheckpointError(f"{path}: shard {shard!r:.200} is not a {suffix} file")
