"""/metrics has vLLM's names and buckets, behind a prefix, and tells what really happened."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxgen.bench.host import stub_engine
from jaxgen.engine.loop import GenerationLoop
from jaxgen.sampling import SamplingParams
from jaxgen.serving.async_engine import AsyncEngine
from jaxgen.serving.metrics import (
    BETWEEN_TOKENS_BUCKETS,
    FIRST_TOKEN_BUCKETS,
    Metrics,
    token_buckets,
)

NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens"),
    *("generation_tokens", "request_success", "prefix_cache_queries", "prefix_cache_hits"),
    *("num_preemptions", "admission_rejections", "prompt_tokens_cached", "late_compiles"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_params_n"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_num_preemptions"),
    *("request_generation_tokens", "request_params_max_tokens"),
    *("request_prefill_kv_computed_tokens", "request_max_num_generation_tokens"),
    *("num_requests_waiting_by_reason", "prompt_tokens_by_source", "corrupted_requests"),
    *("iteration_tokens_total", "cache_config_info", "padding_tokens"),
    *("compiled_steps", "compile_seconds", "engine_sleep_state"),
)


def families(client):
    return {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}


def value(family, name, **labels):
    """The one sample of that name with these labels."""
    (sample,) = [s for s in family.samples if s.name == name and labels.items() <= s.labels.items()]
    return sample.value


@pytest.mark.parametrize("prefix", ["jaxgen", "vllm"])
def test_names_and_labels(ask, prefix):
    told = families(ask(metrics_prefix=prefix, served_model_names=("m",)))
    for name in NAMES:
        family = told[f"{prefix}:{name}"]
        labels = [sample.labels for sample in family.samples]
        assert all(label["model_name"] == "m" for label in labels)
        assert all(label["engine"] == "0" for label in labels)


def test_buckets(ask):
    told = families(ask())
    for name, buckets in {
        "time_to_first_token_seconds": FIRST_TOKEN_BUCKETS,
        "inter_token_latency_seconds": BETWEEN_TOKENS_BUCKETS,
        "request_prompt_tokens": token_buckets(256),
        "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    }.items():
        samples = told[f"jaxgen:{name}"].samples
        limits = [float(s.labels["le"]) for s in samples if s.name.endswith("_bucket")]
        assert limits == [*map(float, buckets), float("inf")]
    assert FIRST_TOKEN_BUCKETS[0] == 0.001
    assert FIRST_TOKEN_BUCKETS[-1] == 2560
    assert token_buckets(256) == (1, 2, 5, 10, 20, 50, 100, 200)


def test_what_happened_is_counted(ask):
    client = ask(["a", "b", "c"], seconds=0.002)
    client.post("/v1/completions", json={"prompt": ["hi", "ho"], "max_tokens": 9})
    client.get("/v1/no/such/route")
    told = families(client)
    ended = told["jaxgen:request_success"]
    for reason in ("length", "abort", "error"):  # there from the beginning, for rates
        assert value(ended, "jaxgen:request_success_total", finished_reason=reason) == 0
    assert value(ended, "jaxgen:request_success_total", finished_reason="stop") == 2
    tokens = told["jaxgen:request_generation_tokens"]
    assert value(tokens, "jaxgen:request_generation_tokens_sum") == 6
    between = told["jaxgen:inter_token_latency_seconds"]
    assert value(between, "jaxgen:inter_token_latency_seconds_count") == 4
    http = told["http_requests"]
    assert value(http, "http_requests_total", handler="/v1/completions", status="2xx") == 1
    assert value(http, "http_requests_total", handler="none", status="4xx") == 1


def test_what_waits_by_reason(ask):
    client = ask()
    engine = client.app.state.serving.engine
    stats = engine.stats
    engine.stats = lambda: replace(stats(), waiting=5)
    engine.waiting_deferred = 2
    family = families(client)["jaxgen:num_requests_waiting_by_reason"]
    name = "jaxgen:num_requests_waiting_by_reason"
    assert value(family, name, reason="capacity") == 3
    assert value(family, name, reason="deferred") == 2


def test_steps_of_an_engine_are_told():
    async def generate(engine):
        await engine.start()
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        async for _ in engine.generate("one", list(range(20)), params):
            pass
        await engine.stop()

    engine = AsyncEngine(GenerationLoop(stub_engine(8, 64, 0)), name="m")
    metrics = Metrics(engine, "m", "jaxgen")
    asyncio.run(generate(engine))
    told = {f.name: f for f in text_string_to_metric_families(metrics.text().decode())}
    steps, name = told["jaxgen:iteration_tokens_total"], "jaxgen:iteration_tokens_total"
    # A prompt of 20 and what follows it in a step of 32, then two decodes of 1.
    assert [value(steps, f"{name}_bucket", le=le) for le in ("1.0", "16.0", "32.0")] == [2, 2, 3]
    assert value(steps, f"{name}_sum") == 23
    assert value(told["jaxgen:padding_tokens"], "jaxgen:padding_tokens_total") == 12
    sources, name = told["jaxgen:prompt_tokens_by_source"], "jaxgen:prompt_tokens_by_source_total"
    assert value(sources, name, source="local_compute") == 20
    assert value(sources, name, source="local_cache_hit") == 0
    (config,) = told["jaxgen:cache_config_info"].samples
    assert config.value == 1
    assert config.labels["block_size"] == "64"
    assert config.labels["num_gpu_blocks"] == str(engine.stats().kv_total_blocks)
    assert config.labels["enable_prefix_caching"] == "True"
    blocks, context = engine.stats().kv_total_blocks, engine.max_context
    assert int(config.labels["kv_cache_size_tokens"]) == blocks * 64
    assert float(config.labels["kv_cache_max_concurrency"]) == round(blocks * 64 / context, 2)
