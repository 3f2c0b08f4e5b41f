"""The shared parameters: every way of storing a weight gives the same placed weight."""

import numpy as np
import pytest

from jaxgen_checkpoints.errors import MappingError
from jaxgen_checkpoints.heads import HeadLayout
from jaxgen_checkpoints.lazy import lazy
from jaxgen_checkpoints.mesh_layout import MeshLayout, make_mesh
from jaxgen_checkpoints.parameters.attention_output import AttentionOutput, AttentionOutputBias
from jaxgen_checkpoints.parameters.embedding import Embedding, Unembedding, UnembeddingBias
from jaxgen_checkpoints.parameters.mlp import (
    MLP1,
    MLP2,
    FusedGatedMLP,
    FusedGatedMLPBias,
    GatedMLP,
    GatedMLPBias,
    MLP1Bias,
    MLP2Bias,
)
from jaxgen_checkpoints.parameters.moe import (
    ExpertsDown,
    FusedGatedExperts,
    GatedExperts,
    Router,
    StackedExpertsDown,
    StackedGatedExperts,
)
from jaxgen_checkpoints.parameters.norm import HeadNorm, Norm, NormBias
from jaxgen_checkpoints.parameters.qkv import (
    FusedMQA,
    FusedMQABias,
    FusedQKV,
    FusedQKVBias,
    GQAMegatronQKV,
    GQAMegatronQKVBias,
    MegatronQKV,
    MegatronQKVBias,
    UnfusedQKV,
    UnfusedQKVBias,
)

HEAD, MODEL = 2, 6


@pytest.fixture
def finalize(counting_source):
    """Fill a parameter with arrays (lists of them for lists) and describe it on a mesh."""

    def run(kind, model, arrays, **mesh):
        parameter = kind(model)
        for name, value in arrays.items():
            items = enumerate(value) if isinstance(value, list) else [(None, value)]
            for index, array in items:
                source = counting_source({f"{name}{index}": array})
                (info,) = source.tensors().values()
                parameter.set(name, lazy(info, source), index)
        return parameter.finalize(model, MeshLayout(make_mesh(**mesh)))

    return run


