"""The probe: what it is shown, in what scope, and under which names."""

import numpy as np
import pytest

from op_arguments.probe import active, probe, probing, renamed


class Seen(list):
    """A probe that notes what it is shown, and adds 1."""

    def __call__(self, site, value, where=None, **steps):
        self.append((site, value, where, steps))
        return value + 1

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def kernel():
    """Two sites, the second with what a probe may want to know of it."""
    return probe("lhs", 1) * probe("acc", 10, True, depth=16)


def matmul_gradient(site):
    return {"acc": "dlhs"}.get(site)


def test_without_a_probe_values_are_as_they_are():
    assert active() is None
    assert kernel() == 10


def test_a_probe_sees_sites_and_takes_their_place():
    seen = Seen()
    with probing(seen):
        assert active() is seen
        assert kernel() == 22
    assert seen == [("lhs", 1, None, {}), ("acc", 10, True, {"depth": 16})]
    assert active() is None


def test_a_probe_ends_with_its_scope_even_if_a_kernel_raises():
    with pytest.raises(ZeroDivisionError), probing(Seen()):
        probe("lhs", 1 / 0)
    assert active() is None


def test_an_inner_probe_hides_the_outer_one():
    outer, inner = Seen(), Seen()
    with probing(outer):
        with probing(inner):
            kernel()
        with probing(None):
            assert kernel() == 10
    assert not outer and len(inner) == 2


def test_renamed_sites_are_shown_under_new_names_or_not_at_all():
    seen = Seen()
    with probing(seen), renamed(matmul_gradient):
        assert kernel() == 11
    assert seen == [("dlhs", 10, True, {"depth": 16})]


def test_renaming_starts_at_the_inner_scope():
    seen = Seen()
    with probing(seen), renamed(lambda site: f"outer_{site}"), renamed(lambda site: f"inner_{site}"):
        kernel()
    assert [site for site, *_ in seen] == ["outer_inner_lhs", "outer_inner_acc"]


def test_renaming_without_a_probe_is_nothing():
    with renamed(matmul_gradient):
        assert active() is None
        assert kernel() == 10


def test_the_same_renaming_of_a_probe_is_one_key_of_a_cache():
    seen = Seen()
    with probing(seen):
        keys = []
        for _ in range(2):
            with renamed(matmul_gradient):
                keys.append(active())
    assert len({*keys}) == 1 and {*keys} != {seen}


@pytest.mark.tpu
def test_attribution_marks_what_a_kernel_shows_to_its_probe():
    from parity.debugging.attribution.tpu import make_program

    def double(x):
        return probe("out", 2 * probe("x", x), depth=4)

    run = make_program(double, {"x": np.ones(3, np.float32)}, {}).run(lambda place: True)
    assert [(mark.site, *mark.value, mark.steps) for mark in run.marks] == [
        ("x", 1, 1, 1, ()),
        ("out", 2, 2, 2, (("depth", 4),)),
    ]
    assert {mark.place.line.file for mark in run.marks} == {__file__}


@pytest.mark.tpu
def test_what_is_compiled_for_one_probe_is_not_anothers():
    jax = pytest.importorskip("jax")
    from tpu_kernels._lib.call import jit

    @jit("times")
    def scaled(x, *, times):
        return probe("out", times * x)

    x, found = jax.numpy.ones(()), []
    for more in (0.0, 1.0, 2.0, 0.0):
        with probing(None if not more else lambda site, value, *_, more=more: value + more):
            found.append(float(scaled(x, times=3.0)))
    assert found == [3.0, 4.0, 5.0, 3.0]
