"""`ssfl board`: the runs under a folder, live in a browser on this machine. It only reads.

Open `app.py` first, the web server; `untrusted.py` reads run folders that are not trusted.
"""