def stored_qkv(q, k, v):
    """The same heads in each way of storing them. q [heads, HEAD, ...], k and v [kv_heads, ...]."""
    rest = q.shape[2:]

    def rows(*blocks):
        return np.concatenate([block.reshape(-1, *rest) for block in blocks])

    groups = zip(q.reshape(len(k), -1, *q.shape[1:]), k, v, strict=True)
    grouped = rows(*(part for group in groups for part in group))
    yield (UnfusedQKV, UnfusedQKVBias), {"q": rows(q), "k": rows(k), "v": rows(v)}
    yield (FusedQKV, FusedQKVBias), {"qkv": rows(q, k, v)}
    yield (GQAMegatronQKV, GQAMegatronQKVBias), {"qkv": grouped}
    if len(k) == len(q):
        yield (MegatronQKV, MegatronQKVBias), {"qkv": grouped}
    if len(k) == 1:
        yield (FusedMQA, FusedMQABias), {"qkv": rows(q, k, v)}


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (7, 7), (9, 3), (8, 2), (4, 4)])
def test_attention_keeps_every_head_with_its_own_keys(
    make_model, random_arrays, finalize, heads, kv_heads, shards
):
    model = make_model(heads=heads, kv_heads=kv_heads, head_dim=HEAD, model_dim=MODEL)
    arrays = random_arrays(
        {
            "q": (heads, HEAD, MODEL),
            "k": (kv_heads, HEAD, MODEL),
            "v": (kv_heads, HEAD, MODEL),
            "o": (MODEL, heads, HEAD),
        }
    )
    q, k, v, o = arrays.values()
    layout = HeadLayout(heads, kv_heads, shards)
    output = finalize(
        AttentionOutput, model, {"weight": o.reshape(MODEL, -1)}, tensor=shards
    ).placed()
    out = output.read_all().reshape(MODEL, layout.kv_slots, layout.group, HEAD)
    for (kind, bias_kind), stored in stored_qkv(q, k, v):
        weight = finalize(kind, model, stored, tensor=shards)
        assert weight.axes == ("kv_heads", None, None)
        assert weight.shape == (layout.kv_slots * (layout.group + 2), HEAD, MODEL)
        placed = weight.placed().read_all()
        slots = placed.reshape(layout.kv_slots, layout.group + 2, HEAD, MODEL)
        seen = []
        for slot, rows in enumerate(slots):
            for place, query in enumerate(rows[:-2]):
                if not query.any():
                    assert not out[:, slot, place].any()
                    continue
                (head,) = [h for h in range(heads) if np.array_equal(q[h], query)]
                seen.append(head)
                np.testing.assert_array_equal(rows[-2], k[head // (heads // kv_heads)])
                np.testing.assert_array_equal(rows[-1], v[head // (heads // kv_heads)])
                np.testing.assert_array_equal(out[:, slot, place], o[:, head])
        assert sorted(seen) == list(range(heads))
        bias = finalize(bias_kind, model, {n: a[:, 0] for n, a in stored.items()}, tensor=shards)
        assert bias.axes == ("kv_heads", None)
        np.testing.assert_array_equal(bias.placed().read_all(), placed[:, :, 0])


def test_layouts_that_need_certain_heads_say_so(make_model):
    with pytest.raises(MappingError, match="FusedMQA needs a model of 1 KV head, got 2"):
        FusedMQA(make_model()).expected(make_model())
    with pytest.raises(MappingError, match="MegatronQKV needs one KV head a head, got 2 for 4"):
        MegatronQKV(make_model()).expected(make_model())


@pytest.mark.parametrize("shards", [1, 4])
def test_gate_and_up_are_shared_out_together(make_model, random_arrays, finalize, shards):
    model = make_model(ffn_dim=10, model_dim=MODEL)
    arrays = random_arrays({"gate": (10, MODEL), "up": (10, MODEL)})
    expected = np.zeros((2, -(-10 // shards) * shards, MODEL), np.float32)
    expected[:, :10] = np.stack(list(arrays.values()))
    fused = {"gate_up": np.concatenate(list(arrays.values()))}
    for kind, bias_kind, stored in (
        (GatedMLP, GatedMLPBias, arrays),
        (FusedGatedMLP, FusedGatedMLPBias, fused),
    ):
        weight = finalize(kind, model, stored, tensor=shards)
        assert weight.axes == (None, "ffn", None)
        np.testing.assert_array_equal(weight.placed().read_all(), expected)
        bias = finalize(bias_kind, model, {n: a[:, 0] for n, a in stored.items()}, tensor=shards)
        np.testing.assert_array_equal(bias.placed().read_all(), expected[:, :, 0])


@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 2), (4, 2)])
def test_experts_are_stacked_and_padded_on_both_axes(
    make_model, random_arrays, finalize, tensor, expert
):
    model = make_model(num_experts=3, expert_ffn_dim=5, model_dim=MODEL)
    a = random_arrays({"gate": (3, 5, MODEL), "up": (3, 5, MODEL), "down": (3, MODEL, 5)})
    experts, ffn = -(-3 // expert) * expert, -(-5 // tensor) * tensor
    gate_up = np.zeros((experts, 2, ffn, MODEL), np.float32)
    gate_up[:3, 0, :5], gate_up[:3, 1, :5] = a["gate"], a["up"]
    down = np.zeros((experts, MODEL, ffn), np.float32)
    down[:3, :, :5] = a["down"]
    both = np.concatenate([a["gate"], a["up"]], axis=1)
    for kind, stored, expected in (
        (GatedExperts, {"gate": list(a["gate"]), "up": list(a["up"])}, gate_up),
        (FusedGatedExperts, {"gate_up": list(both)}, gate_up),
        (StackedGatedExperts, {"gate_up": both}, gate_up),
        (ExpertsDown, {"down": list(a["down"])}, down),
        (StackedExpertsDown, {"down": a["down"]}, down),
    ):
        weight = finalize(kind, model, stored, tensor=tensor, expert=expert)
        np.testing.assert_array_equal(weight.placed().read_all(), expected)
    router = finalize(Router, model, {"weight": a["gate"][:, 0]}, tensor=tensor, expert=expert)
    assert router.shape == (3, MODEL)


PLAIN = [
    (MLP1, "weight", (10, 6), ("ffn", None), (12, 6)),
    (MLP1Bias, "bias", (10,), ("ffn",), (12,)),
    (MLP2, "weight", (6, 10), (None, "ffn"), (6, 12)),
    (MLP2Bias, "bias", (6,), (None,), (6,)),
    (AttentionOutputBias, "bias", (6,), (None,), (6,)),
    (Norm, "weight", (6,), (None,), (6,)),
    (NormBias, "bias", (6,), (None,), (6,)),
    (HeadNorm, "weight", (2,), (None,), (2,)),
    (Embedding, "weight", (13, 6), ("vocab", None), (16, 6)),
    (Unembedding, "weight", (13, 6), ("vocab", None), (16, 6)),
    (UnembeddingBias, "bias", (13,), ("vocab",), (16,)),
]


@pytest.mark.parametrize(("kind", "name", "shape", "axes", "placed"), PLAIN)
def test_plain_parameters_are_padded_with_zeros(
    make_model, random_arrays, finalize, kind, name, shape, axes, placed
):
    arrays = random_arrays({name: shape})
    weight = finalize(kind, make_model(), arrays, tensor=4)
    assert (weight.axes, weight.shape) == (axes, placed)
    values = weight.placed().read_all()
    np.testing.assert_array_equal(values[tuple(slice(n) for n in shape)], arrays[name])
    assert np.count_nonzero(values) == arrays[name].size
