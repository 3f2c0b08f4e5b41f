"""Block-scaled fp8 checkpoints read as the wide weights that they stand for."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from jaxgen.config import EngineConfig
from jaxgen.engine.build import describe, load_model
from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_checkpoints.errors import CheckpointError
from jaxgen_checkpoints.quantized import widened
from jaxgen_checkpoints.quantized.fp8_blocks import Fp8BlockSource
from jaxgen_checkpoints.readers.memory import MemorySource
from jaxgen_checkpoints.safetensors_writer import write_safetensors

SCHEME = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [16, 24],
}
WIDE = ("embed_tokens", "lm_head", "mlp.gate.weight")


def narrow(values: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """fp8 values and the scales of their blocks."""
    rows, columns = (-(-n // size) for n, size in zip(values.shape, block, strict=True))
    scales = np.zeros((rows, columns), np.float32)
    out = np.zeros(values.shape, ml_dtypes.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = np.abs(values[part]).max() / 448
            out[part] = (values[part] / scales[i, j]).astype(out.dtype)
    return out, scales


def dequantised(values: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    spread = scales.repeat(block[0], axis=0).repeat(block[1], axis=1)
    return values.astype(np.float32) * spread[: values.shape[0], : values.shape[1]]


def test_slices_are_scaled_block_by_block() -> None:
    block = (4, 6)
    values, scales = narrow(np.random.default_rng(0).standard_normal((10, 15)), block)
    source = Fp8BlockSource(
        MemorySource({"a.weight": values, "a.weight_scale_inv": scales, "b": np.ones(3)}), block
    )
    assert set(source.tensors()) == {"a.weight", "b"}
    assert source.tensors()["a.weight"].dtype == np.float32
    want = dequantised(values, scales, block)
    for rows in ((0, 10), (3, 9), (4, 8), (5, 5), (9, 10)):
        for columns in ((0, 15), (5, 7), (6, 12), (14, 15)):
            index = (slice(*rows), slice(*columns))
            np.testing.assert_array_equal(source.read("a.weight", index), want[index])
    np.testing.assert_array_equal(source.read("b", (slice(1, 3),)), np.ones(2))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.weight_scale_inv": np.ones((1, 1))}, "has not got"),
        ({"a.weight": np.ones((4, 6)), "a.weight_scale_inv": np.ones((1, 1))}, "an fp8 matrix"),
        (
            {
                "a.weight": np.ones((4, 7), ml_dtypes.float8_e4m3fn),
                "a.weight_scale_inv": np.ones((1, 1), np.float32),
            },
            r"expected floating \[1, 2\]",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(tensors, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        Fp8BlockSource(MemorySource(tensors), (4, 6))


@pytest.mark.parametrize(
    "change",
    [{"weight_block_size": None}, {"activation_scheme": "static"}, {"quant_method": "other"}],
)
def test_another_scheme_is_left_for_the_family_to_refuse(change) -> None:
    config = {"quantization_config": {**SCHEME, **change}}
    source = MemorySource({"b": np.ones(3)})
    assert widened(config, source) == (config, source)


def test_a_checkpoint_of_narrow_weights_loads(golden_dir, tmp_path) -> None:
    plain = open_checkpoint(golden_dir("deepseek_v3"))
    tensors, block = {}, (16, 24)
    for name, info in plain.source.tensors().items():
        values = plain.source.read(name, (slice(None),) * len(info.shape))
        tensors[name] = values
        if values.ndim == 2 and not any(part in name for part in WIDE):
            tensors[name], tensors[name + "_scale_inv"] = narrow(values.astype(np.float32), block)
    described = {name: (values.shape, values.dtype) for name, values in tensors.items()}
    write_safetensors(tmp_path / "model.safetensors", described, tensors.values())
    config = {**plain.config, "quantization_config": SCHEME}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(golden_dir("deepseek_v3") / "generation_config.json", tmp_path)
    on_two = EngineConfig(tensor_parallel_size=2)
    loaded = load_model(describe(open_checkpoint(tmp_path), on_two), "float32")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    want = dequantised(tensors[name], tensors[name + "_scale_inv"], block)
    np.testing.assert_array_equal(loaded.weights["layers"][1]["experts_down"][3], want)
