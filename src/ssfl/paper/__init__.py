"""The paper's experiments: the published numbers, how to run the experiments, and our results.

Read `rows.py` first, which has the fifty rows of the experiment table as data.
"""
