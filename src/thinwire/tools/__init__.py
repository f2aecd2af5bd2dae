"""Runs: configuration, the training loop, launcher, checkpoints, metrics and the command line."""
