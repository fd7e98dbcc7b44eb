"""Ray: the session, placement groups, actors and their health."""
