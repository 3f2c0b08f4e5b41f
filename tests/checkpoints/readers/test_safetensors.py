"""The safetensors reader: slices equal slices, every header is checked, memory stays small."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import save_file

from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.readers.safetensors_source import SafetensorsSource
from jaxgen_checkpoints.source import DTYPE_NAMES, slice_bounds

FILE = "model.safetensors"


def write(folder: Path, entries: dict, data: bytes) -> None:
    header = json.dumps(entries).encode()
    (folder / FILE).write_bytes(len(header).to_bytes(8, "little") + header + data)


def entry(begin: int, end: int, shape: list | None = None, dtype: str = "U8") -> dict:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@st.composite
def boxes(draw):
    """A shape and one slice per axis; rows are small, large or empty, bounds open or negative."""
    rank = draw(st.integers(0, 4))
    shape = [draw(st.integers(0, 5)) for _ in range(rank)]
    if rank and draw(st.booleans()):
        shape[-1] = draw(st.integers(5000, 9000))  # rows that are not read whole
    bound = st.none() | st.integers(-10, 10_000)
    index = tuple(slice(draw(bound), draw(bound)) for _ in shape)
    return tuple(shape), index


@settings(max_examples=150, deadline=None)
@given(boxes(), st.sampled_from(["F32", "BF16", "I64", "F8_E4M3", "BOOL"]))
def test_slice_of_the_file_is_slice_of_the_array(tmp_path_factory, box, dtype_name):
    shape, index = box
    dtype = DTYPE_NAMES[dtype_name]
    count = int(np.prod(shape))
    values = np.arange(count).astype(np.uint8) % 2 if dtype_name == "BOOL" else np.arange(count)
    array = values.astype(dtype).reshape(shape)
    folder = tmp_path_factory.mktemp("slices")
    before = entry(0, 3)
    wanted = entry(3, 3 + array.nbytes, list(shape), dtype_name)
    write(folder, {"before": before, "x": wanted}, b"abc" + array.tobytes())
    source = SafetensorsSource(folder, (FILE,))
    assert source.tensors()["x"].shape == shape
    assert source.tensors()["x"].dtype_name == dtype_name
    part = source.read("x", index)
    assert part.dtype == dtype
    assert part.flags.owndata or part.base.flags.owndata
    assert part.shape == array[index].shape
    assert part.tobytes() == array[index].tobytes()


def test_reads_what_the_library_writes(tmp_path):
    arrays = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
        "empty": np.zeros((0, 4), np.float16),
        "scalar": np.array(3, np.int32),
    }
    save_file(arrays, tmp_path / FILE, metadata={"format": "pt"})
    source = SafetensorsSource(tmp_path, (FILE,))
    for name, array in arrays.items():
        part = source.read(name, tuple(slice(None) for _ in array.shape))
        np.testing.assert_array_equal(part, array)


@pytest.mark.parametrize(
    ("entries", "size", "complaint"),
    [
        ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "bytes .* before tensor b, belong to no tensor"),
        ({"a": entry(0, 4)}, 6, "its header describes"),
        ({"a": entry(0, 4, [4, True])}, 4, "not a list of sizes"),
        ({"a": entry(0, 4, [-4])}, 4, "not a list of sizes"),
        ({"a": entry(0, 0, [2**70, 0])}, 0, "not a list of sizes"),
        ({"a": {"dtype": "U8", "shape": [4]}}, 4, "expected an object with dtype"),
        ({"a": {"dtype": ["U8"], "shape": [4], "data_offsets": [0, 4]}}, 4, "is not known"),
        ({"a": {**entry(0, 4), "data_offsets": [0, 4.0]}}, 4, "not two byte positions"),
        ({"\ud800": entry(0, 4)}, 4, r"tensor \\ud800: its name is not valid"),
        ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
    ],
)
def test_header_is_believed_only_after_checking(entries, size, complaint, tmp_path):
    write(tmp_path, entries, bytes(size))
    with pytest.raises(CheckpointError, match=complaint):
        SafetensorsSource(tmp_path, (FILE,))


def test_file_that_shrinks_is_noticed(tmp_path):
    write(tmp_path, {"a": entry(0, 100)}, bytes(100))
    source = SafetensorsSource(tmp_path, (FILE,))
    write(tmp_path, {"a": entry(0, 10)}, bytes(10))
    with pytest.raises(CheckpointError, match="became shorter"):
        source.read("a", (slice(None),))


def test_a_slice_per_axis_of_step_one():
    assert slice_bounds("x", (4, 5), (slice(1, None), slice(4, 2))) == ((1, 4), (4, 4))
    with pytest.raises(ValueError, match="expected 2 slices"):
        slice_bounds("x", (4, 5), (slice(None),))
    with pytest.raises(ValueError, match="step 1"):
        slice_bounds("x", (4,), (slice(None, None, 2),))


MEASURE = """
import sys
from pathlib import Path
from jaxgen_checkpoints.checkpoint import open_checkpoint

def peak():  # KiB, file pages included
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

source = open_checkpoint(sys.argv[1]).source
before = peak()
for start in range(0, 75_000, 3750):
    rows = source.read("big", (slice(start, start + 3750), slice(None)))
    assert rows[0, 0] == start % 251
for start in range(0, 1000, 125):
    columns = source.read("big", (slice(0, 37_500), slice(start, start + 125)))
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_300_mb_by_slices_stays_near_one_slice(tmp_path, repo_root):
    big = np.broadcast_to((np.arange(75_000) % 251).astype(np.float32)[:, None], (75_000, 1000))
    save_file({"big": np.ascontiguousarray(big)}, tmp_path / FILE)
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(repo_root / "checkpoints")},
    )
    assert done.returncode == 0, done.stderr
    # A slice is 15 to 19 MB; four live at once, since a name keeps the last until it is bound anew.
    assert int(done.stdout) < 90 * 1024
