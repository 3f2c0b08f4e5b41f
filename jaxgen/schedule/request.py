"""One request as the host sees it: its tokens, and how far the device has come with them.

The device runs ahead: tokens that are sampled but not yet read are counted, not known.
"""

from collections.abc import Sequence
from enum import Enum

from jaxgen.ragged.prefix_cache import BlockName

UNKNOWN_TOKEN = -1
"""Stands for a sampled token that the host has not read; the device takes it from the sampler."""


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    """It holds nothing on the device: new, or preempted."""
    RUNNING = "running"
    """It holds blocks and a slot, and has tokens to compute."""
    ENDING = "ending"
    """Its last step by count is dispatched and it holds nothing; its last tokens are not read."""
    FINISHED = "finished"
    """It gets no more tokens; late ones are dropped."""


class Request:
    """A prompt and what is generated for it.

    prompt_ids, output_ids: token ids; output_ids grows, and survives preemption.
    max_tokens: the output ends at this many tokens.
    priority: smaller is served first. arrival: any clock; earlier is served first.
    rank: what comes first is served first, and preempted last.
    cache_salt: it shares cached blocks only with requests of the same salt.
    reads_cache: whether it may begin with cached blocks; False computes every token of its prompt.
    computed: tokens, from the prompt's first on, whose steps are dispatched, or found in the cache.
    pending: sampled tokens that are not read yet.
    decoding: it runs, and one token must be computed before the next is sampled.
    index: its sequence's row, while it runs.
    left: tokens that may still be sampled: of max_tokens, neither read nor pending.
    waits: no step may have it now: what it may say next is not known yet. It keeps what it holds.
    started: length of the sequence when it was last begun from its first token.
    bypassed: how often another was admitted that ranks after it.
    preemptions: how often it lost its cache.
    cached_tokens: of its prompt, found in the cache when it was first begun.
    block_names: of its whole blocks, which follow from block_root and its tokens.
    publish_at: when so many tokens are computed, one more of its blocks may be shared.
    """

    __slots__ = (
        "arrival",
        "block_names",
        "block_root",
        "bypassed",
        "cache_salt",
        "cached_tokens",
        "computed",
        "decoding",
        "index",
        "left",
        "max_tokens",
        "output_ids",
        "pending",
        "preemptions",
        "priority",
        "prompt_ids",
        "publish_at",
        "rank",
        "reads_cache",
        "started",
        "status",
        "uid",
        "waits",
    )

    def __init__(
        self,
        uid: int,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        priority: int = 0,
        arrival: float = 0.0,
        cache_salt: str | None = None,
        reads_cache: bool = True,
    ) -> None:
        """A waiting request. ValueError for an empty prompt or less than one token of output."""
        if not prompt_ids:
            raise ValueError(f"Request {uid} has an empty prompt: give at least one token.")
        if max_tokens < 1:
            raise ValueError(f"Request {uid} needs max_tokens of at least 1, got {max_tokens}.")
        self.uid = uid
        self.prompt_ids = list(prompt_ids)
        self.output_ids: list[int] = []
        self.max_tokens = max_tokens
        self.left = max_tokens
        self.priority = priority
        self.arrival = arrival
        self.rank = (priority, arrival, uid)
        self.cache_salt = cache_salt
        self.reads_cache = reads_cache
        self.status = Status.WAITING
        self.computed = 0
        self.pending = 0
        self.decoding = False
        self.waits = False
        self.index = 0
        self.started = 0
        self.bypassed = 0
        self.preemptions = 0
        self.cached_tokens: int | None = None
        self.block_root: BlockName = b""
        self.block_names: list[BlockName] = []
        self.publish_at = 0

    def __repr__(self) -> str:
        """Uid, status and token counts."""
        return (
            f"Request(uid={self.uid}, {self.status.value}, prompt={len(self.prompt_ids)}, "
            f"output={len(self.output_ids)}+{self.pending}, computed={self.computed})"
        )

    @property
    def known(self) -> int:
        """Tokens of prompt and output whose ids the host has."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def total(self) -> int:
        """Tokens of prompt and output, pending ones included."""
        return self.known + self.pending

    @property
    def remaining(self) -> int:
        """Tokens that must be computed before the next one is sampled; 1 for a decode."""
        return self.total - self.computed

    @property
    def exhausted(self) -> bool:
        """Whether every token that it may generate has been sampled, read or not."""
        return self.left <= 0

    def token_ids(self, start: int, count: int) -> list[int]:
        """Ids [start, start + count) of prompt and output, UNKNOWN_TOKEN for pending ones."""
        end, prompt = start + count, len(self.prompt_ids)
        ids = (
            self.prompt_ids[start:end]
            + self.output_ids[max(0, start - prompt) : max(0, end - prompt)]
        )
        return ids + [UNKNOWN_TOKEN] * (count - len(ids))

    def token_id(self, position: int) -> int:
        """The id at a position whose token is known."""
        after = position - len(self.prompt_ids)
        return self.prompt_ids[position] if after < 0 else self.output_ids[after]

    def begin(self, index: int, cached: int) -> None:
        """It runs, in row `index`, with its first `cached` tokens from the cache."""
        self.status = Status.RUNNING
        self.index = index
        self.computed = cached
        self.started = self.total
        self.decoding = False

    def advance(self, count: int, *, emit: bool) -> None:
        """A step with `count` of its tokens is dispatched; it samples one if `emit`."""
        self.computed += count
        if emit:
            self.pending += 1
            self.left -= 1
        self.decoding = emit or self.remaining == 1

    def receive(self, token: int) -> None:
        """The oldest pending token is read."""
        assert self.pending > 0, f"{self} has no token to come"
        self.pending -= 1
        self.output_ids.append(token)

    def restart(self) -> None:
        """Its state on the device is gone: it waits to be computed from its first token again."""
        self.computed = 0
        self.decoding = False
        self.status = Status.WAITING
