"""The story of a run: who produces, who waits for whom, and what happens when something fails. No Ray, no torch."""
