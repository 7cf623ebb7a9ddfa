"""Benchmarks: speed comparisons of ssfl with other federated simulators, and measurements of accuracy and
cost. See README.md."""
