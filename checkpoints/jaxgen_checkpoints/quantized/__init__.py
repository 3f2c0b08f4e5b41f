"""Checkpoints of narrow weights, presented as if they had been stored wide.

What stays narrow on the device is another matter; here whatever reads the tensors sees the names,
shapes and values of the unquantized model.
"""

from collections.abc import Mapping
from typing import Any

from jaxgen_checkpoints.quantized.fp8_blocks import Fp8BlockSource
from jaxgen_checkpoints.quantized.mxfp4 import Mxfp4Source
from jaxgen_checkpoints.source import TensorSource

KEY = "quantization_config"


def widened(config: Mapping[str, Any], source: TensorSource) -> tuple[dict[str, Any], TensorSource]:
    """The config without its quantization, and the source with wide tensors.

    A scheme that is not known is left in the config, where the model's family refuses it by name.
    Raises `CheckpointError` for narrow tensors and scales that do not fit together.
    """
    scheme = config.get(KEY)
    wide = _wide_source(scheme, source) if isinstance(scheme, Mapping) else None
    if wide is None:
        return dict(config), source
    return {key: value for key, value in config.items() if key != KEY}, wide


def _wide_source(scheme: Mapping[str, Any], source: TensorSource) -> TensorSource | None:
    method, block = scheme.get("quant_method"), scheme.get("weight_block_size")
    if method == "mxfp4":
        return Mxfp4Source(source)
    # Scales of activations that a file brings along would have to be applied in the step.
    dynamic = scheme.get("activation_scheme", "dynamic") == "dynamic"
    if method == "fp8" and dynamic and isinstance(block, list) and len(block) == 2:
        rows, columns = block
        if type(rows) is int and type(columns) is int:
            return Fp8BlockSource(source, (rows, columns))
    return None
