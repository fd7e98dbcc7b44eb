"""Name of this server, by which a client distinguishes it from SGLang."""

SERVER_KEY, SERVER_NAME = "server", "rlscale"
"""Entry of `/server_info`, which SGLang lacks."""
