"""The real TPU compiler on a host without a TPU: `libtpu` compiles JAX functions for any generation.

Only shapes and dtypes go in, no data. libtpu reads its environment when it loads and a process can load it once,
so every batch is compiled in a process of its own; a compiler that crashes or hangs costs one case, not the batch.
"""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""The smallest topology libtpu knows of each chip."""

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no cloud metadata server to ask
    "JAX_PLATFORMS": "cpu",  # the host's own backend
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other processes may hold libtpu's lock file
}
_ERROR_CHARACTERS = 4000


@dataclass(frozen=True)
class Abstract:
    """An array of which only the shape and the dtype (by name) are known."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Compilation:
    """A function to compile for one core of a chip.

    function is `"module:function"`, chip a key of `TOPOLOGIES`. `Abstract` arguments become traced arrays; all other
    keywords are passed as they are.
    """

    function: str
    chip: str
    arguments: tuple[Abstract, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """What the compiler said. Where ok is False, error is its own text and the byte counts are 0."""

    ok: bool
    seconds: float = 0.0
    error: str = ""
    code_bytes: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0


def compile_for_tpu(cases: Sequence[Compilation], timeout: float = 300.0) -> list[Compiled]:
    """Compile each case, in order, in as few fresh processes as possible; one result per case.

    A process that dies or runs longer than `timeout` seconds fails the case it was at; the rest go on in a new one.
    Raises ValueError for an unknown chip.
    """
    for case in cases:
        if case.chip not in TOPOLOGIES:
            raise ValueError(f"chip must be one of {', '.join(TOPOLOGIES)}, got {case.chip!r}")
    results: list[Compiled] = []
    while len(results) < len(cases):
        done, failure = _compile_in_subprocess(cases[len(results) :], timeout)
        results += done
        if len(results) < len(cases):
            results.append(Compiled(ok=False, error=failure))
    return results


def _compile_in_subprocess(cases: Sequence[Compilation], timeout: float) -> tuple[list[Compiled], str]:
    """The results of one process, and why it stopped early if it did."""
    with tempfile.TemporaryDirectory() as folder:
        requests, answers = Path(folder, "requests"), Path(folder, "answers")
        requests.write_bytes(pickle.dumps(list(cases)))
        answers.touch()
        program = f"from {__name__} import _serve; import sys; _serve(sys.argv[1], sys.argv[2])"
        environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            process = subprocess.run(
                [sys.executable, "-c", program, str(requests), str(answers)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=timeout,
                check=False,
            )
            failure = f"compiler process ended with status {process.returncode}: {process.stderr[-_ERROR_CHARACTERS:]}"
        except subprocess.TimeoutExpired:
            failure = f"compiler process ran longer than {timeout:g} s"
        return _read(answers), failure


def _read(answers: Path) -> list[Compiled]:
    """The complete answers in a file whose last one may be torn."""
    results: list[Compiled] = []
    with answers.open("rb") as stream:
        while True:
            try:
                results.append(pickle.load(stream))
            except (EOFError, pickle.UnpicklingError):
                return results


def _serve(requests: str, answers: str) -> None:
    """The subprocess: compile what the parent wrote, answer case by case."""
    with Path(answers).open("ab") as stream:
        for case in pickle.loads(Path(requests).read_bytes()):
            start = time.perf_counter()
            try:
                answer = _compile(case, start)
            except Exception as error:  # whatever the compiler raises is the answer
                text = f"{type(error).__name__}: {error}"
                answer = Compiled(ok=False, seconds=time.perf_counter() - start, error=text[:_ERROR_CHARACTERS])
            stream.write(pickle.dumps(answer))
            stream.flush()


def _compile(case: Compilation, start: float) -> Compiled:
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[case.chip])
    mesh = jax.sharding.Mesh(topology.devices[:1], ("core",))
    on_core = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def traced(value: Abstract) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(value.shape, jax.numpy.dtype(value.dtype), sharding=on_core)

    module, _, name = case.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    arrays = {key: traced(value) for key, value in case.keywords.items() if isinstance(value, Abstract)}
    static = {key: value for key, value in case.keywords.items() if key not in arrays}
    # The abstract mesh makes questions about the device (get_tpu_info) answer for the target, not for this host.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(lambda *args, **kwargs: function(*args, **kwargs, **static))
        compiled = program.lower(*map(traced, case.arguments), **arrays).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("libtpu gave no memory analysis")
    return Compiled(
        ok=True,
        seconds=time.perf_counter() - start,
        code_bytes=memory.generated_code_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )
