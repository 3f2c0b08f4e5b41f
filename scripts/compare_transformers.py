"""Decode speed of the demo model beside transformers, in one process on the same cores, in turns.

Needs torch and transformers, which jaxgen does not. Both run the same weights, taken out of the
GGUF file, greedily from the same prompt, and must give the same tokens in float32.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from jaxgen import LLM, SamplingParams
from jaxgen_checkpoints.checkpoint import Checkpoint, open_checkpoint

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"


def reference_model(checkpoint: Checkpoint, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """transformers' Llama over the checkpoint's tensors."""
    config = transformers.LlamaConfig(**checkpoint.config)
    model = transformers.LlamaForCausalLM(config)
    everything = {
        name: torch.from_numpy(checkpoint.source.read(name, (slice(None),) * len(info.shape)))
        for name, info in checkpoint.source.tensors().items()
    }
    missing, unexpected = model.load_state_dict(everything, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.to(dtype).eval()


def ours(llm: LLM, tokens: int) -> tuple[float, list[int]]:
    """Seconds a decode step, and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    marks, found = [], []
    for output in llm.stream(PROMPT, params):
        marks.append(time.perf_counter())
        found = output.outputs[0].token_ids
    return float(np.median(np.diff(marks))), found


def theirs(model: transformers.PreTrainedModel, tokens: int) -> tuple[float, list[int]]:
    """The same of transformers, step by step with its dynamic cache and no generation overhead."""
    marks, found = [], []
    ids, cache = torch.tensor([PROMPT]), transformers.DynamicCache()
    with torch.inference_mode():
        for _ in range(tokens):
            out = model(ids, past_key_values=cache, use_cache=True)
            ids = out.logits[:, -1:].argmax(-1)
            found.append(int(ids))
            marks.append(time.perf_counter())
    return float(np.median(np.diff(marks))), found


def main() -> None:
    """Measure in turns and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Llama .gguf; default: the demo's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    fetch = Path(__file__).with_name("fetch_demo_model.py")
    path = args.model or subprocess.check_output([sys.executable, fetch], text=True).strip()
    reference = reference_model(open_checkpoint(path), getattr(torch, args.dtype))
    llm = LLM(path, dtype=args.dtype, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=512)
    ours(llm, args.tokens)
    theirs(reference, args.tokens)
    times: dict[str, list[float]] = {"jaxgen": [], "transformers": []}
    for _ in range(args.rounds):
        mine, my_tokens = ours(llm, args.tokens)
        other, other_tokens = theirs(reference, args.tokens)
        times["jaxgen"].append(mine)
        times["transformers"].append(other)
        assert args.dtype != "float32" or my_tokens == other_tokens
    medians = {name: statistics.median(values) for name, values in times.items()}
    report = {
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "ms_per_token": {name: round(value * 1e3, 2) for name, value in medians.items()},
        "tokens_per_second": {name: round(1 / value, 1) for name, value in medians.items()},
        "speedup": round(medians["transformers"] / medians["jaxgen"], 2),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
