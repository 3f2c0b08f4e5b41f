"""An Orbax checkpoint of a pytree as a `TensorSource`: tree from metadata, slices from storage.

Orbax restores whole leaves; the arrays are read through TensorStore, which Orbax stores them with,
so that a slice costs its chunks only.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorstore

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.json_file import read_json_object
from jaxgen_checkpoints.source import TensorInfo, printable_name, slice_bounds

METADATA_NAME = "_METADATA"
_ARRAY_KINDS = ("jax.Array", "np.ndarray")


class OrbaxSource:
    """The arrays of one Orbax checkpoint folder, each named by its path joined with `.`."""

    def __init__(self, folder: str | Path) -> None:
        """Open `folder`, which holds `_METADATA` (`STEP/default` of a CheckpointManager).

        Raises `CheckpointError` if it is not such a folder or an array in it cannot be opened.
        """
        self._folder = Path(folder).absolute()
        metadata = self._metadata()
        driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        opened = {
            parameter: tensorstore.open(self._spec(driver, parameter), open=True, read=True)
            for parameter in self._parameters(metadata)
        }
        self._stores = {}
        for parameter, future in opened.items():
            try:
                self._stores[parameter.removesuffix(".value")] = future.result()
            except ValueError as fault:
                raise CheckpointError(
                    f"{self._folder}: array {printable_name(parameter)} cannot be opened; the "
                    f"checkpoint may be incomplete ({str(fault).split(' [', 1)[0]})"
                ) from fault
        self._infos = {
            name: TensorInfo(name, tuple(store.shape), store.dtype.numpy_dtype, self._folder.name)
            for name, store in self._stores.items()
        }
        self.description = f"Orbax checkpoint {folder}"

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every array by name; scalars and strings of the checkpoint are not among them."""
        return self._infos

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read `array[index]` in the stored dtype; `CheckpointError` if a chunk is damaged."""
        store = self._stores[name]
        bounds = slice_bounds(name, tuple(store.shape), index)
        part = store[tuple(slice(start, stop) for start, stop in bounds)]
        try:
            return np.array(part.read().result())
        except ValueError as fault:
            raise CheckpointError(
                f"{self._folder}: array {printable_name(name)} cannot be read ({fault})"
            ) from fault

    def _metadata(self) -> dict:
        path = self._folder / METADATA_NAME
        if not path.is_file():
            below = sorted(self._folder.glob(f"*/{METADATA_NAME}"))
            below += sorted(self._folder.glob(f"*/*/{METADATA_NAME}"))
            hint = f"; there is one in {below[-1].parent}" if below else ""
            raise CheckpointError(
                f"{self._folder}: expected an Orbax checkpoint of a pytree (a folder with "
                f"{METADATA_NAME}){hint}"
            )
        metadata = read_json_object(path)
        if not (self._folder / "manifest.ocdbt").is_file():
            raise CheckpointError(
                f"{self._folder}: no manifest.ocdbt: the checkpoint is incomplete or was written "
                "with use_ocdbt=False; restore it with Orbax and save it again"
            )
        return metadata

    def _parameters(self, metadata: dict) -> list[str]:
        """Storage names of the arrays; `_METADATA` has keys such as "('layers', '0')"."""
        path = self._folder / METADATA_NAME
        try:
            return [
                ".".join(ast.literal_eval(key))
                for key, entry in metadata["tree_metadata"].items()
                if entry["value_metadata"]["value_type"] in _ARRAY_KINDS
            ]
        except (KeyError, TypeError, AttributeError, ValueError, SyntaxError) as fault:
            raise CheckpointError(
                f"{path}: not the description of a pytree that Orbax writes ({fault!r:.200})"
            ) from fault

    def _spec(self, driver: str, parameter: str) -> dict:
        base = {"driver": "file", "path": f"{self._folder}/"}
        return {
            "driver": driver,
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{parameter}/"},
        }
