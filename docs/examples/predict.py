"""What a run would cost on a link, from Python: no training, no network."""

from thinwire import Network
from thinwire.tools.config import RunConfig
from thinwire.tools.plan import Cluster, gpt_like, predict

model = gpt_like(124_000_000)  # or your own: only its shapes matter
cluster = Cluster(workers=4, network=Network(bandwidth=1e9, latency=0.02), step_time=1.0)
for H in (8, 32, 128):
    cost = predict(RunConfig(algorithm="diloco", settings={"H": H}), model, cluster)
    megabytes = cost.bytes_per_step / 1e6
    print(f"H={H}: {megabytes:.1f} MB a step, {cost.wait_per_step:.3f} s waiting, {cost.utilisation:.1%} computing")
