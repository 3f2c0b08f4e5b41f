"""Processes that lower forwards side by side: in one process Python's lock allows one at a time.

They are started by name, not forked, which a process with a GPU's context must not be, and not by
`multiprocessing`, which runs the user's script anew. What they cannot do, the caller does itself.
"""

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from jaxgen.engine.lowering_order import Answer, Order, Request
from jaxgen.engine.model import Model
from jaxgen.engine.program_store import ProgramStore
from pallas_kernels.dispatch import chosen

_FEWEST = 4
"""Programs from which it pays: a process takes 3 s to import JAX, a program 2 to 5 s to lower."""

_MOST = 16
"""Processes, of about 400 MB each."""


class LoweringFailed(RuntimeError):
    """A process that should have lowered a program ended, or would not start."""


_early: list[subprocess.Popen[bytes]] = []
"""Processes that were started before there was a pool to own them."""


def useful_processes(model: Model, programs: int) -> int:
    """How many processes to lower so many forwards in; 0 where this one does as well.

    On GPUs it is the kernels that take so long. A policy that is not ours may not be there for
    another process to import, and chosen implementations are only known to this one.
    """
    on_gpu = model.mesh.devices.flat[0].platform == "gpu"
    if not on_gpu or chosen() or not ProgramStore.serves(model) or programs < _FEWEST:
        return 0
    return min(programs, _cores() - 1, _MOST)


def start_early() -> None:
    """Starts processes for a pool to come: they import JAX while weights are loaded.

    For who will compile every step of one engine. `end_early` ends those that no pool took.
    """
    if jax.default_backend() == "gpu" and not _early:
        _early.extend(start_process() for _ in range(min(_cores() - 1, _MOST)))
        atexit.register(end_early)


def end_early() -> None:
    """Ends the processes of `start_early` that nobody needed."""
    while _early:
        _end(_early.pop())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class LoweringPool:
    """So many processes, each with a thread that waits for it. Use as a context manager.

    processes: those that were started.
    """

    def __init__(self, model: Model, processes: int) -> None:
        self._order = pickle.dumps(Order.of(model))
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="lowering")
        self._own = threading.local()
        self._lock = threading.Lock()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def __enter__(self) -> "LoweringPool":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes, whatever they are at."""
        with self._lock:
            self._closed = True
            for process in self.processes:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self.processes:
            _end(process)

    def submit(self, request: Request) -> Future[Answer]:
        """The answer to be; LoweringFailed where there is none."""
        return self._threads.submit(self._ask, request)

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
            raise LoweringFailed(f"{request.key}: {error or type(error).__name__}") from error

    def _process(self) -> subprocess.Popen[bytes]:
        """This thread's process; another one where the last failed."""
        process: subprocess.Popen[bytes] | None = getattr(self._own, "process", None)
        if process is None:
            with self._lock:
                if self._closed:
                    raise OSError("no longer wanted")
                process = self._own.process = _early.pop() if _early else start_process()
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
    environment.pop("XLA_FLAGS", None)  # they are the compiler's, and may fit an accelerator only
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxgen.engine.lowering_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # a terminal's Ctrl-C is for the process that asks
    )
