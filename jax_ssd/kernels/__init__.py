"""GPU kernels, one folder a language. They hold no host code: configuration and seeds travel down as values."""
