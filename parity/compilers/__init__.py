"""Ahead-of-time compilers: what the real chips' compilers say about a kernel, without the chips."""
