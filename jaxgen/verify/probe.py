"""Asks our own engine for what a reference has recorded: logits, greedy tokens, hidden states."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxgen.engine.engine import InferenceEngine
from jaxgen.llm import LLM
from jaxgen.ragged.batch import BatchItem, pack
from jaxgen.sampling import SamplingParams
from jaxgen.verify.compare import Answer
from jaxgen.verify.recording import Recording

_LIKELIEST = 5


def answer(llm: LLM, recording: Recording) -> list[Answer]:
    """Our answer to every prompt of the recording, all of them batched together."""
    prompts = [prompt.ids for prompt in recording.prompts]
    logits = all_logits(llm.engine, prompts)
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=len(prompt.greedy),
            ignore_eos=True,
            logprobs=_LIKELIEST,
            detokenize=False,
        )
        for prompt in recording.prompts
    ]
    outputs = llm.generate([ids.tolist() for ids in prompts], params)
    answers = []
    for prompt_logits, prompt, output in zip(logits, recording.prompts, outputs, strict=True):
        (completion,) = output.outputs
        steps = len(prompt.greedy)
        tokens = np.full(steps, -1, np.int32)  # what was not generated equals no token
        tokens[: len(completion.token_ids)] = completion.token_ids
        top5 = np.full((steps, _LIKELIEST), np.nan, np.float32)
        for step, position in enumerate(completion.logprobs or ()):
            top5[step] = [value for _, value in position.top]
        answers.append(Answer(prompt_logits, tokens, top5))
    return answers


def all_logits(engine: InferenceEngine, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """float32 [tokens, vocab] for each prompt; prompts longer than a step's limit go in chunks."""
    parts: list[list[np.ndarray]] = [[] for _ in prompts]
    for batch in _batches([len(ids) for ids in prompts], engine):
        tokens = [prompts[uid][start:stop] for uid, start, stop in batch]
        logits = engine.put([uid for uid, _, _ in batch], tokens, all_logits=True)
        begin = 0
        for uid, start, stop in batch:
            parts[uid].append(logits[begin : begin + stop - start])
            begin += stop - start
            if stop == len(prompts[uid]):
                engine.flush(uid)
    return [np.concatenate(part) for part in parts]


def hidden_states(engine: InferenceEngine, ids: np.ndarray) -> np.ndarray:
    """float32 [layers + 1, tokens, model]: the embedding's output and each block's.

    At most as many of the prompt's tokens as one step takes.
    """
    uid, tokens = 0, ids[: engine.config.max_num_batched_tokens]
    engine.state.track(uid)
    try:
        engine.state.reserve(uid, len(tokens))
        item = BatchItem(engine.state[uid], tokens, emit=False)
        bucket = engine.buckets.fit([len(tokens)])
        align = engine.buckets.row_alignment
        packed = pack(bucket, [item], engine.state, row_alignment=align)
        hidden = np.asarray(engine.runner.hidden(bucket, packed), np.float32)
        engine.state.commit(uid)
    finally:
        engine.flush(uid)
    return hidden[:, : len(tokens)]


def _batches(
    lengths: Sequence[int], engine: InferenceEngine
) -> Iterator[list[tuple[int, int, int]]]:
    """Steps of (prompt, start, stop) that take every prompt from its first token to its last."""
    tokens_left, batch = engine.config.max_num_batched_tokens, []
    for uid, length in enumerate(lengths):
        start = 0
        while start < length:
            # A prompt that would fit into a step of its own is not cut to fill up this one.
            whole = min(length - start, engine.config.max_num_batched_tokens)
            if whole > tokens_left or len(batch) == engine.config.max_num_seqs:
                yield batch
                tokens_left, batch = engine.config.max_num_batched_tokens, []
            batch.append((uid, start, start + whole))
            start, tokens_left = start + whole, tokens_left - whole
    yield batch
