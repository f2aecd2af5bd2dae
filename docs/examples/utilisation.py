"""What part of the time workers compute, by bandwidth and H: computed from the cost model, not measured."""

from thinwire import Network

message = 4 * 123_551_232  # bytes: one float32 per parameter of gpt-124m
step_time = 1.0  # seconds of one local step
for bandwidth in (10e6, 100e6, 1e9, 10e9, 100e9):
    round_time = Network(bandwidth=bandwidth, latency=0.02).seconds("mean", [message] * 4)
    shares = [H * step_time / (H * step_time + round_time) for H in (1, 32, 500)]
    print(f"{bandwidth / 1e6:6.0f} Mbit/s", *(f"{100 * share:6.1f}%" for share in shares))
