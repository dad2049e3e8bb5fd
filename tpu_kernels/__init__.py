"""JAX Pallas kernels for TPUs, one module per operation; `cpu_golden` says what each of them means."""
