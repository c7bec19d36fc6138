"""A process of its own in which Triton interprets kernels: Triton decides once, when it is imported."""

import atexit
import concurrent.futures
import functools
import multiprocessing
import os


@functools.cache
def _executor():
    executor = concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    atexit.register(executor.shutdown)
    kept = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        executor.submit(os.getpid).result()
    finally:
        del os.environ["TRITON_INTERPRET"]
        if kept is not None:
            os.environ["TRITON_INTERPRET"] = kept
    return executor


def interpreted(function, *arguments):
    """The result of a module's function, called where kernels are interpreted."""
    return _executor().submit(function, *arguments).result()
