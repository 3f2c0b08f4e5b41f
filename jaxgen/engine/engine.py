"""The engine's verbs, as DeepSpeed has them: put, query, can_schedule, flush.

It has no scheduler and no tokenizer: whoever calls decides what goes into the next step. The
generation loop is one such caller.
"""

from collections.abc import Callable, Sequence as Items
from pathlib import Path

import numpy as np

from jaxgen.config import EngineConfig
from jaxgen.engine.model import Model
from jaxgen.engine.program_keys import Forward, Kind, generation_programs
from jaxgen.engine.replay import Replay
from jaxgen.engine.runner import StepRunner
from jaxgen.engine.scoring import scoring_buckets
from jaxgen.ragged.batch import BatchItem, pack
from jaxgen.ragged.buckets import Buckets
from jaxgen.ragged.capacity import Capacity
from jaxgen.ragged.state import StateManager
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.verdict import SchedulingError, SchedulingResult, can_schedule
from jaxgen_checkpoints.errors import RefusedInput

type TokenIds = Items[int] | np.ndarray


class InferenceEngine:
    """A model, its KV cache, and the sequences in it.

    One thread owns an engine. `model`, `config`, `state`, `runner` and `buckets` are there to be
    read; only the engine and its generation loop change them.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        state: StateManager,
        runner: StepRunner,
        buckets: Buckets,
        save: Callable[[Path], None],
    ) -> None:
        self.model = model
        self.config = config
        self.state = state
        self.runner = runner
        self.buckets = buckets
        self._save = save
        self.capacity = Capacity(state)
        self.limits = Limits(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            recompute_at=model.config.recompute_at,
            max_waiting=config.max_num_queued_reqs,
            sizes=buckets.filled,
        )
        self._replay = Replay(model.config.recompute_at)

    def put(
        self,
        batch_uids: Items[int],
        batch_tokens: Items[TokenIds],
        do_checks: bool = True,
        *,
        all_logits: bool = False,
    ) -> np.ndarray:
        """One forward over a ragged batch: a new uid begins a sequence, a known one goes on.

        Returns float32 logits [len(batch_uids), vocab] of each sequence's last token, or with
        all_logits [tokens, vocab] of every token given, sequence after sequence. Raises
        SchedulingError, before anything changes, for a batch that does not fit; RefusedInput for
        token ids outside the vocabulary. do_checks=False skips the dry run, not the token check.

        Where a model's positions change at a length, a sequence that outgrows it is computed anew
        first, in steps of its own.
        """
        batch = self._check(batch_uids, batch_tokens)
        if do_checks:
            result = self.can_schedule(batch_uids, [len(tokens) for tokens in batch])
            if result is not SchedulingResult.Success:
                raise SchedulingError(result)
        if not batch:
            return np.zeros((0, int(self.model.config.vocab_size)), np.float32)
        for uid, tokens in zip(batch_uids, batch, strict=True):
            if uid in self.state and self._replay.outgrown(self.state[uid], len(tokens)):
                self._recompute(uid, self.state[uid].seen + len(tokens))
        logits = self._forward(batch_uids, batch, all_logits=all_logits)
        for uid, tokens in zip(batch_uids, batch, strict=True):
            self._replay.record(self.state[uid], tokens)
        return logits

    def _recompute(self, uid: int, length: int) -> None:
        """Computes a sequence anew, with keys for the `length` that it is about to have."""
        past = self._replay.take(uid)
        self.state.flush(uid)
        self.state.track(uid, anchor=length)
        while past.size:
            count = min(past.size, self.limits.max_tokens)
            count = self.capacity.fitting_tokens(uid, count, min(self.state.free_blocks))
            self._forward([uid], [past[:count]], all_logits=False)
            past = past[count:]

    def _forward(
        self, batch_uids: Items[int], batch: Items[np.ndarray], *, all_logits: bool
    ) -> np.ndarray:
        """One step over tokens that are known to be good, and to fit."""
        counts = [len(tokens) for tokens in batch]
        bucket = self.buckets.fit(counts)
        align = self.buckets.row_alignment
        items = self._reserve(batch_uids, batch)
        packed = pack(bucket, items, self.state, row_alignment=align)
        try:
            step = self.runner.logits(bucket, packed, all_tokens=all_logits)
            logits = np.asarray(self.runner.read(step))
        except BaseException:  # even an interrupt may come when the donated cache is gone
            self.forget_everything()
            raise
        for uid in batch_uids:
            self.state.commit(uid)
        given = _token_rows(counts, align) if all_logits else slice(len(items))
        return logits[given, : self.model.config.vocab_size]

    def warm_up(self, *, logits: bool = False) -> None:
        """Compiles every step that generation can need, and runs it where a first run costs more;
        with logits also compiles those of `put`.

        From now on a compile is counted in `runner.late_compiles` and logged as a fault.
        RuntimeError while sequences are tracked: warm up before the first request.
        """
        if len(self.state):
            raise RuntimeError(
                f"{len(self.state)} sequences are in the engine: warm up before them"
            )
        keys = generation_programs(self.buckets, self.runner.sampling_kinds)
        if logits:
            keys += [Forward(bucket, Kind.ALL_LOGITS) for bucket in self.buckets]
        self.runner.warm_up(keys)
        if self.runner.loads_late and not self.config.enforce_eager:
            self._run_everything()

    def _run_everything(self) -> None:
        """Steps without a row: when it first runs, a program is loaded onto the device and its
        command buffers are recorded, for which nobody should have to wait.
        """
        runner, drawn = self.runner, set[int]()
        for bucket in self.buckets:
            kinds = runner.sampling_kinds[:1] if bucket.rows in drawn else runner.sampling_kinds
            for kind in kinds:
                runner.read(runner.sample(bucket, pack(bucket, [], self.state), kind))
            drawn.add(bucket.rows)
        for bucket in scoring_buckets(self.buckets):
            targets = np.zeros(bucket.tokens, np.int32)
            runner.read(runner.score(bucket, pack(bucket, [], self.state), targets))

    def query(self, uid: int, max_request_tokens: int, max_request_blocks: int) -> tuple[int, int]:
        """(tokens, blocks): how many of the wanted tokens fit, and the new blocks that costs."""
        return self.capacity.query(uid, max_request_tokens, max_request_blocks)

    def can_schedule(self, uids: Items[int], lengths: Items[int]) -> SchedulingResult:
        """Whether `put` would take a batch with these numbers of tokens; changes nothing."""
        return can_schedule(self.capacity, uids, lengths, self.limits)

    def get_remaining_block_capacity(self, uid: int) -> int:
        """Tokens that fit in the blocks which the sequence owns already; 0 for an unknown uid."""
        return self.capacity.remaining_block_capacity(uid)

    def flush(self, uid: int) -> None:
        """Forgets a sequence and frees its blocks; an unknown uid is fine."""
        self.state.flush(uid)
        self._replay.forget(uid)

    def forget_everything(self) -> None:
        """Flushes every sequence and begins with an empty cache, as after a step that died."""
        for uid in self.state.uids:
            self._replay.forget(uid)
        self.state.reset()  # not sequence by sequence: an interrupt may have left one half changed
        self.runner.reset()

    def reset_prefix_cache(self) -> None:
        """No request begins with what was computed before; those that run are not disturbed."""
        self.state.reset_prefix_cache()

    @property
    def free_blocks(self) -> list[int]:
        """Free blocks of each cache group."""
        return list(self.state.free_blocks)

    @property
    def n_kv_cache_groups(self) -> int:
        """Cache groups: layers that keep the same part of the past share one."""
        return len(self.state.groups)

    def serialize(self, save_path: str | Path) -> None:
        """Writes the weights as a snapshot that any mesh can read back (build_hf_engine does)."""
        self._save(Path(save_path))

    def _check(self, uids: Items[int], batch_tokens: Items[TokenIds]) -> list[np.ndarray]:
        if len(uids) != len(batch_tokens):
            raise RefusedInput(f"{len(uids)} uids were given tokens for {len(batch_tokens)}")
        if len(set(uids)) != len(uids):
            raise RefusedInput(f"each uid may be in a batch once, got {list(uids)}")
        return [self.check_tokens(uid, ids) for uid, ids in zip(uids, batch_tokens, strict=True)]

    def check_tokens(self, uid: int | str, token_ids: TokenIds) -> np.ndarray:
        """int32 [tokens]; RefusedInput for none, or for ids that the vocabulary does not have.

        A gather on the device would clamp such ids in silence.
        """
        try:
            ids = np.asarray(token_ids)
        except ValueError:  # rows of unequal length
            ids = np.empty(0)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise RefusedInput(f"sequence {uid}: expected a list of token ids, got {token_ids!r}")
        vocab = int(self.model.config.vocab_size)
        bad = ids[(ids < 0) | (ids >= vocab)]
        if bad.size:
            raise RefusedInput(
                f"sequence {uid}: token ids {bad[:5].tolist()} are outside the vocabulary "
                f"(0 to {vocab - 1})"
            )
        return ids.astype(np.int32)

    def _reserve(self, uids: Items[int], batch: Items[np.ndarray]) -> list[BatchItem]:
        """Reserves every sequence's tokens, or none."""
        begun: list[int] = []
        reserved: list[int] = []
        try:
            for uid, tokens in zip(uids, batch, strict=True):
                if uid not in self.state:
                    self.state.track(uid)
                    begun.append(uid)
                self.state.reserve(uid, len(tokens))
                reserved.append(uid)
        except (RuntimeError, ValueError):
            for uid in reserved:
                self.state.rollback(uid)
            for uid in begun:
                self.state.flush(uid)
            raise
        return [
            BatchItem(self.state[uid], tokens, emit=False)
            for uid, tokens in zip(uids, batch, strict=True)
        ]


def _token_rows(counts: Items[int], align: int) -> np.ndarray:
    """Where in the flat batch each sequence's tokens lie, spans beginning at multiples of align."""
    spans = [-(-count // align) * align for count in counts]
    starts = np.cumsum([0, *spans[:-1]])
    return np.concatenate(
        [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    )
