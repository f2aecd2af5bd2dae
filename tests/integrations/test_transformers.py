"""ThinwireTrainer and its mixin, with the real transformers and trl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.integrations.frameworks import foreign_collectives, join, needs
from tests.processes import Pool, warnings_of_this_process
from thinwire import Metered
from thinwire.errors import CheckpointError, ConfigError
from thinwire.links import Link, SoloLink

pytestmark = [needs("transformers", "accelerate"), pytest.mark.filterwarnings("ignore")]

H, STEPS, MIDDLE = 4, 10, 6  # the checkpoint in the middle is between two rounds


def tiny_model(seed: int = 0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)  # with dropout: random states matter


def sequences(count: int = 96) -> list[dict[str, Tensor]]:
    rows = torch.randint(1, 32, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, *, cls: Any = None, **options: Any) -> Any:
    from transformers import TrainingArguments

    given: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 3,
        "save_steps": MIDDLE,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return (cls or TrainingArguments)(str(folder), **given | options)


def trainer(folder: Path, link: Link, how: dict[str, Any], *, model: Any = None, cls: Any = None, **options: Any) -> Any:
    from thinwire.integrations.transformers import ThinwireTrainer

    data = sequences()
    made = cls or ThinwireTrainer
    return made(
        model or tiny_model(), arguments(folder, **options), train_dataset=data, eval_dataset=data[:8], link=link, **how
    )


def method(name: str, link: Link) -> dict[str, Any]:
    """What a user gives the trainer for each method."""
    if name == "demo":
        return {"optimizer_cls_and_kwargs": (thinwire.DeMo, {"link": link, "lr": 1e-2})}
    algorithms: dict[str, Callable[..., Any]] = {
        "diloco": partial(thinwire.DiLoCo, H=H),
        "decoupled-diloco": partial(thinwire.DecoupledDiLoCo, H=H),
        "mt-dao": partial(thinwire.MTDAO, H=H),
        "warm-start": partial(thinwire.WarmStart, steps=2, then=partial(thinwire.DiLoCo, H=H)),
    }
    return {"algorithm": algorithms[name]}


def weights(model: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- One process: quick -------------------------------------------------------------------------------------------------------


def test_it_trains_saves_and_resumes_between_two_rounds(tmp_path: Path) -> None:
    straight = trainer(tmp_path / "straight", Metered(SoloLink()), {"algorithm": partial(thinwire.DiLoCo, H=H)})
    straight.train()
    opt = straight.thinwire
    assert (opt.steps, opt.rounds, opt.pending_steps) == (STEPS, 3, 0), "two rounds, and one of finish()"
    logs = [entry for entry in straight.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [4, 8, 10], "a log that is due waits for the next round"
    assert [entry["wire_rounds"] for entry in logs] == [1, 2, 3]
    assert {"wire_sent", "wire_waiting"} <= logs[0].keys()

    resumed = trainer(tmp_path / "resumed", Metered(SoloLink()), {"algorithm": partial(thinwire.DiLoCo, H=H)})
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{MIDDLE}"))
    assert equal(weights(resumed.model), weights(straight.model))
    assert resumed.lr_scheduler.state_dict() == straight.lr_scheduler.state_dict()

    (tmp_path / "foreign").mkdir()
    with pytest.raises(CheckpointError, match="holds no state of thinwire workers"):
        resumed._load_optimizer_and_scheduler(str(tmp_path / "foreign"))
    with pytest.raises(ConfigError, match=r"needs a thinwire optimizer: give it algorithm="):
        trainer(tmp_path / "none", SoloLink(), {}).train()
    how = {"algorithm": partial(thinwire.DecoupledDiLoCo, H=H, pace="speed")}
    with pytest.raises(ConfigError, match="pace='speed' is for loops of your own"):
        trainer(tmp_path / "pace", SoloLink(), how).train()
    args = arguments(tmp_path / "fsdp")
    args.fsdp = ["full_shard"]
    with pytest.raises(ConfigError, match=r"fsdp=\['full_shard'\] shares the model among all processes"):
        type(straight)(tiny_model(), args, train_dataset=sequences(), algorithm=thinwire.DiLoCo)


@pytest.mark.slow
def test_best_model_is_evaluated_and_shipped_and_training_goes_on_from_it(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    best = trainer(
        tmp_path,
        SoloLink(),
        {"algorithm": partial(thinwire.DiLoCo, H=H)},
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        learning_rate=0.3,  # so that the best is not the last
        lr_scheduler_type="constant",
        load_best_model_at_end=True,
    )
    best.train()
    assert best.state.best_global_step < STEPS
    losses = {entry["step"]: entry["eval_loss"] for entry in best.state.log_history if "eval_loss" in entry}
    assert best.evaluate()["eval_loss"] == min(losses.values()) == losses[best.state.best_global_step]
    best.save_model(str(tmp_path / "shipped"))
    shipped = GPT2LMHeadModel.from_pretrained(tmp_path / "shipped")
    assert equal(weights(shipped), weights(best.model))
    best.create_optimizer()
    assert equal(best.thinwire.agreed(), best.thinwire.params())


@pytest.mark.slow
@needs("peft")
def test_lora_resumes_and_ships_its_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    how = {"algorithm": partial(thinwire.DiLoCo, H=H)}
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    straight = trainer(tmp_path / "straight", SoloLink(), how, model=get_peft_model(tiny_model(), lora))
    straight.train()
    resumed = trainer(tmp_path / "resumed", SoloLink(), how, model=get_peft_model(tiny_model(), lora))
    saved = tmp_path / "straight" / f"checkpoint-{MIDDLE}"
    resumed.train(resume_from_checkpoint=str(saved))
    assert equal(weights(resumed.model), weights(straight.model))
    assert straight.thinwire.message_nbytes() < 4 * sum(p.numel() for p in straight.model.parameters()) / 10
    assert (saved / "adapter_model.safetensors").is_file() and not (saved / "model.safetensors").exists()


# --- Two processes -----------------------------------------------------------------------------------------------------------


def resume(link: Link, name: str, folder: Path) -> dict[str, Any]:
    join(link)
    metered = Metered(link)
    options: dict[str, Any] = {"bf16": True, "gradient_accumulation_steps": 2} if name == "diloco" else {}
    straight = trainer(folder / "straight", metered, method(name, metered), **options)
    straight.train()
    metered = Metered(link)
    # Another start: what counts is in the checkpoint.
    resumed = trainer(folder / "resumed", metered, method(name, metered), model=tiny_model(seed=5), **options)
    resumed.train(resume_from_checkpoint=str(folder / "straight" / f"checkpoint-{MIDDLE}"))
    inner = getattr(straight.thinwire, "inner", straight.thinwire)
    return {
        "steps": resumed.thinwire.steps,
        "equal": equal(weights(resumed.model), weights(straight.model)),
        "rounds": [each.thinwire.link.meter.totals.rounds for each in (straight, resumed)],
        "weights": weights(straight.model),
        "moments": [kept["exp_avg"] for kept in inner.state.values() if "exp_avg" in kept],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diloco", "demo", "decoupled-diloco", "mt-dao", "warm-start"])
def test_two_workers_resume_between_two_rounds_bit_for_bit(name: str, pair: Pool, tmp_path: Path) -> None:
    a, b = pair.run(resume, 2, name, tmp_path)
    for told in (a, b):
        assert told["equal"] and told["steps"] == STEPS
        assert told["rounds"][0] == told["rounds"][1], "the meter goes on counting"
    assert equal(a["weights"], b["weights"]), "finish() has brought in the last steps"
    if name in ("diloco", "decoupled-diloco"):
        assert not equal(a["moments"], b["moments"]), "each worker has moments of its own, and they were not mixed"


def watch(foreign: Counter[str]) -> Any:
    """A callback that notes the collectives of every step, and of evaluations."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[dict[str, int]] = []
            self.evaluations: list[dict[str, int]] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            foreign.clear()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps.append(dict(foreign))

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            self.evaluations.append(dict(foreign))

    return Watch()


