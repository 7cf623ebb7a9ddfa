"""The paper's experiments: fifty rows as data, how to run them, what came out beside what was printed."""
