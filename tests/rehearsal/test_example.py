"""examples/train.py on four real ranks (gloo), forked from this process, which has PyTorch loaded already."""

import importlib.util
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # DDP needs it: loaded once here, not in every rank
import torch.distributed as dist

from trainwarden.rehearsal.faults import Fault, to_json

RANKS = 4
FORK = multiprocessing.get_context("fork")
SHM = Path("/dev/shm")


def _load() -> Any:
    path = Path(__file__).resolve().parents[2] / "examples" / "train.py"
    spec = importlib.util.spec_from_file_location("train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train = _load()


def be_rank(rank: int, store: Path, environment: dict[str, str], arguments: Sequence[str]) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    train.main(arguments)


@pytest.fixture(scope="module")
def rings() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="trainwarden-test-", dir=SHM))
    yield folder
    shutil.rmtree(folder)


Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(rings: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains with these arguments and this environment, and gives what --out holds."""

    def run(*arguments: object, **environment: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("run")
        words = [*map(str, arguments), "--out", str(folder / "out.json")]
        environment = {"TRAINWARDEN_DIR": str(rings), **environment}
        assert exit_codes(folder / "store", environment, words) == [0] * RANKS
        found: dict[str, Any] = json.loads((folder / "out.json").read_text())
        return found

    return run


def exit_codes(store: Path, environment: dict[str, str], arguments: Sequence[str]) -> list[int | None]:
    ranks = [FORK.Process(target=be_rank, args=(rank, store, environment, arguments)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(50)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
        rank.close()
    return codes


class Watched(NamedTuple):
    """Ten watched steps with evaluations and checkpoints."""

    result: dict[str, Any]
    checkpoints: Path


@pytest.fixture(scope="module")
def watched(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("checkpoints")
    return Watched(run("--steps", 10, "--checkpoint-dir", folder, "--checkpoint-every", 8, "--eval-every", 5), folder)


def test_it_learns(watched: Watched) -> None:
    """It starts at ln(64) = 4.16, the loss of one who knows nothing."""
    assert watched.result["step"] == 10
    assert watched.result["loss"] < 3.3


def test_it_is_watched(watched: Watched, rings: Path) -> None:
    made = sorted(path.name for path in rings.glob("*/rings/rank-*.ring"))
    whole = [f"rank-{rank}-0-0{kind}" for rank in range(4) for kind in (".ring", ".side.ring")]
    assert made == whole  # the side ring has the note that the rank's part of a checkpoint is written


def test_unwatched_it_gives_the_same_loss_to_the_last_bit(watched: Watched, run: Run, tmp_path: Path) -> None:
    unwatched = run("--steps", 10, TRAINWARDEN="0", TRAINWARDEN_DIR=str(tmp_path))
    assert unwatched["hex"] == watched.result["hex"]
    assert not [*tmp_path.iterdir()]


def test_resumed_it_gives_the_same_loss_to_the_last_bit(watched: Watched, run: Run) -> None:
    resumed = run("--steps", 10, "--resume", watched.checkpoints / "step-8")
    assert resumed["hex"] == watched.result["hex"]


def test_without_a_batch_it_gives_another_loss_also_when_resumed(watched: Watched, run: Run) -> None:
    resumed = run("--steps", 10, "--skip", "9", "--resume", watched.checkpoints / "step-8")
    assert resumed["loss"] != watched.result["loss"]
    assert resumed["loss"] == pytest.approx(watched.result["loss"], rel=0.1)


def test_a_poisoned_batch_ruins_it(run: Run) -> None:
    faults = to_json([Fault(kind="poison_batch", rank=1, args={"batch": 2})])
    assert run("--steps", 3, TRAINWARDEN_FAULTS=faults) == {"step": 3, "loss": None, "hex": "nan"}


@pytest.mark.parametrize(
    ("skip", "used"),
    [
        pytest.param("", [1, 2, 3, 4], id="none"),
        pytest.param("2-3", [1, 4, 5, 6], id="a range, both ends"),
        pytest.param("1,3-3,5", [2, 4, 6, 7], id="a list"),
    ],
)
def test_skipped_batches_are_never_used(skip: str, used: list[int]) -> None:
    assert [*islice(train.batches(1, train.ranges(skip)), 4)] == used


def test_a_batch_depends_on_seed_and_index_alone() -> None:
    first, again, other = (train.Language(seed).batch(7) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, train.Language(0).batch(8))


def test_the_best_possible_loss_is_what_the_odds_of_the_language_say() -> None:
    language = train.Language(0)
    words = torch.cat([language.batch(index) for index in range(20)])
    came, comes = words[:, :-1].flatten(), words[:, 1:].flatten()
    odds = language.odds[came].gather(1, (language.followers[came] == comes[:, None]).long().argmax(1, keepdim=True))
    assert -odds.log().mean().item() == pytest.approx(language.entropy_nats(), rel=0.02)
