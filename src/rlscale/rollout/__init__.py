"""Sources of rollouts: engines that answer prompts, labels, and saved rollouts."""
