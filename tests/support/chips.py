"""TPUs that are not here."""

from contextlib import contextmanager

import pytest


@contextmanager
def on(kind):
    """As if for a TPU of this kind."""
    jax = pytest.importorskip("jax")
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        yield
