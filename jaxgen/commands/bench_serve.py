"""`jaxgen bench serve`: a load on any server with OpenAI's routes; several rates are a sweep."""

import argparse
import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxgen.bench.http_client import HTTPClient
from jaxgen.bench.load import LoadRun, Target, ask_once, first_model, run_load, wait_until_ready
from jaxgen.bench.openai_stream import Backend
from jaxgen.bench.serve_metrics import details, summarize
from jaxgen.bench.workload import BenchRequest, arrivals, other_ids, ramped
from jaxgen.commands.bench_dataset import read_dataset
from jaxgen.commands.bench_serve_options import SAMPLING
from jaxgen.commands.bench_serve_report import as_lines, save
from jaxgen.commands.model_config import read_model_config
from jaxgen.commands.terminal import note
from jaxgen.hub import local_model
from jaxgen.text.loading import load_tokenizer
from jaxgen_checkpoints.errors import RefusedInput

__all__ = ["as_lines", "exit_code", "serve"]

_ERRORS_TOLD = 10
_RAMP = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """vLLM's keys of one run; of several rates {"sweep": [those keys, ...]}."""
    if args.result_filename and len(args.request_rate) > 1:
        raise RefusedInput("--result-filename names one file: give --result-dir for a sweep")
    if (args.result_dir or args.result_filename) and not (args.save_result or args.append_result):
        raise RefusedInput("--result-dir and --result-filename need --save-result")
    _check_ramp(args)
    _allow_sockets()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        results, runs = runner.run(_measure(args))
    if args.plot:
        from jaxgen.commands.bench_picture import draw_load  # matplotlib, where it is asked for

        draw_load(results, runs, args.plot)
    return results[0] if len(results) == 1 else {"sweep": results}


def exit_code(result: dict[str, Any]) -> int:
    """1 if some run got no answer at all."""
    return int(any(run["completed"] == 0 for run in result.get("sweep", [result])))


def _allow_sockets() -> None:
    """As many open files as this user may have: each request under way is one."""
    try:
        import resource
    except ImportError:  # where there is no such limit: Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _check_ramp(args: argparse.Namespace) -> None:
    given = [name for name in _RAMP if getattr(args, name) is not None]
    if given and len(given) < len(_RAMP):
        raise RefusedInput("a ramp needs --ramp-up-strategy, --ramp-up-start-rps and -end-rps")
    if given and args.request_rate != [float("inf")]:
        raise RefusedInput("--ramp-up-strategy takes the place of --request-rate: give one")


def _loop_factory() -> Any:  # noqa: ANN401
    try:
        import uvloop
    except ImportError:  # where it does not exist: Windows
        return None
    return uvloop.new_event_loop


async def _measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[LoadRun]]:
    url = args.base_url or f"http://{_bracketed(args.host)}:{args.port}"
    async with HTTPClient(url, headers=_headers(args), verify=not args.insecure) as client:
        target, turns = await _prepare(args, client)
        results, runs = [], []
        for rate, requests in zip(args.request_rate, turns, strict=True):
            run = await _run(args, target, requests, rate)
            result = {**_described(args, len(requests), rate), **_numbers(args, run)}
            save(args, {**result, **(details(run) if args.save_detailed else {})})
            results.append(result)
            runs.append(run)
    return results, runs


async def _prepare(
    args: argparse.Namespace, client: HTTPClient
) -> tuple[Target, list[list[BenchRequest]]]:
    """Whom to ask for what at each rate, once the server answers."""
    name, model = (args.model, args.model) if args.model else await first_model(client)
    args.model, args.tokenizer = name, args.tokenizer or model
    backend = Backend.CHAT if args.backend == "openai-chat" else Backend.COMPLETIONS
    turns = _turns(args, backend, args.tokenizer)
    target = Target(
        client,
        backend,
        args.endpoint or backend.endpoint,
        args.served_model_name or name,
        _extra(args, backend),
        args.request_id_prefix,
    )
    if args.ready_check_timeout_sec:
        await wait_until_ready(target, turns[0][0], args.ready_check_timeout_sec)
    await asyncio.gather(*(ask_once(target, turns[0][0]) for _ in range(args.num_warmups)))
    return target, turns


