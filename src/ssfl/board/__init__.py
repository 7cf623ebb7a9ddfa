"""`ssfl board`: the runs under a folder, live in a browser on this machine. It reads and never writes."""
