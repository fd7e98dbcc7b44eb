"""Keys of sessions: `<session id>.<HMAC-SHA256 of the id>`. They stay valid when the gateway starts again."""

import hmac
import re
import secrets

ID_PATTERN = re.compile(r"[0-9a-f]{32}")
MIN_SECRET_BYTES = 32


class SessionKeys:
    """Makes and checks the keys of sessions.

    Example:
        keys = SessionKeys(secrets.token_bytes(32))
        key = keys.key_of(session_id)
        keys.session_of(key)  # session_id; None for a key of another gateway
    """

    def __init__(self, secret: bytes) -> None:
        assert len(secret) >= MIN_SECRET_BYTES, f"a secret must have at least {MIN_SECRET_BYTES} bytes"
        self._secret = secret

    def key_of(self, session_id: str) -> str:
        return f"{session_id}.{self._mac(session_id)}"

    def session_of(self, key: str) -> str | None:
        """The session of a key; None: no session has it. Takes the same time for every wrong code of an id."""
        # The code first: a wrong key must not show whether its session exists.
        session_id, _, code = key.partition(".")
        if not hmac.compare_digest(code.encode(), self._mac(session_id).encode()):
            return None
        return session_id if ID_PATTERN.fullmatch(session_id) else None

    def _mac(self, session_id: str) -> str:
        return hmac.new(self._secret, session_id.encode(), "sha256").hexdigest()


def new_session_id() -> str:
    return secrets.token_hex(16)
