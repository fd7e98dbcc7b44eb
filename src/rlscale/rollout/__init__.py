"""Generation: prompts go to engines, answers come back as rewarded groups."""
