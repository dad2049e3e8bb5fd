"""A process that has loaded JAX, torch and pytest and forks for each command: to import them takes longer than most.

Run as a script, it reads requests as JSON lines and answers each with the exit status of the child and the processor
seconds that it took. Nothing of ours, no plugin of pytest and no Triton is loaded before the fork.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

LOADED = (
    "numpy", "scipy.special", "ml_dtypes", "fsspec", "filelock", "jinja2", "rich.table", "rich.console", "pytest",
    "jax", "jax.numpy", "jax.experimental.pallas", "jax.experimental.xla_metadata", "jax.interpreters.mlir",
    "torch",
)  # fmt: skip


def serve() -> dict | None:
    """In a child: what it was asked for. In the process itself: None, when nothing more will be asked."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in LOADED:
        with contextlib.suppress(ImportError):  # a host that lacks JAX or torch
            importlib.import_module(name)
    gc.freeze()  # no page of it is copied because a collection marks it
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(answers.fileno())
            return json.loads(line)
        _, status, used = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, file=answers, flush=True)
    return None


def become(module: str, folder: str, arguments: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """Be `python -m module arguments` in a folder, which writes into two files."""
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in the foreground
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = str(Path.cwd())
    sys.argv[1:] = arguments
    from parity.runners import supervision

    supervision.FRAMEWORKS = ()  # loaded here, they have run nothing: this process may be forked once more
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def ending(command: Callable[[], None]) -> None:
    """Run a command, and end as an interpreter does but for what it takes apart: half a second of what is loaded."""
    status = [1]  # of an exception, which the interpreter prints

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0])

    atexit.register(leave)  # called after what the command registers, when its threads have ended
    try:
        command()
        status[0] = 0
    except SystemExit as ended:
        status[0] = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise


if __name__ == "__main__":
    asked = serve()
    if asked is not None:
        ending(partial(become, **asked))
