"""Somebody else's project, to run pytest and `parity` in."""

from functools import partial

import pytest

from tests.support.projects import Project


@pytest.fixture
def project(tmp_path):
    """Makes it in the test's folder; of which kernel, is the argument."""
    return partial(Project, tmp_path)
