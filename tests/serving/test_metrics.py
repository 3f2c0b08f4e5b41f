"""/metrics has vLLM's names and buckets, behind a prefix, and tells what really happened."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxgen.serving.metrics import BETWEEN_TOKENS_BUCKETS, FIRST_TOKEN_BUCKETS, token_buckets

NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens"),
    *("generation_tokens", "request_success", "prefix_cache_queries", "prefix_cache_hits"),
    *("num_preemptions", "admission_rejections", "prompt_tokens_cached", "late_compiles"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_params_n"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_num_preemptions"),
    *("request_generation_tokens", "request_params_max_tokens"),
    "request_prefill_kv_computed_tokens",
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
    assert value(ended, "jaxgen:request_success_total", finished_reason="stop") == 2
    tokens = told["jaxgen:request_generation_tokens"]
    assert value(tokens, "jaxgen:request_generation_tokens_sum") == 6
    between = told["jaxgen:inter_token_latency_seconds"]
    assert value(between, "jaxgen:inter_token_latency_seconds_count") == 4
    http = told["http_requests"]
    assert value(http, "http_requests_total", handler="/v1/completions", status="2xx") == 1
    assert value(http, "http_requests_total", handler="none", status="4xx") == 1
