"""Benchmarks: correctness first, then medians beside other libraries in one run."""
