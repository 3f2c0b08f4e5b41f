"""`jaxgen generate`: continues prompts, all of them in one continuous batch."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgen.commands.compile_clock import CompileClock
from jaxgen.commands.opening import open_for, read_text
from jaxgen.commands.sampling_options import sampling_params
from jaxgen.commands.terminal import note, say, say_json
from jaxgen.commands.timing import Timing, measure
from jaxgen.config import DEFAULT_MAX_NUM_SEQS
from jaxgen.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from jaxgen.llm import LLM
from jaxgen.prompts import PlainPrompt
from jaxgen_checkpoints.errors import RefusedInput

USUAL_TOKENS = 128
"""Tokens of a continuation where --max-tokens is not given."""


def run(args: argparse.Namespace) -> int:
    """Prints each prompt's continuations, or one JSON object; timings go to stderr."""
    if args.logprobs is not None and not args.json:
        raise RefusedInput("--logprobs are printed by --json only: add it")
    prompts = _prompts(args)
    began = time.perf_counter()
    with CompileClock() as clock:
        asked = len(prompts) * max(1, args.n or 1)
        opened = open_for(args, sequences=min(asked, DEFAULT_MAX_NUM_SEQS))  # others wait
        ids = [opened.need_tokenizer().encode(p) if isinstance(p, str) else p for p in prompts]
        params = [sampling_params(args, opened, p, USUAL_TOKENS) for p in ids]
        llm = LLM.of(opened)
        loaded = time.perf_counter()
        outputs = llm.generate(ids, params)
        ended = time.perf_counter()
    _refuse_failed(outputs)
    timing = measure(
        clock,
        began=loaded,
        ended=ended,
        prompt_tokens=sum(len(p) for p in ids),
        output_tokens=sum(len(c.token_ids) for o in outputs for c in o.outputs),
        load_seconds=loaded - began,
    )
    if args.json:
        _print_json(args.model, prompts, outputs, timing)
    else:
        _print_texts(prompts, outputs, with_text=llm.tokenizer is not None)
        note(timing.line())
    return 0


def _prompts(args: argparse.Namespace) -> list[PlainPrompt]:
    if args.prompt is not None:
        return list(args.prompt)
    if args.prompt_token_ids is not None:
        return list(args.prompt_token_ids)
    return [
        sys.stdin.read() if name == "-" else read_text(Path(name), "--prompt-file")
        for name in args.prompt_file
    ]


def _refuse_failed(outputs: Sequence[RequestOutput]) -> None:
    for number, output in enumerate(outputs, start=1):
        for completion in output.outputs:
            if completion.finish_reason is FinishReason.ERROR:
                raise RefusedInput(f"prompt {number}: {completion.error}")


def _print_texts(
    prompts: Sequence[PlainPrompt], outputs: Sequence[RequestOutput], *, with_text: bool
) -> None:
    """One continuation is printed as it is; several have a header each."""
    several = sum(len(output.outputs) for output in outputs) > 1
    for number, output in enumerate(outputs, start=1):
        for completion in output.outputs:
            if several:
                sample = f", {completion.index + 1}" if len(output.outputs) > 1 else ""
                say(f"--- prompt {number}{sample}")
            if with_text:
                say(completion.text)
            else:
                say(",".join(map(str, completion.token_ids)))


def _print_json(
    model: str, prompts: Sequence[PlainPrompt], outputs: Sequence[RequestOutput], timing: Timing
) -> None:
    listed = [
        {
            "prompt": prompt if isinstance(prompt, str) else None,
            "prompt_token_ids": output.prompt_token_ids,
            "outputs": [_completion(completion) for completion in output.outputs],
        }
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    say_json({"model": model, "outputs": listed, "timing": timing.as_json()})


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    described: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        described["logprobs"] = [
            {
                "token_id": position.token_id,
                "logprob": position.logprob,
                "top": [{"token_id": token, "logprob": value} for token, value in position.top],
            }
            for position in completion.logprobs
        ]
    return described