async def _run(
    args: argparse.Namespace, target: Target, requests: Sequence[BenchRequest], rate: float
) -> LoadRun:
    ramp = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    wanted = ramped(len(requests), args.ramp_up_strategy, *ramp) if args.ramp_up_strategy else rate
    times = arrivals(len(requests), wanted, args.seed, burstiness=args.burstiness)
    numbered = replace(target, request_id_prefix=f"{target.request_id_prefix}{rate:g}-")
    hidden = True if args.disable_tqdm else None  # None: where nobody watches
    with tqdm(total=len(requests), desc=f"{rate:g} requests/s", disable=hidden) as bar:
        run = await run_load(
            numbered, requests, times, max_concurrency=args.max_concurrency, ended=bar.update
        )
    errors = [outcome.error for outcome in run.outcomes if outcome.error]
    for error in list(dict.fromkeys(errors))[:_ERRORS_TOLD]:
        note(f"{errors.count(error)} of {len(requests)} requests failed: {error}")
    return run


def _numbers(args: argparse.Namespace, run: LoadRun) -> dict[str, Any]:
    return summarize(
        run,
        metrics=args.percentile_metrics,
        percentiles=args.metric_percentiles,
        goodput=dict(args.goodput or ()),
    )


def _described(args: argparse.Namespace, count: int, rate: float) -> dict[str, Any]:
    """What vLLM's result files say of a run, beside its numbers."""
    return {
        "backend": args.backend,
        "endpoint_type": args.backend,
        "label": args.label or args.backend,
        "model_id": args.model,
        "tokenizer_id": args.tokenizer,
        "dataset_name": args.dataset_name,
        "num_prompts": count,
        **dict(args.metadata),
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **({name: getattr(args, name) for name in _RAMP} if args.ramp_up_strategy else {}),
    }


def _headers(args: argparse.Namespace) -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    bearer = {"Authorization": f"Bearer {key}"} if key else {}
    return bearer | dict(args.header)


def _extra(args: argparse.Namespace, backend: Backend) -> dict[str, Any]:
    """Members of every body: what was given, and nothing else."""
    extra = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if args.ignore_eos or args.dataset_name != "custom":
        extra["ignore_eos"] = True
    if args.logprobs is not None:
        if backend is Backend.CHAT:
            raise RefusedInput("--logprobs is of /v1/completions: ask a chat with --extra-body")
        extra["logprobs"] = args.logprobs
    return extra | args.extra_body


def _turns(args: argparse.Namespace, backend: Backend, model: str) -> list[list[BenchRequest]]:
    """The dataset for each rate, so that none finds its prompts in the server's cache.

    A chat takes texts only: drawn ids are spelled out by the tokenizer.
    """
    requests = read_dataset(args, lambda: _vocab_size(model), None)
    if args.dataset_name == "custom":
        return [requests] * len(args.request_rate)
    vocab = _vocab_size(model)
    turns = [other_ids(requests, turn, vocab) for turn in range(len(args.request_rate))]
    if backend is Backend.COMPLETIONS:
        return turns
    tokenizer = load_tokenizer(_folder(model))

    def spelled(request: BenchRequest) -> BenchRequest:
        return replace(request, text=tokenizer.decode(request.prompt_ids, skip_special_tokens=True))

    return [[spelled(request) for request in requests] for requests in turns]


def _vocab_size(model: str) -> int:
    try:
        return int(read_model_config(model)["vocab_size"])
    except (RefusedInput, KeyError):
        return load_tokenizer(_folder(model)).vocab_size


def _folder(model: str) -> Path:
    try:
        return local_model(model, weights=())
    except RefusedInput as error:
        raise RefusedInput(
            f"prompts are drawn from a vocabulary, and {model!r} tells none: give --tokenizer, a "
            f"checkpoint folder, a config.json or a shipped shape ({error})"
        ) from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
