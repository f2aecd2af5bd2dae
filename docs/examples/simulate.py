"""Four simulated workers run the training function of train.py."""

from train import train

import thinwire

network = thinwire.Network(bandwidth=100e6, latency=0.02)  # 100 Mbit/s and 20 ms on each worker's link
world = thinwire.World(4, network=network, step_time=0.1)  # a local step takes 100 ms
losses = world.run(train)
print(f"validation loss {losses[0]:.4f} on all {len(losses)} workers after {world.seconds:.2f} simulated seconds")
assert len(set(losses)) == 1
