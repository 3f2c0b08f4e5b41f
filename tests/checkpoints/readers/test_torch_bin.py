"""pytorch_model.bin, which only a conversion reads, through torch's weights_only loader."""

import sys

import numpy as np
import pytest

from jaxgen_checkpoints.checkpoint import open_torch_checkpoint
from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.readers.torch_bin import open_torch_bin


def test_without_torch_it_says_what_to_install(bad_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match="pip install torch"):
        open_torch_checkpoint(bad_dir / "pickle_bin")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_code_in_a_pickle_never_runs(bad_dir, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="weights_only loader refuses"):
        open_torch_checkpoint(bad_dir / "pickle_bin")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("zipped", [True, False])
def test_slices_of_every_type(zipped, tmp_path):
    torch = pytest.importorskip("torch")
    values = torch.arange(24.0).reshape(4, 6)
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
    state = {str(kind): values.to(kind) for kind in kinds}
    state["transposed"] = values.T
    path = tmp_path / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    source = open_torch_bin(tmp_path)
    for name, tensor in state.items():
        part = source.read(name, (slice(1, 3), slice(2, None)))
        assert part.dtype == source.tensors()[name].dtype
        np.testing.assert_array_equal(part.astype(np.float32), tensor[1:3, 2:].float().numpy())


def test_what_is_no_tensor_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"step": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="step: expected a dense tensor, got int"):
        open_torch_bin(tmp_path)
