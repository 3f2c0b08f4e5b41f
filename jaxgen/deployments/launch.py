"""`jaxgen.serve`: starts `jaxgen serve` in processes of their own, which outlive this one.

Everything that the server does is the command's business, its replicas too; here options are put
into its words, and a record says where it is.
"""

import io
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any

import httpx

from jaxgen.commands.parser import build_parser
from jaxgen.deployments.client import Client, is_served
from jaxgen.deployments.processes import alive, start, stop
from jaxgen.deployments.records import (
    Deployment,
    DeploymentNotFound,
    log_file,
    read_record,
    write_record,
)
from jaxgen_checkpoints.errors import RefusedInput

DEFAULT_PORT = 51080
"""MII's port of its HTTP gateway."""

_MII_NAMES = {
    "max_length": "max_model_len",
    "restful_api_port": "port",
    "restful_api_host": "host",
}
_GRPC = ("port_number", "zmq_port_number", "torch_dist_port", "hostfile", "restful_processes")
_TLS = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")


def serve(
    model: str | Path,
    deployment_name: str | None = None,
    *,
    tensor_parallel: int = 1,
    replica_num: int = 1,
    start_seconds: float = 1800.0,
    **options: Any,  # noqa: ANN401 (those of `jaxgen serve`, checked by name)
) -> Client:
    """Serves a model until `terminate_server`, and gives its client; this process may end.

    deployment_name: default "<model>-mii-deployment". replica_num: processes behind one port
    (`port`, default 51080; 0 takes a free one) and, with accelerators, each on tensor_parallel
    devices of its own. options: of `jaxgen serve`, with underscores, or by MII's names. Returns
    when all replicas are ready. RefusedInput, with the server's own words, if one does not start,
    and for the name of a deployment that runs.
    """
    name = deployment_name or f"{Path(model).name}-mii-deployment"
    given = _renamed(options)
    port = int(given.pop("port", DEFAULT_PORT)) or _free_port()
    host = given.pop("host", "127.0.0.1")
    arguments = [
        *("serve", str(model), "--served-model-name", name),
        *("--host", host, "--port", str(port)),
        *("--tensor-parallel-size", str(tensor_parallel)),
        *("--data-parallel-size", str(replica_num)),
        *_flags(given),
    ]
    _check(arguments)
    _refuse_known(name)
    log = log_file(name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as started:
        pid = start(arguments, os.environ, log)
        started.callback(stop, pid)
        reached = "127.0.0.1" if host == "0.0.0.0" else host
        deployment = Deployment(name, str(model), f"http://{reached}:{port}", pid)
        _wait_until_ready(deployment, log, start_seconds)
        write_record(deployment)
        started.pop_all()
    keys = given.get("api_key") or ()
    return Client(deployment, api_key=keys if isinstance(keys, str) else next(iter(keys), None))


def _renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in _GRPC:
        if name in options:
            raise RefusedInput(
                f"{name} concerns MII's gRPC servers, of which there are none here: the client "
                "speaks HTTP; leave it out"
            )
    for name in _TLS:
        if options.get(name) is not None:
            raise RefusedInput(f"{name}: a deployment's client speaks plain HTTP; use jaxgen serve")
    if options.get("enable_restful_api", True) is not True:
        raise RefusedInput("enable_restful_api cannot be false: the client speaks HTTP")
    return {
        _MII_NAMES.get(name, name): value
        for name, value in options.items()
        if name != "enable_restful_api" and value is not None
    }


def _flags(options: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            words.append("--no-" + name.replace("_", "-"))
        elif isinstance(value, Mapping):
            words += [flag, json.dumps(value)]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    return words


def _check(arguments: list[str]) -> None:
    """RefusedInput for what the command would refuse, before a process is started."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            _, unknown = build_parser().parse_known_args(arguments)
    except SystemExit:
        raise RefusedInput(said.getvalue().strip().removeprefix("error: ")) from None
    if unknown:
        raise RefusedInput(f"jaxgen serve has no option {unknown[0]}; see jaxgen serve --help")


def _refuse_known(name: str) -> None:
    """A second server of a name would leave the first without anybody who can end it."""
    try:
        known = read_record(name)
    except DeploymentNotFound:
        return
    if is_served(name, known.url):
        raise RefusedInput(
            f"deployment {name!r} runs already, at {known.url}: jaxgen.client({name!r}) is its "
            "client, whose terminate_server() ends it"
        )


def _wait_until_ready(deployment: Deployment, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not alive(deployment.pid):
            raise RefusedInput(f"the server ended before it was ready: {_last_words(log)}")
        try:
            if httpx.get(f"{deployment.url}/ready", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass  # it has not bound its port yet
        time.sleep(0.1)
    raise RefusedInput(f"the server was not ready after {seconds:.0f} s; its log is {log}")


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["it wrote nothing"])[-1]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
