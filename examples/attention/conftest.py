from parity.backends import prepare_environment

prepare_environment()
