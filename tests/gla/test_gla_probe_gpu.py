# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""Which values the kernels of the GPU show `parity stages`: each that there is, as often as it is computed, and none of
a row, channel or pair that is not."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import gla, simple_gla
from tests.support.interpreter import interpreted, shown

pytestmark = [pytest.mark.gpu, interpreted]

H, T = 2, 20
BLOCKS = (16, 4)  # rows: of chunks of 16
PAIRS, TRIANGLES = sum(n * n for n in BLOCKS), sum(n * (n + 1) for n in BLOCKS)  # those with themselves in both
# K and V: a tile exactly, part of one, and two tiles of K, one of them in part
SIZES = [*(pytest.param(size, size, marks=pytest.mark.full) for size in (16, 20)), (40, 20)]


def marked(module, form, direction, k, v, steps=T, gate=-0.125, **options):
    """By its site, how many values of a head were shown."""
    shapes = dict(q=(1, steps, H, k), k=(1, steps, H, k), v=(1, steps, H, v), initial_state=(1, H, k, v))
    shapes |= dict(gk=(1, steps, H, k)) if module is gla else dict(g=(1, steps, H), g_gamma=(H,))
    shapes |= dict(do=(1, steps, H, v), dht=(1, H, k, v)) if direction == "bwd" else {}
    function = getattr(module, f"{form}_{module.__name__.rpartition('.')[2]}_{direction}")
    with shown() as counts:
        values = {"gk": gate, "g": gate}
        function(**{name: torch.full(shape, values.get(name, -0.125)) for name, shape in shapes.items()}, **options)
    assert all(count % H == 0 for count in counts.values())
    return {site: count // H for site, count in counts.items() if count}


def of_blocks(calls, width):
    """The sites of a block's decays, computed so many times: of `width` channels, or of one gate."""
    return dict(c=calls * T * width, decay=2 * calls * T * width, kept=calls * len(BLOCKS) * width)


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(("k", "v"), SIZES)
@pytest.mark.parametrize("module", [simple_gla, pytest.param(gla, marks=pytest.mark.full)])
def test_a_chunked_forward_pass_shows_what_there_is(module, k, v, fused):
    """The decays of each tile of V are those of what is read and of what is written."""
    tiles = -(-v // 16)
    assert marked(module, "chunk", "fwd", k, v, chunk_size=16, fused=fused) == of_blocks(
        2 * tiles, k if module is gla else 1
    ) | dict(A=tiles * PAIRS, state=len(BLOCKS) * k * v)


def test_sums_of_gates_that_are_cut_off_are_not_shown():
    """They are not the golden's."""
    found = marked(gla, "chunk", "fwd", 16, 16, chunk_size=16, fused=True, gate=-200.0)
    assert "c" not in found and found["decay"]


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(("k", "v"), SIZES)
@pytest.mark.parametrize("module", [simple_gla, pytest.param(gla, marks=pytest.mark.full)])
def test_a_chunked_backward_pass_shows_what_there_is(module, k, v, fused):
    """Of the scores, and of the gradient of a gate per step, a tile of K has a part, which is not shown."""
    tiles_k, tiles_v = -(-k // 32), -(-v // 16)
    calls = tiles_v * (1 if fused else 2) + (2 if module is gla else 1)
    states = len(BLOCKS) * k * v
    expected = of_blocks(calls, k) if module is gla else of_blocks(calls * tiles_k, 1)
    expected |= dict(dA=tiles_k * TRIANGLES, state=states, dstate=states)
    if tiles_k == 1:
        expected |= dict(A=PAIRS, dgate=len(BLOCKS))
    if module is gla:
        expected |= dict(dgate=(3 * T + len(BLOCKS)) * k)
    assert marked(module, "chunk", "bwd", k, v, chunk_size=16, fused=fused) == expected


@pytest.mark.parametrize(
    ("k", "v", "steps"),
    [(20, 12, 3), *(pytest.param(*each, marks=pytest.mark.full) for each in ((16, 16, T), (20, 20, T), (80, 72, 3)))],
)
@pytest.mark.parametrize("module", [pytest.param(simple_gla, marks=pytest.mark.full), gla])
def test_a_recurrent_pass_shows_what_there_is(module, k, v, steps):
    """Tiles of 32 of the largest: forward of V, backward of K. Backward the states twice, and the decays thrice."""
    tiles_k, tiles_v = (1, 1) if k <= 20 else (3, 3)
    state = steps * k * v
    forward = dict(kept=tiles_v * steps * (k if module is gla else 1), state=state)
    assert marked(module, "fused_recurrent", "fwd", k, v, steps) == forward
    backward = dict(kept=3 * steps * (k if module is gla else tiles_k), state=2 * state, dstate=state)
    backward |= dict(dgate=steps * k) if module is gla else dict(dgate=steps) if tiles_k == 1 else {}
    assert marked(module, "fused_recurrent", "bwd", k, v, steps) == backward
