"""Services next to a run: the rollout buffer, to which other processes submit finished trajectories.

producers ── submit ──> rollout buffer (HTTP, SQLite) <── next groups ── run (buffer.url)
"""
