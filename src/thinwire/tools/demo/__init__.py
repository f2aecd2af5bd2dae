"""The demo: one small GPT by three methods on real workers, and a slice of each on a link that is really thin."""

STEPS = 500  # what the learning rates were chosen for: LOG.md, "settings for the demo, again"
PERIOD = 25  # steps between two messages of the method with local steps
SLICE = 2 * PERIOD  # steps that are timed on the thin link