def observe(link: Link, folder: Path) -> dict[str, Any]:
    """Train with everything that could send something, and tell what was sent, seen, evaluated and shipped."""
    from torch.nn.parallel import DistributedDataParallel
    from transformers import GPT2LMHeadModel

    join(link)
    seen: list[Tensor] = []
    how = {"algorithm": partial(thinwire.DiLoCo, H=H)}
    made = trainer(folder, link, how, model=tiny_model(seed=link.rank), eval_strategy="steps", eval_steps=MIDDLE)
    step = made.training_step
    made.training_step = lambda model, inputs, *args: (seen.append(inputs["input_ids"]), step(model, inputs, *args))[1]
    with foreign_collectives() as foreign:
        made.add_callback(watching := watch(foreign))
        made.train()
    assert watching.evaluations[0], "an evaluation gathers losses, and that is counted"
    assert not isinstance(made.model_wrapped, DistributedDataParallel)
    (between,) = [e["eval_loss"] for e in made.state.log_history if e["step"] == MIDDLE and "eval_loss" in e]
    shipped = GPT2LMHeadModel.from_pretrained(folder / f"checkpoint-{MIDDLE}")
    return {
        "seen": [tuple(row.tolist()) for batch in seen for row in batch],
        "foreign": watching.steps,
        "logs": [entry for entry in made.state.log_history if "loss" in entry],
        "message": 4 * sum(p.numel() for p in made.model.parameters()),
        "evaluated": (between, trainer(folder / "shipped", link, {}, model=shipped).evaluate()["eval_loss"]),
        "weights": weights(made.model),
    }


