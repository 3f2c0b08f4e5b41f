"""Requests that begin alike: what is computed, when it may be shared, and what that costs."""

from jaxgen.ragged.prefix_cache import PrefixCache
from jaxgen.ragged.sequence import CacheGroup
from jaxgen.ragged.state import StateManager
from jaxgen.schedule.limits import Limits
from jaxgen.schedule.request import Request, Status
from jaxgen.schedule.scheduler import Scheduler


def scheduler(max_tokens=16, max_sequences=4, blocks=32):
    groups = [CacheGroup()]
    state = StateManager(
        groups,
        [blocks],
        block_size=4,
        max_context=100,
        max_tracked=8,
        num_slots=max_sequences,
        prefix_cache=PrefixCache(groups, 4),
    )
    return Scheduler(Limits(max_tokens, max_sequences), state)


def submit(host, uid, prompt, max_tokens=1, **options):
    request = Request(uid, list(prompt), max_tokens=max_tokens, arrival=uid, **options)
    host.submit(request)
    return request


def run(host, token=7):
    """One step, read at once: {uid: (first token computed, tokens computed)}."""
    step = host.begin_step()
    host.dispatched(step)
    for chunk in step.chunks:
        if chunk.emit:
            host.receive(chunk.request, token)
    host.state.check()
    return {chunk.request.uid: (chunk.start, chunk.count) for chunk in step.chunks}


def test_the_last_token_is_computed_in_any_case():
    host = scheduler()
    submit(host, 1, range(8))
    assert run(host) == {1: (0, 8)}
    again = submit(host, 2, range(8))
    assert run(host) == {2: (4, 4)}
    assert again.cached_tokens == 4
    submit(host, 3, range(9))
    assert run(host) == {3: (8, 1)}
    cache = host.state.prefix_cache
    assert (cache.queried_tokens, cache.hit_tokens) == (25, 12)


def test_a_block_is_shared_once_the_step_that_fills_it_is_dispatched():
    host = scheduler(max_tokens=10)
    submit(host, 1, range(20))
    submit(host, 2, range(9))
    assert run(host) == {1: (0, 5), 2: (0, 5)}
    submit(host, 3, range(9))
    assert run(host)[3] == (4, 1)


def test_what_is_said_is_found_too():
    host = scheduler()
    first = submit(host, 1, range(6), max_tokens=8)
    while host.unfinished:
        run(host)
    submit(host, 2, [*first.prompt_ids, *first.output_ids, 1])
    assert run(host) == {2: (12, 3)}


def test_tokens_that_the_host_has_not_read_name_no_block():
    host = scheduler()
    request = submit(host, 1, range(6), max_tokens=20)
    steps = [host.begin_step()]
    host.dispatched(steps[0])
    for _ in range(4):
        steps.append(host.begin_step())
        host.dispatched(steps[-1])
    assert request.computed == 10
    assert len(host.state.prefix_cache.named(0)) == 1
    for _ in range(5):
        host.receive(request, 7)
    host.finish(request)
    assert len(host.state.prefix_cache.named(0)) == 2
    host.state.check()


def test_a_preempted_request_comes_back_through_its_own_blocks():
    host = scheduler(blocks=8, max_sequences=2)
    submit(host, 1, range(8), max_tokens=16)
    second = submit(host, 2, range(100, 108), max_tokens=16)
    begun = []
    while host.unfinished:
        computed = run(host)
        if second.preemptions and 2 in computed:
            begun.append(computed[2])
    assert second.preemptions == host.preemptions == 1
    assert begun[0][0] >= 8
    assert second.output_ids == [7] * 16


def test_who_must_see_every_token_computes_every_token_and_shares_it():
    host = scheduler()
    for uid in (1, 2):
        assert submit(host, uid, range(12), reads_cache=False).status is Status.WAITING
        assert run(host) == {uid: (0, 12)}
    submit(host, 3, range(12))
    assert run(host) == {3: (8, 4)}
    assert host.state.prefix_cache.queried_tokens == 12


def test_salts_keep_users_apart():
    host = scheduler()
    for uid, salt, start in ((1, "a", 0), (2, "b", 0), (3, None, 0), (4, "a", 8), (5, None, 8)):
        submit(host, uid, range(10), cache_salt=salt)
        assert run(host) == {uid: (start, 10 - start)}


def test_shared_blocks_let_more_requests_run_and_cancelling_one_leaves_them():
    host = scheduler(max_tokens=32, blocks=10)
    first = submit(host, 1, range(24), max_tokens=4)
    run(host)
    second = submit(host, 2, range(26), max_tokens=4)
    assert run(host) == {1: (24, 1), 2: (24, 2)}
    assert host.state.free_blocks == (2,)
    host.finish(first)
    assert host.state.free_blocks == (3,)
    host.finish(second)
    host.state.check()
    assert host.state.free_blocks == (10,)
