"""Adapters to other people's training loops, one module each; each needs the extra of its name."""
