"""The same federated jobs on ssfl and on other simulators, timed side by side; see README.md."""
