"""Runs pytest on a copy of the project, each time in a process forked from one that has loaded the frameworks.

Importing JAX, PyTorch, Triton and pytest takes longer than most tests do; the code under test is imported anew.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import py_compile
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

OURS = ("op_arguments", "cpu_golden", "tpu_kernels", "gpu_reference", "parity", "tests")
"""The packages that are never in the process that forks."""

KILLED_BY_LIMIT = -1
"""The exit status of a run that had more time than it was given, or waited for ever."""

BROKEN = 70
"""The exit status of a run in which something else than a test failed."""

MEMORY = 10 * 2**30
"""Bytes of data that one run may have."""


def copy_project(project: Path, tree: Path) -> None:
    """The files of a project that git does not ignore, as they are now, compiled; what was there before goes."""
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(command, cwd=project, check=True, capture_output=True, text=True).stdout
    shutil.rmtree(tree, ignore_errors=True)
    for name in filter(None, listed.split("\0")):
        if (project / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(project / name, tree / name)
            if name.endswith(".py") and name.split("/")[0] in OURS:
                _compile(tree / name)


def _compile(path: Path) -> None:
    """What Python imports for this file, whatever the file's time: a fault may come and go within a second."""
    py_compile.compile(str(path), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


ORIGINAL = ".original"
"""What is appended to the name of a file that has a fault in it: there it is as it was."""


@contextmanager
def with_source(path: Path, source: str) -> Iterator[None]:
    """A file with other contents, for the time being; `restore` brings back what a killed process could not."""
    path.replace(path.with_name(path.name + ORIGINAL))
    try:
        path.write_text(source)
        _compile(path)
        yield
    finally:
        restore(path.parent)


def restore(folder: Path) -> None:
    """Every file below a folder as it was before `with_source`."""
    for original in folder.rglob(f"*{ORIGINAL}"):
        original.replace(path := original.with_name(original.name.removesuffix(ORIGINAL)))
        _compile(path)


def load_frameworks(tree: Path) -> None:
    """Import what the project imports, but for the project: what it loads is asked of a process of its own."""
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    from parity.backends import prepare_environment

    prepare_environment()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    os.environ["PYTHONPATH"] = environment["PYTHONPATH"]  # processes that tests start find the copy as well
    names = [
        path.relative_to(tree).with_suffix("").as_posix().replace("/", ".")
        for package in OURS
        for path in sorted((tree / package).rglob("*.py"))
        if not path.is_relative_to(tree / "tests/meta/compilers/fixtures")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    try: importlib.import_module(name.removesuffix('.__init__'))\n"
        "    except BaseException: pass\n"
        "print('\\n'.join(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    for name in loaded.stdout.split("\n"):
        if name.split(".")[0] not in (*OURS, "__main__", "conftest", ""):
            try:
                importlib.import_module(name)
            except Exception:  # loaded under another name, by what will load it again
                continue
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()


def pytest_in_fork(
    tree: Path, arguments: Sequence[str], plugin: Callable[[], Any], answer: Path, log: Path, cpu_s: float
) -> tuple[int, dict[str, Any]]:
    """Runs pytest with arguments and a plugin of ours; returns its exit status and the plugin's `answer`.

    answer, log: the files that the plugin's answer and what pytest prints are written to. cpu_s: processor seconds it
    may take. The status of a run that a signal ended is the negative of that.
    """
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        status = BROKEN
        try:
            os.setsid()
            with log.open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 5))
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            made = plugin()
            asked = [*arguments, "-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
            try:
                status = int(pytest.main(asked, plugins=[made]))
            except Exception:  # a plugin of the project that cannot be imported with its fault
                status = int(pytest.ExitCode.INTERNAL_ERROR)
                traceback.print_exc()
            if foreign := [name for name, module in sys.modules.items() if _is_foreign(name, module, tree)]:
                raise ImportError(f"the copy lacks {', '.join(foreign)}")
            answer.write_text(json.dumps(made.answer()))
        except BaseException:
            status = BROKEN
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status = wait(child, wall_s=10 * cpu_s)
    if status == BROKEN:
        raise RuntimeError(f"pytest could not be run on the copy: see {log}")
    said: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
    return status, said


def _is_foreign(name: str, module: Any, tree: Path) -> bool:
    path = getattr(module, "__file__", None)
    return name.split(".")[0] in OURS and path is not None and not Path(path).is_relative_to(tree)


def wait(child: int, wall_s: float) -> int:
    """The exit status of a process that leads a group of its own, all of which is gone then."""
    deadline = time.monotonic() + wall_s
    done, status = 0, 0
    try:
        while not done and time.monotonic() < deadline:
            time.sleep(0.02)
            done, status = os.waitpid(child, os.WNOHANG)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
        return KILLED_BY_LIMIT
    code = os.waitstatus_to_exitcode(status)
    return KILLED_BY_LIMIT if code in (-signal.SIGXCPU, -signal.SIGPROF, -signal.SIGKILL) else code


def cpu_seconds() -> float:
    """What this process and those that it has waited for have taken of a processor."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def package_sources(tree: Path, packages: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """The source of every file of each group of packages, by its path in the tree."""
    found = {}
    for group, names in packages.items():
        files = (path for name in names for path in tree.glob(name if name.endswith(".py") else f"{name}/**/*.py"))
        found[group] = {path.relative_to(tree).as_posix(): path.read_text() for path in sorted(files)}
    return found
