"""Callbacks of training frameworks, in the real packages: the same little training, and the same is expected of each.

Four optimizer steps of two batches each, evaluated and saved after the second and the fourth. The packages take seconds
to import, so each trains once, and all that is asked is asked of these runs.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.collectors.world import World, a_world, events, poll, rows

from trainwarden.collectors.rank import Rank
from trainwarden.collectors.rank.hooks import lightning as lightning_hook
from trainwarden.collectors.rank.hooks import transformers as transformers_hook
from trainwarden.core.control import STOP, Request
from trainwarden.core.model import Event, Frame
from trainwarden.core.records import COUNTERS, FEATURES

torch = pytest.importorskip("torch")
tqdm = pytest.importorskip("tqdm")
STEPS, BATCHES_A_STEP, ROWS = 4, 2, 2

Row = dict[str, Any]
Train = Callable[[Any, Path, int], list[float]]
"""Trains with a callback for at most so many steps; gives the loss of each batch."""


def data() -> list[Row]:
    torch.manual_seed(0)
    return [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(STEPS * BATCHES_A_STEP * ROWS)]


def loss_of(layer: Any, batch: Row) -> Any:
    return (layer(batch["x"]) - batch["labels"]).square().mean()


def with_transformers(told: Any, folder: Path, steps: int) -> list[float]:
    transformers, losses = pytest.importorskip("transformers"), list[float]()
    pytest.importorskip("accelerate")

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x: Any, labels: Any) -> Row:
            loss = loss_of(self.layer, {"x": x, "labels": labels})
            if self.training:
                losses.append(loss.item())
            return {"loss": loss, "logits": self.layer(x)}

    told = told if not isinstance(told, Rank) else transformers_hook.callback(told)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=BATCHES_A_STEP,
        logging_steps=1,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        Model(), arguments, train_dataset=data(), eval_dataset=data()[:ROWS], callbacks=[told]
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    return losses


def with_lightning(told: Any, folder: Path, steps: int) -> list[float]:
    lightning, losses = pytest.importorskip("lightning.pytorch"), list[float]()
    loader = torch.utils.data.DataLoader

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: Row, index: int) -> Any:
            loss = loss_of(self.layer, batch)
            losses.append(loss.item())
            return loss

        def validation_step(self, batch: Row, index: int) -> None:
            loss_of(self.layer, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    told = told if not isinstance(told, Rank) else lightning_hook.callback(told)
    saving = lightning.callbacks.ModelCheckpoint(every_n_train_steps=2)
    trainer = lightning.Trainer(
        max_steps=steps,
        accumulate_grad_batches=BATCHES_A_STEP,
        val_check_interval=2 * BATCHES_A_STEP,
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[told, saving],
    )
    trainer.fit(Model(), loader(data(), batch_size=ROWS), loader(data()[:ROWS], batch_size=ROWS))
    return losses


HOOKS: dict[str, Any] = {"transformers": transformers_hook, "lightning": lightning_hook}
FRAMEWORKS: dict[str, Train] = {"transformers": with_transformers, "lightning": with_lightning}


class Seen:
    """One run as the agent saw it."""

    def __init__(self, name: str, world: World, folder: Path) -> None:
        self.name, self.folder = name, folder
        source, w = world.source(), world.attach()
        self.losses = FRAMEWORKS[name](w, folder, STEPS)
        assert w._ring is not None
        self.errors = w._ring._counters[COUNTERS.index("errors")]
        w.close()
        self.out: list[Frame | Event] = poll(source)
        self.steps = rows(self.out, "step")

    def column(self, feature: str) -> list[float]:
        return [float(value) for value in self.steps["values"][:, FEATURES.index(feature)]]


@pytest.fixture(scope="module", params=FRAMEWORKS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with a_world() as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm.tqdm, "monitor_interval", 0)
        yield Seen(request.param, world, tmp_path_factory.mktemp(request.param))
    torch.set_num_threads(threads)


def test_each_optimizer_step_is_a_step(seen: Seen) -> None:
    assert seen.errors == 0
    assert seen.steps["step"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_each_step_has_all_its_phases(seen: Seen, phase: str) -> None:
    assert all(value > 0 for value in seen.column(f"{phase}_s")[1:])


def test_nobody_is_waited_for(seen: Seen) -> None:
    assert all(value == 0 or math.isnan(value) for value in seen.column("wait_s"))


def test_the_loss_is_that_of_the_framework(seen: Seen) -> None:
    """The mean over the step's batches."""
    batches = [seen.losses[at : at + BATCHES_A_STEP] for at in range(0, STEPS * BATCHES_A_STEP, BATCHES_A_STEP)]
    assert seen.column("loss") == pytest.approx([sum(step) / len(step) for step in batches], rel=1e-4)


def test_evaluation_and_saving_are_announced_and_timed(seen: Seen) -> None:
    phases = [(event.data["phase"], event.data["step"]) for event in events(seen.out, "mark.phase")]
    assert sorted(phases) == [("checkpoint", 2), ("checkpoint", 4), ("eval", 2), ("eval", 4)]
    for phase in ("eval", "checkpoint"):  # between two steps: told with the second
        spent = seen.column(f"{phase}_s")
        assert spent[2] > 0
        assert all(value == 0 or math.isnan(value) for value in (spent[0], spent[1], spent[3]))


def test_a_checkpoint_that_is_there_is_told_where_the_framework_says_so(seen: Seen) -> None:
    committed = [event.data["step"] for event in events(seen.out, "mark.checkpoint_committed")]
    assert committed == ([2, 4] if seen.name == "transformers" else [])
    for step in committed:
        assert "model.safetensors" in (seen.folder / f"checkpoint-{step}" / "rank-0.json").read_text()


class Asked:
    """A recorder that is asked to stop in its first step, as if by another process."""

    def __init__(self, w: Rank) -> None:
        self._recorder = w

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)

    def end(self) -> Request:
        self._recorder.end()
        return Request(seq=1, code=STOP, at_step=1)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_request_to_stop_is_obeyed(name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    losses = FRAMEWORKS[name](HOOKS[name].callback(Asked(world.attach())), tmp_path, STEPS)
    assert len(losses) == BATCHES_A_STEP


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_callback_that_fails_is_counted_and_the_training_goes_on(
    name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    w = world.attach()
    told = HOOKS[name].callback(w)
    del told._w
    assert len(FRAMEWORKS[name](told, tmp_path, 2)) == 2 * BATCHES_A_STEP
    assert w._ring is not None
    assert w._ring._counters[COUNTERS.index("errors")] == 1
