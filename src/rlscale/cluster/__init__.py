"""Ray and only Ray: the session, placement, actors and their health."""
