"""Does a run survive? Kills parts of it at random moments and compares it with an unbroken one."""
