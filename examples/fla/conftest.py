import os

from parity.backends import prepare_environment

prepare_environment()
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # as in their own tests; else a dot of float32 is one of TF32
