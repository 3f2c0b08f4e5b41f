"""A recorded fixture: expected.npz, and meta.json beside it where there is one."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxgen.verify.recording import FLOAT32_LOGITS, RecordedPrompt, Recording
from jaxgen_checkpoints.errors import RefusedInput

NARROW_FACTOR = 2
"""An engine in a narrow type may be off by this many times the reference's own bfloat16 error."""


def read_recording(path: str | Path, *, narrow: bool) -> Recording:
    """The recording in `path`, with the bounds of float32, or of a narrow type.

    RefusedInput for a file that is no such recording, and for a narrow type where it does not say
    how far off the reference itself is in bfloat16.
    """
    path = Path(path)
    arrays = _read_arrays(path)
    meta = path.with_name("meta.json")
    said = json.loads(meta.read_text(encoding="utf-8")) if meta.exists() else {}
    try:
        count = int(arrays["n_prompts"])
        bounds = _narrow_bounds(path, arrays, said, count) if narrow else _exact_bounds(said, count)
        prompts = [_prompt(arrays, number, bounds[number]) for number in range(count)]
    except KeyError as error:
        raise RefusedInput(f"{path}: not a recorded fixture: {error} is missing") from error
    return Recording(str(path), prompts, exact=not narrow)


def _read_arrays(path: Path) -> Mapping[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise RefusedInput(f"--golden {path}: there is no such file") from error
    except (ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        # numpy takes what it does not know for a pickle, and would have its reader load that.
        raise RefusedInput(
            f"--golden {path}: not an .npz file, or a damaged one: expected the expected.npz of a "
            "recorded fixture"
        ) from error


def _prompt(arrays: Mapping[str, np.ndarray], number: int, bound: float) -> RecordedPrompt:
    cached = arrays.get(f"cached_greedy_{number}")
    # Log-probabilities were recorded with every step recomputed. Where a cache changes the answer
    # they are not those of generation, even for prompts whose tokens happen to be the same.
    recomputed = any(name.startswith("cached_greedy_") for name in arrays)
    return RecordedPrompt(
        ids=arrays[f"prompt_{number}"],
        logits=arrays[f"logits_{number}"],
        greedy=arrays[f"greedy_{number}"] if cached is None else cached,
        top5_logprobs=None if recomputed else arrays[f"greedy_top5_logprobs_{number}"],
        logit_bound=bound,
    )


def _exact_bounds(meta: Mapping[str, Any], count: int) -> list[float]:
    return [min(FLOAT32_LOGITS, float(meta.get("f32_atol", FLOAT32_LOGITS)))] * count


def _narrow_bounds(
    path: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], count: int
) -> list[float]:
    """For each prompt twice the reference's own error; the worst of all where it has none."""
    said = meta.get("bf16", {}).get("max_abs_logit_err_per_prompt", [])
    errors: dict[int, float] = dict(enumerate(said))
    for number in range(count):
        bits = arrays.get(f"bf16_logits_{number}")
        if bits is not None:
            values = bits.view(ml_dtypes.bfloat16).astype(np.float32)
            errors[number] = float(np.abs(values - arrays[f"logits_{number}"]).max())
    if not errors:
        raise RefusedInput(
            f"{path}: does not say how exact bfloat16 is there; verify with --dtype float32"
        )
    worst = max(errors.values())
    return [NARROW_FACTOR * errors.get(number, worst) for number in range(count)]
