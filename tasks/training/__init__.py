"""Learning: GRPO, the trainer group, checkpoints and the warm start."""
