"""Who hears of what, and settings that make no sense are refused."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from trainwarden.alerts.incidents import IncidentsConfig
from trainwarden.alerts.mass import MassConfig
from trainwarden.alerts.routes import RoutesConfig
from trainwarden.core.errors import ConfigError
from trainwarden.core.model import Tier


def test_everybody_hears_everything_by_default() -> None:
    assert {RoutesConfig().channels(tier) for tier in Tier} == {("terminal", "jsonl")}
    assert RoutesConfig().everyone == ("terminal", "jsonl")


def test_each_tier_has_its_own_channels() -> None:
    routes = RoutesConfig(critical=("pager", "jsonl"), warn=("mail",), info=())
    assert [routes.channels(tier) for tier in Tier] == [(), ("mail",), ("terminal", "jsonl"), ("pager", "jsonl")]
    assert routes.everyone == ("pager", "jsonl", "terminal", "mail")


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({"warn": ("a/b",)}, r"alerts\.incidents\.routes\.warn: a channel is a plain name, got \['a/b'\]"),
        ({"info": ("",)}, r"alerts\.incidents\.routes\.info: a channel is a plain name"),
        ({"error": ("a", "a")}, r"alerts\.incidents\.routes\.error: a channel is named twice"),
        ({"critical": ()}, r"alerts\.incidents\.routes\.critical: nobody would hear of it"),
    ],
)
def test_wrong_routes_are_refused(routes: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RoutesConfig(**routes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: IncidentsConfig(update_every=timedelta(seconds=-1)),
            r"alerts\.incidents\.update_every: need 0 or more",
        ),
        (lambda: IncidentsConfig(reopen_within=timedelta(-1)), r"alerts\.incidents\.reopen_within: need 0 or more"),
        (lambda: IncidentsConfig(kept_max=0), r"alerts\.incidents\.kept_max: need at least 1, got 0"),
        (lambda: MassConfig(window=timedelta(-1)), r"alerts\.incidents\.mass\.window: need 0 or more"),
        (lambda: MassConfig(ranks=0), r"alerts\.incidents\.mass\.ranks: need at least 1, got 0"),
        (lambda: MassConfig(share=3), r"alerts\.incidents\.mass\.share: need 0 to 1, got 3"),
    ],
    ids=["update_every", "reopen_within", "kept_max", "window", "ranks", "share"],
)
def test_wrong_settings_are_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong()
