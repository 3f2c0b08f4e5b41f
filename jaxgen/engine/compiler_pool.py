"""Processes that compile programs side by side: in one process Python's lock lets one trace at a
time, and Mosaic and XLA compile one kernel at a time.

They are started by name, not forked, which a process with a GPU's context must not be, and not by
`multiprocessing`, which runs the user's script anew. What they cannot do, the caller does itself.
"""

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import jax

from jaxgen.engine.compiler_order import Answer, Order, Request
from jaxgen.engine.host_memory import host_bytes_left
from jaxgen.engine.model import Model
from jaxgen.engine.program_store import ProgramStore
from pallas_kernels.dispatch import chosen

logger = logging.getLogger(__name__)

_FEWEST = 4
"""Programs from which it pays: a process takes 3 s to import JAX, a forward 5 to 15 to compile."""

_MOST = 16
_BYTES = 1_200_000_000
"""Of a process's memory when it has compiled a few forwards; together they may have half of what
the host has left.
"""


class CompilerFailed(RuntimeError):
    """A process that should have compiled a program ended, or would not start."""


def useful_processes(model: Model, programs: int) -> int:
    """How many processes to compile so many programs in; 0 where this one does as well.

    On GPUs it is the kernels that take so long. A policy that is not ours may not be there for
    another process to import, and chosen implementations are only known to this one.
    """
    on_gpu = model.mesh.devices.flat[0].platform == "gpu"
    if not on_gpu or chosen() or not ProgramStore.serves(model) or programs < _FEWEST:
        return 0
    processes = min(programs, _cores() - 1, _MOST, host_bytes_left() // 2 // _BYTES)
    return processes if processes > 1 else 0


def useful_pool(model: Model, programs: int) -> "CompilerPool | None":
    """A pool for so many programs; None where this process does as well, or has to."""
    processes = useful_processes(model, programs)
    if not processes:
        return None
    try:
        return CompilerPool(model, processes)
    except jax.errors.JaxRuntimeError as error:
        logger.warning(
            "compiling in one process: the devices do not describe themselves: %s", error
        )
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class CompilerPool:
    """So many processes, each with a thread that waits for it; close it, or use it as a context
    manager. They are started when there is something to compile.

    processes: those that were started. closed: nothing more will come.
    """

    def __init__(self, model: Model, processes: int) -> None:
        """JaxRuntimeError where the model's devices do not describe themselves."""
        self._order = pickle.dumps(Order.of(model))
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="compiling")
        self._own = threading.local()
        self._lock = threading.Lock()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes, whatever they are at."""
        with self._lock:
            self.closed = True
            for process in self.processes:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self.processes:
            _end(process)

    def submit(self, request: Request) -> Future[Answer]:
        """The answer to be; CompilerFailed where there is none, as in a closed pool."""
        try:
            return self._threads.submit(self._ask, request)
        except RuntimeError as error:  # of a pool of threads that has been shut down
            none: Future[Answer] = Future()
            none.set_exception(CompilerFailed(f"{request.key}: {error}"))
            return none

    def _ask(self, request: Request) -> Answer:
        try:
            process = self._process()
            assert process.stdin is not None
            assert process.stdout is not None
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            self._own.process = None
            raise CompilerFailed(f"{request.key}: {error or type(error).__name__}") from error

    def _process(self) -> subprocess.Popen[bytes]:
        """This thread's process; another one where the last failed."""
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is None:
            with self._lock:
                if self.closed:
                    raise OSError("no longer wanted")
                process = self._own.process = start_process()
                self.processes.append(process)
            assert process.stdin is not None
            process.stdin.write(self._order)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # what it was never asked
            pipe.close()


def start_process() -> subprocess.Popen[bytes]:
    """A process that finds the modules which this one finds, and no accelerator."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxgen.engine.compiler_worker", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # a terminal's Ctrl-C is for the process that asks
    )
