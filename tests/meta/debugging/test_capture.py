"""Captured calls: every bit is saved, in and out of jit, and nothing while off; replayed, or refused where hostile."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from parity import matrix
from parity.cli import main
from parity.debugging import capture
from parity.debugging.replay import BYTES, Bundle, BundleError, case_of, read, replay
from parity.dtypes import numpy_dtype
from parity.inputs import draw
from parity.judging.judge import judge
from parity.op import Given, Groups, Offsets
from parity.trial import Trial
from tests.matrix import OPS
from tests.meta.faults.planting import ROOT

OP = {op.name: op for op in OPS}


def product(lhs, rhs, *, preferred_element_type=None, tiling=(8, 8, 8)):
    return lhs @ rhs


def bundles(folder):
    return {path.name: read(path) for path in sorted(folder.iterdir())}


# --- saving ---


def every_bit(dtype):
    """Every pattern of the 8 or 16 highest bits: of 8 and 16 bits all there are, NaN payloads and subnormals too."""
    width = 8 * numpy_dtype(dtype).itemsize
    if dtype == "bool":
        return np.array([False, True])
    patterns = np.arange(2 ** min(width, 16), dtype=f"u{width // 8}")
    return (patterns << np.array(max(width - 16, 0), patterns.dtype)).view(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", capture.STORED)
def test_a_bundle_has_every_bit_of_every_dtype(dtype, tmp_path):
    x = every_bit(dtype)
    tensors = {"x": x, "empty": np.zeros((0, 3), x.dtype), "scalar": x[1].reshape(())}
    described = {name: {"dtype": dtype, "original_shape": list(t.shape), "slices": []} for name, t in tensors.items()}
    call = {"version": 1, "op": "f", "layer": "", "step": 0, "arguments": {}, "defaults": {}, "outputs": {}}
    capture.write(tmp_path / "b", {**call, "tensors": described}, tensors)
    got = read(tmp_path / "b").tensors
    assert {name: (t.dtype, t.shape, t.tobytes()) for name, t in got.items()} == {
        name: (t.dtype, t.shape, t.tobytes()) for name, t in tensors.items()
    }


def test_off_the_jaxpr_is_that_of_the_function():
    jax = pytest.importorskip("jax")
    wrapped, x = capture.wrap(product, op="gmm"), np.ones((2, 2), np.float32)
    assert str(jax.make_jaxpr(wrapped)(x, x)) == str(jax.make_jaxpr(product)(x, x))


def test_inside_jit_the_wanted_steps_are_saved_with_their_bits(tmp_path):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    wrapped = capture.wrap(product, op="gmm", slices={"rhs": np.s_[:, :2]})
    x = jnp.asarray(every_bit("bfloat16")[:12].reshape(3, 4))
    y = jnp.arange(12, dtype=jnp.bfloat16).reshape(4, 3)

    @jax.jit
    def step_outside(x, y):
        return wrapped(x, y, preferred_element_type=jnp.bfloat16)

    @jax.jit
    def step_inside(x, y, step):
        with capture.at(step=step, layer="in/../side"):
            return jax.grad(lambda x: wrapped(x, y).astype(jnp.float32).sum())(x)

    with capture.to(tmp_path, every=2, steps=range(1, 8)):
        for step in range(10):
            with capture.at(step=step, layer="0"):
                step_outside(x + step, y)
            step_inside(x, y, step)
    found = bundles(tmp_path)
    assert sorted((b.layer, b.step) for b in found.values()) == [
        *(("0", step) for step in (2, 4, 6)), *(("in/../side", step) for step in (2, 4, 6)),
    ]  # fmt: skip
    for b in found.values():
        wanted = np.asarray(x + b.step if b.layer == "0" else x)
        assert b.tensors["lhs"].tobytes() == wanted.tobytes()
        assert b.tensors["rhs"].tobytes() == np.asarray(y)[:, :2].tobytes()
        assert b.tensors["rhs"].dtype == ml_dtypes.bfloat16
        assert b.outputs == {"out": "bfloat16"}
        assert b.defaults["tiling"] == [8, 8, 8]
    assert {b.arguments.get("preferred_element_type") for b in found.values() if b.layer == "0"} == {"bfloat16"}
    manifest = json.loads((next(tmp_path.iterdir()) / "manifest.json").read_text())
    assert manifest["tensors"]["rhs"]["original_shape"] == [4, 3]
    assert manifest["tensors"]["rhs"]["slices"] == [[None, None, None], [None, 2, None]]


def test_eager_and_mapped_calls_without_a_step_are_counted(tmp_path):
    jax = pytest.importorskip("jax")
    wrapped, x = capture.wrap(product, op="gmm"), jax.numpy.ones((3, 2, 2))
    with capture.to(tmp_path):
        wrapped(x[0], x[0])
        jax.vmap(wrapped)(x, x)
    assert sorted(b.step for b in bundles(tmp_path).values()) == [0, 1, 2, 3]
    assert {b.tensors["lhs"].shape for b in bundles(tmp_path).values()} == {(2, 2)}


def test_torch_tensors_are_saved_with_their_bits(tmp_path):
    torch = pytest.importorskip("torch")
    wrapped = capture.wrap(lambda lhs, rhs: lhs.float() * rhs.float(), op="gmm")
    x = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    y = torch.full((256,), 0.5, dtype=torch.bfloat16, requires_grad=True)
    with capture.to(tmp_path), capture.at(step=7, layer="l"):
        wrapped(x, y)
    (b,) = bundles(tmp_path).values()
    assert (b.step, b.layer, b.outputs) == (7, "l", {"out": "float32"})
    assert b.tensors["lhs"].tobytes() == bytes(range(256))
    assert b.tensors["rhs"].dtype == ml_dtypes.bfloat16


def test_torch_compiles_a_wrapped_function_whole_while_off(tmp_path):
    torch = pytest.importorskip("torch")
    wrapped = capture.wrap(product, op="gmm")
    x = torch.ones(2, 2)
    whole = torch.compile(lambda x: wrapped(x, x) + 1, backend="eager", fullgraph=True)
    assert torch.equal(whole(x), x @ x + 1)
    parts = torch.compile(lambda x: wrapped(x * 2, x) + 1, backend="eager")
    with capture.to(tmp_path):
        assert torch.equal(parts(x), 2 * x @ x + 1)
    (b,) = bundles(tmp_path).values()
    assert b.tensors["lhs"].tolist() == [[2, 2], [2, 2]]


def test_threads_have_labels_of_their_own(tmp_path):
    wrapped, x = capture.wrap(product, op="gmm"), np.ones((2, 2), np.float32)
    inside = threading.Barrier(2)

    def serve(layer):
        with capture.at(step=1, layer=layer):
            inside.wait(10)
            wrapped(x, x)
            inside.wait(10)

    with capture.to(tmp_path), ThreadPoolExecutor(2) as pool:
        list(pool.map(serve, ["a", "b"]))
    assert sorted(b.layer for b in bundles(tmp_path).values()) == ["a", "b"]


def test_threads_that_leave_in_any_order_leave_no_label_behind(tmp_path):
    jax = pytest.importorskip("jax")
    wrapped, x = capture.wrap(product, op="gmm"), jax.numpy.ones((2, 2, 2))
    inside, came, left = threading.Event(), threading.Event(), threading.Event()

    def first():
        with capture.at(step=3):
            inside.set()
            came.wait(10)
        left.set()

    with capture.to(tmp_path), ThreadPoolExecutor(1) as pool:
        done = pool.submit(first)
        assert inside.wait(10)
        with capture.at(step=5):
            came.set()
            left.wait(10)
            jax.block_until_ready(jax.jit(jax.vmap(wrapped))(x, x))
        done.result()
        jax.vmap(wrapped)(x, x)
    assert sorted(b.step for b in bundles(tmp_path).values()) == [0, 1, 5, 5]


def test_inside_a_scan_and_a_shard_every_call_is_saved(tmp_path):
    jax = pytest.importorskip("jax")
    wrapped, x = capture.wrap(product, op="gmm"), jax.numpy.ones((2, 2))

    @jax.jit
    def model(x):
        return jax.lax.scan(lambda x, _: (wrapped(x, x), None), x, length=3)[0]

    mesh = jax.make_mesh((1,), ("d",))
    spec = jax.sharding.PartitionSpec()
    sharded = jax.jit(jax.shard_map(lambda x: wrapped(x, x), mesh=mesh, in_specs=spec, out_specs=spec))
    with capture.to(tmp_path):
        model(x)
        sharded(x)
    assert [float(b.tensors["lhs"][0, 0]) for b in sorted(bundles(tmp_path).values(), key=lambda b: b.step)] == [
        1, 2, 8, 1,
    ]  # fmt: skip


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_in_a_training_loop_every_call_of_wanted_steps_is_saved(is_recomputed, tmp_path):
    """jit of a scan over steps of the gradient of a scan over layers, of which none knows that it is watched."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    wrapped = capture.wrap(product, op="gmm")
    layers, x, steps = jnp.full((3, 4, 4), 0.1), jnp.ones((2, 4)), jnp.arange(6)

    def train(gmm):
        def layer(h, weights):
            return jnp.tanh(gmm(h, weights)), None

        def loss(layers):
            return (jax.lax.scan(jax.checkpoint(layer) if is_recomputed else layer, x, layers)[0] ** 2).sum()

        def step(layers, number):
            with capture.at(step=number):
                return layers - 0.1 * jax.grad(loss)(layers), None

        return jax.jit(lambda layers: jax.lax.scan(step, layers, steps)[0])

    with capture.to(tmp_path, every=2):
        trained = train(wrapped)(layers)
    np.testing.assert_array_equal(trained, train(product)(layers))
    found = bundles(tmp_path).values()
    assert sorted(b.step for b in found) == sorted([0, 2, 4] * 3 * (1 + is_recomputed))
    assert len({b.tensors["lhs"].tobytes() for b in found}) == 1 + 3 * 2  # x, and what two layers make of it


