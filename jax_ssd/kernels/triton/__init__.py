"""Triton kernels, launched by jax-triton and by torch alike."""
