"""Pages, alerts and dashboard speak of metrics, keys and calls that there are, and of all of them."""

import json
import re
from dataclasses import fields
from pathlib import Path

from ckptkit.cache import config
from ckptkit.cache.metrics import Metrics

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cache"
PREFIX = "ckptkit_cache_"


def names() -> set[str]:
    """Every metric, as Prometheus stores it, without the suffixes of histograms."""
    found = set()
    for line in Metrics("1").text().decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            found.add(name if kind != "counter" or name.endswith("_total") else f"{name}_total")
    return {name.removeprefix(PREFIX) for name in found if not name.endswith("_created")}


def spoken(text: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(rf"{PREFIX}([a-z0-9_]+)", text)}


def test_alerts_and_dashboard_ask_for_metrics_that_exist() -> None:
    alerts, board = (
        (DOCS / "deploy" / "alerts.yaml").read_text(),
        (DOCS / "deploy" / "dashboard.json").read_text(),
    )

    assert spoken(alerts) and spoken(alerts) <= names()
    assert spoken(board) and spoken(board) <= names()
    assert len(re.findall(r"- alert:", alerts)) >= 6
    panels = json.loads(board)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 8


def test_the_page_lists_every_metric() -> None:
    table = (DOCS / "operations.md").read_text().partition("## Metrics")[2]

    listed = {
        re.sub(r"\{.*\}", "", name) for name in re.findall(r"`([a-z0-9_]+(?:\{[a-z,]+\})?)`", table)
    } - {"ckptkit_cache_"}

    assert listed == names()


def test_the_page_lists_every_key_of_the_configuration() -> None:
    page = (DOCS / "configuration.md").read_text()
    table = page[page.index("| key |") :]
    for kind in (
        config.CacheConfig,
        config.Slots,
        config.Replicas,
        config.Drain,
        config.Tls,
        config.Scrub,
        config.Limits,
    ):
        for known in fields(kind):
            assert f"`{known.name}`" in table, f"{kind.__name__}.{known.name} is not on the page"
    example = page[page.index("```toml") + 7 :].partition("```")[0]
    import tomllib

    assert config.parse_config(tomllib.loads(example)).slots.budget == 600 << 30
