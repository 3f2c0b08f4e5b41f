"""Run by test_load in a process of its own: prints the bytes of a model, of its largest weight, and
of host memory that loading it onto eight devices needed beyond the arrays."""

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

from jaxgen_checkpoints.container import LayerContainer
from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.load import load
from jaxgen_checkpoints.mesh_layout import MeshLayout, make_mesh
from jaxgen_checkpoints.parameters.mlp import MLP2, GatedMLP
from jaxgen_checkpoints.readers.safetensors_source import SafetensorsSource
from jaxgen_checkpoints.safetensors_writer import write_safetensors

LAYERS, MODEL, FFN = 8, 2048, 4096


class Layer(LayerContainer):
    gate_up: GatedMLP
    down: MLP2
    PARAM_MAPPING = {"gate": "gate_up.gate", "up": "gate_up.up", "down": "down.weight"}


def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def main(folder):
    dtype = np.dtype("bfloat16")
    shapes = {"gate": (FFN, MODEL), "up": (FFN, MODEL), "down": (MODEL, FFN)}
    names = {f"h.{i}.{n}": (shape, dtype) for i in range(LAYERS) for n, shape in shapes.items()}
    path = folder / "model.safetensors"
    write_safetensors(path, names, (np.ones(shape, dtype) for shape, _ in names.values()))
    model = SimpleNamespace(model_dim=MODEL, ffn_dim=FFN, num_layers=LAYERS)
    containers = ContainerMap()
    containers.set_transformer_params(["h"], [Layer(model) for _ in range(LAYERS)])
    layout = MeshLayout(make_mesh(tensor=8))
    described = containers.describe(SafetensorsSource(folder, (path.name,)), layout)
    first = {"layers": described["layers"][:1]}
    load(first, layout, dtype)  # the allocator and the runtime have warmed up
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    arrays = jax.tree.leaves(load(described, layout, dtype))
    size = sum(array.nbytes for array in arrays)
    largest = max(array.nbytes for array in arrays)
    sys.stdout.write(f"{size} {largest} {status('VmHWM') - before - size}\n")


main(Path(sys.argv[1]))
