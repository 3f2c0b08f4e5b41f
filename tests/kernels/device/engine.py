"""Check whole engines on a Hopper GPU: `python tests/kernels/device/engine.py`.

Small models with random weights run in bfloat16 with the kernels, and their logits are compared
with the same weights' in float32 with the reference attention; the golden fixtures must give their
greedy tokens in float32. It fails where anything else than a kernel served attention.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "checkpoints"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import jax
import numpy as np

from jaxgen.engine.build import build_hf_engine, config_checkpoint
from jaxgen.engine.engine import InferenceEngine
from jaxgen.engine.loop import GenerationLoop
from jaxgen.ragged.buckets import Buckets
from jaxgen.sampling import SamplingParams
from jaxgen_checkpoints.checkpoint import memory_checkpoint
from pallas_kernels import dispatch

GOLDEN = Path(__file__).resolve().parents[2] / "fixtures" / "golden"
KERNELS = {"ragged_attention": "pallas_kernels.qkv_attention.gpu"}
BOUND = 2e-2  # of the norm of logits, two layers of bfloat16 against float32
LIMITS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 64,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "heads of 64, 2 of them KV heads": LLAMA | {"num_key_value_heads": 2, "head_dim": 64},
    "heads of 128, all of them KV heads": LLAMA | {"num_key_value_heads": 8, "head_dim": 128},
}
STEPS: list[dict[int, int]] = [  # new tokens of each sequence
    {0: 5},
    {1: 200},
    {0: 1, 1: 180, 2: 70},
    {0: 1, 1: 1, 2: 1},
    {0: 3, 1: 4, 2: 2, 3: 1},
    {3: 256},
    {0: 1, 1: 1, 2: 1, 3: 1},
]


def random_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """By the names of a checkpoint, rounded to bfloat16, so that both engines have the same."""
    rng = np.random.default_rng(0)
    tensors = config_checkpoint(config).source.tensors()
    weights = {}
    for name, info in tensors.items():
        value = rng.standard_normal(info.shape) / np.sqrt(info.shape[-1])
        value = 1 + 0.1 * value if len(info.shape) == 1 else value
        weights[name] = value.astype(jax.numpy.bfloat16).astype(np.float32)
    return weights


def logits_of(config: dict[str, Any], weights: dict[str, np.ndarray], dtype: str) -> list[Any]:
    """The logits of every token of every step, of which there are two shapes."""
    engine = build_hf_engine(memory_checkpoint(weights, config), LIMITS | {"dtype": dtype})
    engine.buckets = Buckets(engine.buckets.decode[-1:], engine.buckets.mixed[-1:])
    rng = np.random.default_rng(1)
    found = []
    for step in STEPS:
        tokens = [rng.integers(0, config["vocab_size"], count).tolist() for count in step.values()]
        found.append(engine.put(list(step), tokens, all_logits=True))
    return found


@contextmanager
def recorded() -> Iterator[dict[str, set[str]]]:
    """Which module served each operation, by the operation's name."""
    served: dict[str, set[str]] = {}
    choose: Callable[..., Any] = dispatch.Operation.choose

    def watched(operation: dispatch.Operation, *arguments: Any) -> Any:
        module = choose(operation, *arguments)
        served.setdefault(operation.name, set()).add(module.__name__)
        return module

    dispatch.Operation.choose = watched  # ty: ignore[invalid-assignment]
    try:
        yield served
    finally:
        dispatch.Operation.choose = choose  # ty: ignore[invalid-assignment]


def check_model(name: str, config: dict[str, Any], without: list[str]) -> bool:
    weights = random_weights(config)
    jax.clear_caches()  # what is traced keeps the implementation that was chosen then
    plain = dict.fromkeys(without, "reference")
    with recorded() as served, warnings.catch_warnings(), dispatch.using(**plain):
        warnings.simplefilter("error", dispatch.FallbackWarning)
        got = logits_of(config, weights, "bfloat16")
    jax.clear_caches()
    with dispatch.using(ragged_attention="reference"):
        want = logits_of(config, weights, "float32")
    fell_back = {op: served.get(op) for op, module in KERNELS.items() if served[op] != {module}}
    errors = [
        float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, want, strict=True)
    ]
    fine = max(errors) < BOUND and not fell_back
    print(f"{'ok  ' if fine else 'FAIL'} {name}: errors {[f'{e:.1e}' for e in errors]}", flush=True)
    print(f"     served by {served}", flush=True)
    return fine


def greedy(engine: InferenceEngine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """So many tokens for each prompt, all of them at once."""
    loop = GenerationLoop(engine)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = [loop.submit(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while loop.has_unfinished:
        loop.step()
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_golden(name: str) -> bool:
    stored = dict(np.load(GOLDEN / name / "expected.npz"))
    numbers = range(stored["n_prompts"])
    wanted = [stored.get(f"cached_greedy_{i}", stored[f"greedy_{i}"]).tolist() for i in numbers]
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "block_size": 8}
    limits |= {"max_model_len": 96, "num_gpu_blocks_override": 72, "dtype": "float32"}
    engine = build_hf_engine(GOLDEN / name, limits)
    got = greedy(engine, [stored[f"prompt_{i}"].tolist() for i in numbers], len(wanted[0]))
    fine = got == wanted
    print(f"{'ok  ' if fine else 'FAIL'} golden {name}: greedy tokens in float32", flush=True)
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--without", nargs="*", default=[], help="operations to run as reference")
    parser.add_argument("--golden", nargs="*", default=["llama_plain", "qwen3_moe", "gemma3"])
    options = parser.parse_args()
    print(jax.__version__, jax.devices()[0].device_kind, flush=True)
    results = [check_model(name, MODELS[name], options.without) for name in options.models]
    with warnings.catch_warnings():  # float32 is the XLA path
        warnings.simplefilter("ignore", dispatch.FallbackWarning)
        results += [check_golden(name) for name in options.golden]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
