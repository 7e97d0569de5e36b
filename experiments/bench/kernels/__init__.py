"""The benchmark of the compression's kernels: kernel_times.py measures, `__main__.py` prints."""
