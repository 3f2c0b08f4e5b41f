"""Log-probabilities of the prompt itself: which token follows each one, chunk by chunk.

Steps that score are another program. Few need it, so there are few sizes of it: a batch takes the
smallest that it fits.
"""

from dataclasses import dataclass

import numpy as np

from jaxgen.engine.outputs import RequestOutput, TokenLogprob
from jaxgen.ragged.buckets import Bucket, Buckets
from jaxgen.sampling import TokenLogprobs
from jaxgen.schedule.split_fuse import Plan


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A part of a prompt in a step: its first token's place in the batch and in the prompt."""

    output: RequestOutput
    place: int
    start: int
    count: int
    most: int

    def read(self, scores: TokenLogprobs) -> None:
        """Appends what the step says of the prompt's next tokens, unless that is known already.

        scores: on the host; [tokens, ...] over the flat batch.
        """
        known, ids = self.output.prompt_logprobs, self.output.prompt_token_ids
        assert known is not None
        for offset in range(
            len(known) - 1 - self.start, min(self.count, len(ids) - 1 - self.start)
        ):
            row = self.place + offset
            top_ids = scores.top_ids[row, : self.most].tolist()
            top = tuple(zip(top_ids, scores.top_logprobs[row, : self.most].tolist(), strict=True))
            token = ids[self.start + offset + 1]
            known.append(TokenLogprob(token, float(scores.chosen[row]), top))


def scoring_buckets(buckets: Buckets) -> tuple[Bucket, ...]:
    """Every third size of mixed batches, down from the largest, each with the most rows it has."""
    widest = {bucket.tokens: bucket for bucket in buckets.mixed}
    return tuple([*widest.values()][::-3][::-1])


def scoring_bucket(buckets: Buckets, plan: Plan) -> Bucket:
    """The smallest of them that a step fits."""
    align = buckets.row_alignment
    tokens = sum(-(-chunk.count // align) * align for chunk in plan.chunks)
    return next(
        bucket
        for bucket in scoring_buckets(buckets)
        if tokens <= bucket.tokens and len(plan.chunks) <= bucket.rows
    )


def scored_chunks(
    plan: Plan, outputs: dict[int, tuple[RequestOutput, int]], align: int
) -> tuple[ScoredChunk, ...]:
    """The step's parts of prompts that are to be scored.

    outputs: of the requests that want it, by uid, and how many likeliest tokens of each position.
    """
    place, scored = 0, []
    for chunk in plan.chunks:
        output, most = outputs.get(chunk.request.uid, (None, 0))
        if output is not None and chunk.start < len(output.prompt_token_ids) - 1:
            scored.append(ScoredChunk(output, place, chunk.start, chunk.count, most))
        place += -(-chunk.count // align) * align
    return tuple(scored)


def targets(scored: tuple[ScoredChunk, ...], tokens: int) -> np.ndarray:
    """int32 [tokens]: for each scored token of the flat batch the one that follows it; else 0."""
    wanted = np.zeros(tokens, np.int32)
    for chunk in scored:
        following = chunk.output.prompt_token_ids[chunk.start + 1 : chunk.start + 1 + chunk.count]
        wanted[chunk.place : chunk.place + len(following)] = following
    return wanted
