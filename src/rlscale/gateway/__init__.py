"""The gateway: chat APIs for agents that train, with every token of every call recorded.

    agent ── messages ──> gateway ── token ids ──> router or engine
                            │  └─ one record on disk per call
    driver ── sessions ─────┘

An agent knows a URL and a key. The key is that of a session, and a session is one trajectory.
"""
