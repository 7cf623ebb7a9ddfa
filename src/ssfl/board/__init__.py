"""`ssfl board` shows the runs under a folder, live in a browser on this machine. It never changes a run.

Read `app.py` first, the web server. `untrusted.py` reads run folders without trusting their content.
"""
