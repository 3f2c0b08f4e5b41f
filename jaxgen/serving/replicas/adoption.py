"""How a replica gets what is its own: its options through a pipe, its devices by environment.

The pipe also tells it of its front's end: then it ends too, however that came about.
"""

import argparse
import json
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

from jaxgen_checkpoints.errors import ConfigError

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS")

_OF_THE_FRONT = (
    *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "root_path"),
    *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
    *("data_parallel_size", "replica"),
)


def replica_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `jaxgen serve` for its replicas; the front alone meets the clients."""
    kept = {name: value for name, value in vars(args).items() if name not in _OF_THE_FRONT}
    return {**kept, **dict.fromkeys(_OF_THE_FRONT), "replica": False, "access_log": False}


def adopted(pipe: int) -> argparse.Namespace:
    """The options that a front wrote into the pipe; when that ends, this process is told to end."""
    with os.fdopen(os.dup(pipe), "rb", buffering=0) as raw:  # no lock that a thread would hold
        line = raw.readline()
    if not line:
        raise ConfigError("--replica is for the processes that --data-parallel-size starts")
    args = argparse.Namespace(**json.loads(line))

    def wait() -> None:
        while os.read(pipe, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="jaxgen-front", daemon=True).start()
    return args


def device_environments(
    replicas: int, devices: int, given: Mapping[str, str]
) -> list[dict[str, str]]:
    """For each replica the variables by which it sees `devices` accelerators of its own.

    given: this process' environment; devices that are named there are shared out, and ConfigError
    says so if they are too few. A variable that is empty there hides all devices, and does so here.
    """
    environments: list[dict[str, str]] = [{} for _ in range(replicas)]
    for variable in DEVICE_VARIABLES:
        if not given.get(variable, "all").strip():
            continue
        named = [name.strip() for name in given.get(variable, "").split(",") if name.strip()]
        needed = replicas * devices
        if named and len(named) < needed:
            raise ConfigError(
                f"{replicas} replicas on {devices} devices each need {needed}, and {variable} "
                f"names {len(named)}"
            )
        names = named or [str(index) for index in range(needed)]
        for place, environment in enumerate(environments):
            mine = names[place * devices : (place + 1) * devices]
            environment[variable] = ",".join(mine)
    return environments
