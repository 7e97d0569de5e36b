"""Benchmarks: `trainer/`, `planner/` and `kernels/`, each with a main. Ratios compare what ran in turn."""
