"""What several TPU kernels share."""
