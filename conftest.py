"""Sets the environment before any framework loads."""

from parity.backends import prepare_environment

prepare_environment()
