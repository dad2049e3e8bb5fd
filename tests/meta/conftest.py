"""Somebody else's project, to run pytest and `parity` in; and what a test of a backend needs."""

from functools import partial

import pytest

from tests.support.functions import FRAMEWORKS
from tests.support.projects import Project


@pytest.fixture
def project(tmp_path):
    """Makes it in the test's folder; of which kernel, is the argument."""
    return partial(Project, tmp_path)


@pytest.fixture(autouse=True)
def framework(request):
    """Skip a test of a backend whose framework is not here."""
    for backend in ("tpu", "gpu"):
        if request.node.get_closest_marker(backend):
            pytest.importorskip(FRAMEWORKS[backend])
