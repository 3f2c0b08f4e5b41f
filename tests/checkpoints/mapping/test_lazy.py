"""Reading any slice of any lazy expression equals slicing what numpy computes."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen_checkpoints.lazy import concat, lazy, stack


def lazy_of(source, name):
    return lazy(source.tensors()[name], source)


def leaf(source, shape):
    name = f"t{len(source.arrays)}"
    start = 1 + sum(value.size for value in source.arrays.values())
    source.arrays[name] = np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
    return lazy_of(source, name), source.arrays[name]


def apply_one(draw, source, tensor, value):
    """Apply one drawn operation to the lazy tensor and to its numpy value."""
    ndim = value.ndim
    axis = draw(st.integers(0, ndim - 1))
    operation = draw(
        st.sampled_from(["split", "merge", "transpose", "take", "concat", "stack", "map"])
    )
    size = value.shape[axis]
    if operation == "split" and ndim < 4:
        first = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        shape = (*value.shape[:axis], first, size // first, *value.shape[axis + 1 :])
        return tensor.split(axis, (first, size // first)), value.reshape(shape)
    if operation == "merge" and axis + 1 < ndim:
        count = draw(st.integers(1, ndim - axis))
        shape = (*value.shape[:axis], -1, *value.shape[axis + count :])
        return tensor.merge(axis, count), value.reshape(shape)
    if operation == "transpose":
        perm = draw(st.permutations(range(ndim)))
        return tensor.transpose(*perm), value.transpose(perm)
    if operation == "take":
        indices = np.array(draw(st.lists(st.integers(-1, size - 1), min_size=1, max_size=8)))
        taken = np.take(value, np.maximum(indices, 0), axis)
        taken[(slice(None),) * axis + (indices < 0,)] = 0
        return tensor.take(axis, indices), taken
    if operation == "concat":
        shape = (*value.shape[:axis], draw(st.integers(1, 3)), *value.shape[axis + 1 :])
        other, other_value = leaf(source, shape)
        return concat(axis, [tensor, other]), np.concatenate([value, other_value], axis)
    if operation == "stack" and ndim < 4:
        other, other_value = leaf(source, value.shape)
        return stack(axis, [tensor, other]), np.stack([value, other_value], axis)
    return tensor.map(lambda x: x + 1, np.float32), value + 1


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_reading_a_slice_equals_slicing_the_whole(counting_source, data):
    source = counting_source({})
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    tensor, value = leaf(source, tuple(shape))
    for _ in range(data.draw(st.integers(0, 4))):
        tensor, value = apply_one(data.draw, source, tensor, value)
    assert tensor.shape == value.shape
    index = tuple(
        slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))))
        for n in value.shape
    )
    read = tensor.read(index)
    assert read.dtype == tensor.dtype
    np.testing.assert_array_equal(read, value[index])
    np.testing.assert_array_equal(tensor.read_all(), value)


def test_a_shard_of_fused_rows_reads_its_own_rows_once_in_long_ranges(counting_source):
    source = counting_source({name: np.zeros((64, 32), np.float32) for name in "gu"})
    fused = stack(0, [lazy_of(source, "g"), lazy_of(source, "u")])
    shard = fused.read((slice(0, 2), slice(16, 32), slice(0, 32)))
    assert shard.shape == (2, 16, 32)
    assert source.reads == [(n, (slice(16, 32), slice(0, 32))) for n in "gu"]


def test_consecutive_indices_are_one_read_and_zeros_are_none(counting_source):
    source = counting_source({"w": np.arange(40, dtype=np.float32).reshape(20, 2)})
    taken = lazy_of(source, "w").take(0, np.array([0, 1, 2, -1, 15, 16, 17, -1, -1]))
    values = taken.read_all()
    assert [index[0] for _, index in source.reads] == [slice(0, 3), slice(15, 18)]
    assert values[3].tolist() == [0, 0]
    source.reads.clear()
    assert not taken.read((slice(7, 9), slice(None))).any()
    assert source.reads == []


def test_gathers_of_gathers_meet_in_one_read(counting_source):
    source = counting_source({"w": np.arange(12, dtype=np.float32).reshape(12, 1)})
    order = np.array([6, 7, 8, 0, 1, 2, 9, 10, 11, 3, 4, 5])
    back = lazy_of(source, "w").take(0, order).take(0, np.argsort(order))
    np.testing.assert_array_equal(back.read_all(), source.arrays["w"])
    assert len(source.reads) == 1


def test_misuse_is_refused_where_it_is_made(counting_source):
    source = counting_source({"w": np.zeros((4, 6), np.float32), "v": np.zeros((4, 5), np.float32)})
    tensor = lazy_of(source, "w")
    with pytest.raises(ValueError, match=r"axis 1 .* has size 6, not the product of \[4, 2\]"):
        tensor.split(1, (4, 2))
    with pytest.raises(ValueError, match="expected indices from -1 to 3"):
        tensor.take(0, np.array([4]))
    with pytest.raises(ValueError, match="cannot join"):
        concat(0, [tensor, lazy_of(source, "v")])
    with pytest.raises(ValueError, match="step 1"):
        tensor.read((slice(0, 4, 2), slice(None)))
