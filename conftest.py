"""Sets the environment before any framework loads; what tests cost is told at the end."""

from parity.backends import prepare_environment

prepare_environment()
pytest_plugins = ["tests.support.durations"]
