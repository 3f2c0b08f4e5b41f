"""A process that compiles programs for another one: `python -m jaxgen.engine.compiler_worker PID`.

It reads an Order and then Requests from stdin, and answers each on stdout, until stdin ends, or the
process PID, which asks. It has no accelerator, but its compiler, and the description of the devices
that programs are for.
"""

import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any, BinaryIO

import jax

from jaxgen.engine.compiler_order import Answer, Order, Request
from jaxgen.engine.executables import pack
from jaxgen.engine.programs import Programs
from jaxgen_checkpoints.mesh_layout import Device
from pallas_kernels.dispatch import lowering_for

_LOOK_SECONDS = 0.5


def main() -> None:
    """Serves until the process that asks closes its end, or is gone."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # an answer that nobody waits for ends it
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may get between the answers
    messages = _messages(sys.stdin.buffer)
    order: Order | None = next(messages, None)
    if order is None:
        return
    for name, value in order.settings.items():
        jax.config.update(name, value)
    jax.config.update(
        "jax_enable_compilation_cache", False
    )  # it cannot read what it keeps of these
    devices = order.devices()
    model = order.model(devices)
    _stand_for(devices[0])
    with lowering_for(devices[0].platform):
        for request in messages:
            pickle.dump(_answer(Programs(model, request.sizes), request), answers)
            answers.flush()


def _end_with(parent: int) -> None:
    """Ends this process, in the middle of a program too, when that one is gone."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)


def _answer(programs: Programs, request: Request) -> Answer:
    """The program, and what was said while it was traced, which the user has to hear once."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        data = pack(programs.lower(request.key).compile())
    return Answer(data, tuple((str(each.message), each.category) for each in said))


def _stand_for(device: Device) -> None:
    """Kernels ask JAX for its device: here the answer is the one that they will run on."""
    if device.platform != "cpu":
        name = device.platform
        jax.__dict__.update(default_backend=lambda: name, local_devices=lambda: [device])


def _messages(stream: BinaryIO) -> Iterator[Any]:
    while True:
        try:
            yield pickle.load(stream)
        except EOFError:
            return


if __name__ == "__main__":
    main()
