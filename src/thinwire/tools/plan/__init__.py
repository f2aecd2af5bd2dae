"""What a run would cost on a link, before it is started: its messages from the optimizer itself, their time from `Network`.

Nothing is trained and nothing is sent. The optimizer of the run is built on tensors without memory (torch's "meta" device) and
asked for its schedule and for the length of its messages, so plan and meter count the same bytes. Then a clock runs through
some periods:

    a message is posted, travels for t_sync = hops * latency + bytes / bandwidth once the one before it has arrived, and is
    waited for tau steps later:  wait = max(0, t_sync - tau * t_step)          tau = 0 where a method blocks
    utilisation = t_step / (t_step + wait per step)                             the wait of a round falls on H steps

That is the cost model in closed form for one message at a time, and still right where several are under way.
"""

from thinwire.tools.plan.cost import Cluster, Prediction, cost_of, predict
from thinwire.tools.plan.messages import Message, Period, ddp_buckets, period_of, run_messages
from thinwire.tools.plan.search import (
    MOST_H,
    all_settings,
    bandwidth_for,
    entries_per_block,
    largest_k,
    smallest_H,
    steps_per_round,
    with_H,
    with_k,
)
from thinwire.tools.plan.shapes import gpt_like, on_meta, parse_count

__all__ = [
    "MOST_H",
    "Cluster",
    "Message",
    "Period",
    "Prediction",
    "all_settings",
    "bandwidth_for",
    "cost_of",
    "ddp_buckets",
    "entries_per_block",
    "gpt_like",
    "largest_k",
    "on_meta",
    "parse_count",
    "period_of",
    "predict",
    "run_messages",
    "smallest_H",
    "steps_per_round",
    "with_H",
    "with_k",
]