@pytest.mark.slow
def test_two_workers_send_nothing_but_their_rounds(pair: Pool, tmp_path: Path) -> None:
    a, b = pair.run(observe, 2, tmp_path)
    assert a["foreign"] == b["foreign"] == [{}] * STEPS, "no collective of HF in any step"
    assert [entry["step"] for entry in a["logs"]] == [4, 8, 10]
    seen = [*a["seen"], *b["seen"]]
    assert len(set(seen)) == len(seen) == 2 * STEPS * 4, "each worker reads data of its own"
    assert equal(a["weights"], b["weights"]), "though they were seeded differently"
    sent = [entry["wire_sent"] for entry in a["logs"]]
    assert all(0 <= later - sooner - a["message"] < 8192 for sooner, later in pairwise(sent)), "one message per round"
    for evaluated, loss in (a["evaluated"], b["evaluated"]):
        assert evaluated == loss, "between rounds, the model that is evaluated is the one that is shipped"


def naive(link: Link, folder: Path) -> list[str]:
    """The obvious use without the adapter."""
    from transformers import Trainer

    join(link)
    model = tiny_model()
    opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters()), link, H=H)
    args = arguments(folder, max_steps=2, save_strategy="no")
    with warnings_of_this_process() as told:
        Trainer(model, args, train_dataset=sequences(), optimizers=(opt, None)).train()  # type: ignore[arg-type]
    return told


@pytest.mark.slow
def test_the_trainer_without_the_adapter_is_warned_about(pair: Pool, tmp_path: Path) -> None:
    for told in pair.run(naive, 2, tmp_path):
        assert any("have the same gradients" in text and "DistributedDataParallel" in text for text in told), told


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"[END]": 0} | {f"w{i}": i for i in range(1, 32)}
    plain = Tokenizer(WordLevel(words, unk_token="[END]"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="[END]", pad_token="[END]")


def sft(link: Link, folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from thinwire.integrations.transformers import ThinwireMixin

    join(link)

    class ThinwireSFTTrainer(ThinwireMixin, SFTTrainer):
        pass

    made = ThinwireSFTTrainer(
        tiny_model(),
        arguments(folder, cls=SFTConfig, bf16=False),
        train_dataset=Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in sequences()]),
        processing_class=tokenizer(),
        link=link,
        algorithm=partial(thinwire.DiLoCo, H=H),
    )
    with foreign_collectives() as foreign:
        made.add_callback(watching := watch(foreign))
        made.train()
    return {"foreign": watching.steps, "weights": weights(made.model), "rounds": made.thinwire.rounds}


@pytest.mark.slow
@needs("trl", "datasets")
def test_trl_with_the_mixin_sends_nothing_but_its_rounds(pair: Pool, tmp_path: Path) -> None:
    a, b = pair.run(sft, 2, tmp_path)
    assert a["foreign"] == b["foreign"] == [{}] * STEPS
    assert equal(a["weights"], b["weights"]) and a["rounds"] == 3
