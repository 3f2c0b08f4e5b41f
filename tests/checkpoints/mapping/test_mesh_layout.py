"""Logical axes lie on mesh axes by one table, and what cannot be laid is refused."""

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxgen_checkpoints.errors import MappingError, RefusedInput
from jaxgen_checkpoints.mesh_layout import WHOLE_EXPERTS, MeshLayout, make_mesh


def test_logical_axes_become_shardings():
    layout = MeshLayout(make_mesh(tensor=4, expert=2))
    assert layout.spec(("experts", None, "expert_ffn", None)) == PartitionSpec(
        "expert", None, "tensor", None
    )
    assert (layout.shards("vocab"), layout.shards("experts"), layout.shards("model")) == (4, 2, 1)
    assert layout.sharding(("vocab", None)).shard_shape((8, 3)) == (2, 3)


def test_experts_can_take_the_place_of_tensor_parallelism():
    layout = MeshLayout(make_mesh(tensor=4, expert=2), WHOLE_EXPERTS)
    weight = layout.sharding(("experts", None, "expert_ffn"))
    assert weight.spec == PartitionSpec(("expert", "tensor"), None, None)
    assert (layout.shards("experts"), layout.shards("expert_ffn"), layout.shards("ffn")) == (
        8,
        1,
        4,
    )
    places = weight.devices_indices_map((16, 3, 5))
    first = {device: index[0].start for device, index in places.items()}
    assert [first[device] for device in layout.mesh.devices.flat] == list(range(0, 16, 2))
    with pytest.raises(MappingError, match=r"'experts' and 'ffn' .* lie on mesh axis 'tensor'"):
        layout.spec(("experts", "ffn"))


def test_two_axes_on_one_mesh_axis_are_refused():
    layout = MeshLayout(make_mesh())
    with pytest.raises(MappingError, match=r"'ffn' and 'vocab' .* both lie on mesh axis 'tensor'"):
        layout.spec(("ffn", "vocab"))
    with pytest.raises(MappingError, match="logical axis 'hands' is not known"):
        layout.spec(("hands",))
    with pytest.raises(MappingError, match="laid on mesh axis 'pipe'"):
        MeshLayout(make_mesh(), {"layers": ("tensor", "pipe")})


def test_a_mesh_takes_the_first_devices_and_says_when_there_are_too_few():
    assert make_mesh(tensor=2).devices.flatten().tolist() == jax.devices()[:2]
    with pytest.raises(RefusedInput, match="needs 16 devices, 8 found"):
        make_mesh(tensor=8, data=2)
    with pytest.raises(RefusedInput, match="'tensor': expected a size of at least 1, got 0"):
        make_mesh(tensor=0)
