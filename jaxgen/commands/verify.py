"""`jaxgen verify`: is the model computed right? Against a recording, or against transformers."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxgen.commands.opening import limited_options
from jaxgen.commands.terminal import say, say_json
from jaxgen.commands.verification_report import Report
from jaxgen.config import EngineConfig
from jaxgen.hub import local_model
from jaxgen.llm import LLM
from jaxgen.opened import OpenedModel, open_model
from jaxgen.verify.compare import compare
from jaxgen.verify.golden import read_recording
from jaxgen.verify.probe import answer, hidden_states
from jaxgen.verify.recording import Recording
from jaxgen.verify.transformers_reference import (
    TransformersReference,
    first_layer_off,
    random_prompts,
)
from jaxgen_checkpoints.errors import RefusedInput

_LAYER_TOLERANCE = {True: 1e-3, False: 5e-2}
"""Of hidden states: exact (float32), or in a narrow type."""


@dataclass(frozen=True, slots=True)
class _Case:
    recording: Recording
    transformers: TransformersReference | None


def run(args: argparse.Namespace) -> int:
    """0 if everything agrees, 1 on a mismatch; the report goes to stdout."""
    if args.golden is not None and args.prompt is not None:
        raise RefusedInput("--prompt does not go with --golden, which has its own prompts")
    if args.tokenizer is not None and args.prompt is None:
        raise RefusedInput("--tokenizer is for the text of --prompt: leave it out")
    dtype = args.dtype or "float32"
    path = local_model(args.model)
    case = _golden(args, dtype) if args.golden is not None else _beside(args, path, dtype)
    llm = LLM.of(_open(args, path, dtype, case.recording))
    results = compare(case.recording, answer(llm, case.recording))
    report = Report(args.model, case.recording.description, dtype, results)
    found = report.divergence
    if found is not None and case.transformers is not None:
        ids = case.recording.prompts[found.prompt].until(found.position, generated=found.generated)
        ours = hidden_states(llm.engine, ids)
        theirs = case.transformers.hidden_states(ids)[:, : ours.shape[1]]
        layer = first_layer_off(ours, theirs, _LAYER_TOLERANCE[case.recording.exact])
        report = Report(args.model, case.recording.description, dtype, results, layer)
    if args.json:
        say_json(report.as_json())
    else:
        say(report.text())
    return 0 if found is None else 1


def _golden(args: argparse.Namespace, dtype: str) -> _Case:
    return _Case(read_recording(args.golden, narrow=dtype != "float32"), None)


def _beside(args: argparse.Namespace, path: Path, dtype: str) -> _Case:
    """What transformers says of --prompt, or of random prompts."""
    opened = _open(args, path, dtype)  # ours refuses first, and in its own words
    if args.prompt is None:
        vocab = int(opened.described.policy.config.vocab_size)
        prompts = random_prompts(vocab, opened.max_context)
    else:
        encode = opened.need_tokenizer().encode
        prompts = [np.asarray(encode(text), np.int32) for text in args.prompt]
    reference = TransformersReference(path)
    return _Case(reference.record(prompts, narrow=dtype != "float32"), reference)


def _open(
    args: argparse.Namespace, path: Path, dtype: str, recording: Recording | None = None
) -> OpenedModel:
    """The model with limits that take all prompts of the recording in one step."""
    prompts, tokens = (1, 1) if recording is None else _size(recording)
    options = limited_options(args, sequences=prompts, step_tokens=tokens) | {"dtype": dtype}
    opened = open_model(
        path,
        EngineConfig.from_any(None, **options),
        tokenizer=args.tokenizer,
        policy=args.policy,
    )
    rope = opened.described.policy.config.rope
    endless = rope is not None and rope.unbounded
    if recording is None or recording.longest <= opened.max_context or not endless:
        return opened
    # Positions go on beyond the config's number, and the recording did so.
    options["max_model_len"] = recording.longest
    return open_model(
        path,
        EngineConfig.from_any(None, **options),
        tokenizer=args.tokenizer,
        policy=args.policy,
    )


def _size(recording: Recording) -> tuple[int, int]:
    # A prompt goes through one step with its continuation too, where layers are compared.
    return len(recording.prompts), max(recording.prompt_tokens, recording.longest)
