"""What the kernels of this package share."""