def test_a_call_that_is_too_large_is_left_out_with_a_warning(tmp_path):
    wrapped, x = capture.wrap(product, op="gmm"), np.ones((4, 4), np.float32)
    with capture.to(tmp_path, max_bytes=127), pytest.warns(UserWarning, match="128 bytes, max_bytes is 127"):
        wrapped(x, x)
    with capture.to(tmp_path, max_bytes=128):
        wrapped(x, x)
    assert len(bundles(tmp_path)) == 1


def label(folder, layer):
    with capture.to(folder), capture.at(layer=layer):
        pass


def test_a_bundle_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    wrapped, x = capture.wrap(product, op="gmm"), np.ones((4, 4), np.float32)

    def full(*arguments, **keywords):
        raise OSError("no space left")

    with capture.to(tmp_path):
        wrapped(x, x)
        wrapped(x, x)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
            patch.setattr(capture.json, "dumps", full)
            wrapped(x, x)
    assert len(bundles(tmp_path)) == 2
    with capture.to(tmp_path):  # the numbers begin anew, the names do not collide
        wrapped(x, x)
    assert len(bundles(tmp_path)) == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda folder: capture.wrap(product, op="../gmm"), "op must be the name of an operation"),
        (lambda folder: capture.wrap(product, op="gmm", slices={"left": np.s_[:2]}), "slices must name parameters"),
        (lambda folder: capture.to(folder, every=0).__enter__(), "every must be positive, got 0"),
        (lambda folder: label(folder, "a\nb"), r"layer must be at most 200 printable characters, got 'a\\nb'"),
        (lambda folder: capture.to(folder, max_bytes=0).__enter__(), "max_bytes must be positive, got 0"),
    ],
)
def test_wrong_usage_is_refused(wrong, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        wrong(tmp_path)


# --- replaying ---


def saved(op, case, folder):
    """A case of the matrix as a bundle, drawn; and read back."""
    with capture.to(folder):
        names = [name for name, x in draw(op, case).items() if x is not None]
        arguments = {**op.arguments(case), **op.route(case)}
        wrapped = capture.wrap(callable_with([*names, *arguments]), op=op.name)
        wrapped(**{name: draw(op, case)[name] for name in names}, **arguments)
    (path,) = folder.iterdir()
    return path


def callable_with(names):
    """A function with these keywords that returns nothing."""
    space = {}
    exec(f"def kernel(*, {', '.join(names)}): return None", space)
    return space["kernel"]


def described(op, count):
    """The first cases of the default tier that differ in more than their sizes, with something in them."""
    found = {}
    for case in op.cases:
        if case.tier != "full" and all(size for _, size in case.dims):
            found.setdefault((tuple(name for name, _ in case.dims), case.options, case.dtype, case.out), case)
    return list(found.values())[:: max(len(found) // count, 1)][:count]


def zeros(op, case):
    forms = {}
    for name, spec in op.inputs(case).items():
        if isinstance(spec, Groups):
            forms[name] = np.zeros(spec.count, np.int32)
        elif isinstance(spec, Offsets):
            forms[name] = np.zeros(spec.count + 1, np.int32)
        elif isinstance(spec, Given):
            forms[name] = spec.array
        elif spec is not None:
            forms[name] = np.zeros(spec.shape, numpy_dtype(spec.dtype))
    return forms


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_case_of_a_call_is_found_by_what_the_matrix_declares(op):
    draws_itself = any(isinstance(spec, Given) for spec in op.inputs(op.cases[0]).values())
    for case in described(op, 1 if draws_itself else 3):
        call = Bundle(op.name, 0, "", zeros(op, case), {**op.arguments(case), **op.route(case)}, {}, {})
        found = case_of(op, call)
        assert (found.dims, found.dtype) == (case.dims, case.dtype)
        assert {**op.arguments(found), **op.route(found)} == {**op.arguments(case), **op.route(case)}
        assert op.inputs(found.with_data("normal")).keys() >= call.tensors.keys()


def test_sizes_shards_and_tiles_beyond_the_matrix_are_found():
    op = OP["gmm"]
    tensors = {
        "lhs": np.zeros((77, 50), ml_dtypes.bfloat16), "rhs": np.zeros((5, 33, 50), ml_dtypes.bfloat16),
        "group_sizes": np.zeros(19, np.int32), "group_offset": np.array([7], np.int32),
    }  # fmt: skip
    arguments = {"transpose_rhs": True, "tiling": [64, 32, 16], "preferred_element_type": "float32"}
    case = case_of(op, Bundle("gmm", 0, "", tensors, arguments, {"interpret": None}, {"out": "float32"}))
    assert dict(case.dims) == dict(M=77, K=50, N=33, G=5)
    assert (case.shard, case.tiling, case.transpose_rhs, case.out) == ((7, 19), (64, 32, 16), True, "float32")


def test_dtypes_checks_and_devices_may_be_beyond_the_matrix():
    """Weights in blocks of 64 rows, which the matrix has of bfloat16 alone, and the usual check."""
    x = {"x": np.zeros((3, 192, 96), np.float32)}
    given, defaults = {"axis": 1, "block_size": 64, "interpret": True}, {"dtype": "float8_e5m2", "check_finite": True}
    case = case_of(OP["fp8_quantize"], Bundle("fp8_quantize", 0, "", x, given, defaults, {}))
    assert (case.id, case.op) == ("fp8_quantize-G3_K192_N96-f32_e5m2-axis1-block_size64-given-s0", "fp8_quantize")


def test_a_call_that_left_its_route_to_the_kernel_is_replayed_so():
    op = OP["chunk_simple_gla_fwd"]
    packed = next(c for c in op.cases if c.route == "unfused" and "N" in dict(c.dims) and c.dtype == "bfloat16")
    call = Bundle(op.name, 0, "", zeros(op, packed), dict(op.arguments(packed)), {"fused": None}, {})
    assert op.route(packed)["fused"] is False
    assert op.route(case_of(op, call))["fused"] is None


@pytest.mark.parametrize(
    ("tensors", "arguments", "message"),
    [
        ({"lhs": (8, 4)}, {}, "rhs is no tensor"),
        ({"lhs": (8, 4), "rhs": (2, 5, 3)}, {}, r"rhs is float32\[2, 5, 3\], not float32\[2, 4, 3\]"),
        ({"lhs": (8, 4), "rhs": (2, 4, 3)}, {"colour": 3}, "colour is 3, which no case gives"),
        ({"lhs": (8, 4), "rhs": (2, 4, 3), "extra": (3,)}, {}, "extra is float32"),
    ],
)
def test_a_call_that_no_case_describes_is_refused(tensors, arguments, message):
    given = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    call = Bundle("gmm", 0, "", {**given, "group_sizes": np.zeros(2, np.int32)}, arguments, {}, {})
    with pytest.raises(ValueError, match=message):
        case_of(OP["gmm"], call)


@pytest.mark.tpu
def test_a_replayed_call_has_its_cases_verdict_and_errors(tmp_path, capsys):
    op = OP["gmm"]
    case = next(c for c in op.cases if c.tier == "smoke" and c.dtype == "float32" and c.groups == "zipf")
    path = saved(op, case, tmp_path / "bundles")
    assert replay(op, read(path), "tpu").metrics == judge(Trial(op, case, "tpu")).metrics
    assert main(["--root", str(ROOT), "replay", str(path), "--backend", "tpu"]) == 0
    assert capsys.readouterr().out.startswith("tpu  AGREES  ε = ")
    spoilt = replace(op, tpu="tests.meta.debugging.test_capture:spoilt_gmm")
    assert replay(spoilt, read(path), "tpu").verdict.outcome == "LOGIC FAULT"


def spoilt_gmm(**arguments):
    from tpu_kernels.gmm import gmm

    return gmm(**arguments).at[3, 5].add(1.0)


@pytest.mark.parametrize("sizes", [[9, 0], [-1, 2], [2**31 - 1, 2**31 - 1]])
def test_group_sizes_that_cut_no_rows_are_refused(sizes):
    tensors = {"lhs": np.zeros((8, 4), np.float32), "rhs": np.zeros((2, 4, 3), np.float32)}
    call = Bundle("gmm", 0, "", {**tensors, "group_sizes": np.array(sizes, np.int32)}, {}, {}, {})
    with pytest.raises(ValueError, match="group_sizes must be sizes that cut at most 8 rows"):
        replay(OP["gmm"], call, "tpu")


# --- hostile bundles ---


def change(**changes):
    """Overwrite entries of the manifest, "a.b" for b in a."""

    def spoil(folder):
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        for name, value in changes.items():
            *outer, last = name.split("__")
            place = manifest
            for key in outer:
                place = place[key]
            place[last] = value
        path.write_text(json.dumps(manifest))

    return spoil


def rename_tensor(to):
    def spoil(folder):
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["tensors"][to] = manifest["tensors"].pop("lhs")
        path.write_text(json.dumps(manifest))

    return spoil


def write(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def flip_a_bit(folder):
    path = folder / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def link(name, to):
    def spoil(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(to)

    return spoil


def lying_header(folder):
    """The header says that a tensor has 2^40 elements."""
    path = folder / "tensors.safetensors"
    data = path.read_bytes()
    header = json.dumps({"lhs": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[-64:])


def other_tensors(folder):
    path = folder / "tensors.safetensors"
    tensors = load_file(path)
    save_file({"lhs": tensors["lhs"], "other": tensors["rhs"]}, path)


HUGE = [2**31 - 1] * 3
HOSTILE = [
    (flip_a_bit, "tensors.safetensors: .* must have the manifest's sha256"),
    (change(tensors__lhs__sha256="0" * 64), "tensors.safetensors: lhs must have the manifest's sha256 0000"),
    (change(tensors__lhs__shape=HUGE), f"manifest.json: tensors must have at most {BYTES} bytes"),
    (change(tensors__lhs__shape=[2, 8]), "tensors.safetensors: lhs must have shape"),
    (change(tensors__lhs__shape=[4, 5]), "tensors.safetensors: lhs must have shape .4, 5., got .4, 4."),
    (change(tensors__lhs__shape=[4, 50]), "tensors.safetensors: must hold the manifest's 864 bytes"),
    (change(tensors__lhs__shape=[-4, -4]), "manifest.json: .*shape must be at most 8 sizes"),
    (change(tensors__lhs__shape=[4, True]), "manifest.json: .*shape must be at most 8 sizes"),
    (change(tensors__lhs__shape=[1] * 99), "manifest.json: .*shape must be at most 8 sizes"),
    (change(tensors__lhs__dtype="object"), "manifest.json: .*dtype must be one of"),
    (change(tensors__lhs__dtype="int32"), "tensors.safetensors: lhs must be int32, got float32"),
    (change(tensors__lhs={"dtype": "float32"}), "manifest.json: .*must be an object of dtype, shape"),
    (change(op="../../etc/passwd"), "manifest.json: op must be a Python name"),
    (change(version=2), "manifest.json: version must be 1, got 2"),
    (change(tensors__lhs__shape=[0, 2**31 - 1]), f"manifest.json: tensors must have at most {BYTES} bytes"),
    (change(layer="\x1b[31mred"), "manifest.json: layer must be at most 200 printable characters, got .*x1b"),
    (change(layer="\ud800"), "manifest.json: layer must be at most 200 printable characters"),
    (change(layer="x" * 201), "manifest.json: layer must be at most 200 printable characters"),
    (change(step=10**19 - 1), "manifest.json: must be JSON.*int64 can hold"),
    (change(step=-(2**63)), "manifest.json: step must be below 2"),
    (change(step="1"), "manifest.json: manifest.step must be of JSON's type for int"),
    (change(arguments={"tiling": [[1] * 3] * 3}), "manifest.json: .*must be null, a number"),
    (change(arguments={"tiling": "x" * 1000}), "manifest.json: .*must be null, a number"),
    (change(unknown=1), "manifest.json: manifest must be an object of version"),
    (rename_tensor("../lhs"), "manifest.json: a name in tensors must be a Python name, got '../lhs'"),
    (rename_tensor("/etc/passwd"), "manifest.json: a name in tensors must be a Python name, got '/etc/passwd'"),
    (write("manifest.json", b"[" * 100_000), "manifest.json: must be JSON"),
    (write("manifest.json", b'{"version": NaN}'), "manifest.json: must be JSON.*NaN"),
    (write("manifest.json", b'{"version": 1, "version": 1}'), "manifest.json: must be JSON.*twice"),
    (write("manifest.json", b"9" * 10_000), "manifest.json: must be JSON"),
    (write("manifest.json", b"\xff\xfe{"), "manifest.json: must be JSON"),
    (write("manifest.json", b" " * (2**20 + 1)), "manifest.json: must have at most 1048576 bytes"),
    (write("tensors.safetensors", b""), "tensors.safetensors: must hold the manifest's 128 bytes"),
    (write("tensors.safetensors", b"\xff" * 200), "tensors.safetensors: must be a safetensors file"),
    (write("tensors.safetensors", b"\x80" + b"\0" * 7 + b"[" * 128 + b"\0" * 64), "must be a safetensors file"),
    (lying_header, "tensors.safetensors: must (be a safetensors file|hold)"),
    (other_tensors, "tensors.safetensors: must hold the manifest's tensors"),
    (write("more.pickle", b"cos\nsystem\n"), "must hold manifest.json and tensors.safetensors alone"),
    (link("tensors.safetensors", "/dev/zero"), "tensors.safetensors: must be a plain file, got a symbolic link"),
    (link("manifest.json", "../../manifest.json"), "manifest.json: must be a plain file, got a symbolic link"),
]


@pytest.mark.parametrize(("spoil", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_bundle_is_refused_in_one_error_with_its_file(spoil, message, tmp_path, capsys):
    wrapped, x = capture.wrap(product, op="gmm"), np.arange(16, dtype=np.float32).reshape(4, 4)
    with capture.to(tmp_path):
        wrapped(x, x)
    (folder,) = tmp_path.iterdir()
    assert read(folder).tensors["lhs"].tobytes() == x.tobytes()
    spoil(folder)
    with pytest.raises(BundleError, match=message) as raised:
        read(folder)
    assert str(folder) in str(raised.value)
    with pytest.raises(SystemExit) as ended:
        main(["--root", str(ROOT), "replay", str(folder)])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) <= 4


def forged(folder, lhs, rhs, sizes, **arguments):
    with capture.to(folder):
        capture.wrap(callable_with(["lhs", "rhs", "group_sizes", *arguments]), op="gmm")(
            lhs=lhs, rhs=rhs, group_sizes=np.array(sizes, np.int32), **arguments
        )
    (bundle,) = folder.iterdir()
    return bundle


@pytest.mark.tpu
def test_two_vectors_whose_product_fits_no_memory_are_refused(tmp_path, capsys):
    size = 2**20
    lhs, rhs = np.ones((size, 1), np.float32), np.ones((1, 1, size), np.float32)
    bundle = forged(tmp_path, lhs, rhs, [size])
    with pytest.raises(SystemExit):
        main(["--root", str(ROOT), "replay", str(bundle), "--backend", "tpu"])
    said = " ".join(capsys.readouterr().err.split())
    assert "bundle must be a call whose golden fits into" in said and "Traceback" not in said


@pytest.mark.tpu
def test_what_the_operation_refuses_is_one_error(tmp_path, capsys):
    bundle = forged(tmp_path, np.ones((8, 4), np.float32), np.ones((1, 4, 8), np.float32), [8], tiling=("a", "b", "c"))
    with pytest.raises(SystemExit) as ended:
        main(["--root", str(ROOT), "replay", str(bundle), "--backend", "tpu"])
    assert ended.value.code == 2
    assert "gmm refuses the bundle's arguments: tiling must be three ints" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["nothing", "file", "link"])
def test_what_is_no_folder_is_refused(what, tmp_path):
    path = tmp_path / "bundle"
    if what == "file":
        path.write_text("")
    if what == "link":
        path.symlink_to(tmp_path)
    with pytest.raises(BundleError, match="bundle: must be the folder of a bundle"):
        read(path)


def test_a_folder_of_several_calls_names_one(tmp_path):
    wrapped = capture.wrap(product, op="gmm")
    with capture.to(tmp_path):
        wrapped(np.ones(2), np.ones(2)), wrapped(np.ones(2), np.ones(2))
    with pytest.raises(BundleError, match=f"must be the folder of one call, for instance {min(tmp_path.iterdir())}$"):
        read(tmp_path)


def test_an_op_that_the_matrix_does_not_have_is_refused(tmp_path, capsys):
    with capture.to(tmp_path):
        capture.wrap(product, op="nothing")(np.ones(2), np.ones(2))
    (folder,) = tmp_path.iterdir()
    with pytest.raises(SystemExit):
        main(["--root", str(ROOT), "replay", str(folder)])
    names = ", ".join(op.name for op in matrix.load(ROOT))
    assert f"op must be one of {names}, got 'nothing'" in " ".join(capsys.readouterr().err.split())
