"""Dashboard and alerts query existing metrics; images and the systemd unit are secure."""

import configparser
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
COUNTERS = {
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "peagle:requests_total",
    *(f"peagle:learn_{name}_total" for name in ("documents", "tokens", "dropped")),
    *(f"peagle:learn_{name}_total" for name in ("drafts", "accepted_tokens")),
}
GAUGES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "peagle:learn_up",
    "peagle:learn_version",
    "peagle:learn_versions",
    "peagle:learn_held_back_acceptance_length",
    "peagle:learn_store_bytes",
    "peagle:learn_trainer",
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
}
ENGINES = {
    "peagle:engine_up",
    "peagle:engine_restarts_total",
    "peagle:driver_heartbeat_age_seconds",
}
METRICS = (
    COUNTERS
    | GAUGES
    | ENGINES
    | {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
)
WORDS = {
    "sum",
    "by",
    "rate",
    "increase",
    "on",
    "group_left",
    "histogram_quantile",
    "max",
    "min",
    "min_over_time",
    "and",
    "up",
}
LABELS = {"le", "engine", "model_name", "position", "finished_reason", "status", "instance", "job"}
LABELS |= {"version", "process", "drafter", "state"}


def names(expression: str) -> set[str]:
    """The metrics in a PromQL expression: identifiers without functions and labels."""
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
    return set(re.findall(r"(?<![\w.])[a-zA-Z_][\w:]*", bare)) - WORDS - LABELS


def check_rates(expression: str) -> None:
    """Check that rate() is applied to counters and buckets, and never to gauges."""
    for name in names(expression):
        rated = f"rate({name}" in expression
        assert rated == (name not in GAUGES) or name.startswith("up"), expression


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana" / "peagle.json").read_text(encoding="utf-8"))


def test_the_dashboard_queries_existing_metrics(dashboard: dict[str, Any]) -> None:
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    asked = set[str]().union(*map(names, queries))
    assert asked <= METRICS, asked - METRICS
    for query in queries:
        check_rates(query)
        assert query.count("(") == query.count(")") and "$model" in query
    bases = {re.sub("_bucket$", "", name) for name in asked}
    assert bases == COUNTERS | GAUGES | HISTOGRAMS  # every metric is shown


def test_the_dashboard_can_be_imported(dashboard: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert (
        variables["datasource"]["type"] == "datasource"
        and variables["datasource"]["query"] == "prometheus"
    )
    assert dashboard["schemaVersion"] >= 39 and "id" not in dashboard
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)


def test_the_panels_of_the_dashboard_do_not_overlap(dashboard: dict[str, Any]) -> None:
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == [
        "Traffic",
        "Latency",
        "KV cache and queue",
        "Speculative decoding",
        "Learning",
    ]
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not cells & taken and position["x"] + position["w"] <= 24, panel["title"]
        taken |= cells


def test_alerts_query_existing_metrics() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))[
        "groups"
    ][0]["rules"]
    for rule in rules:
        assert names(rule["expr"]) <= METRICS, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"] and rule["annotations"]["fix"]
    assert {rule["alert"] for rule in rules if ENGINES & names(rule["expr"])} == {
        "PeagleNoEngine",
        "PeagleRestarts",
        "PeagleHung",
    }
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert (
        scrape["rule_files"] == ["alerts.yml"]
        and scrape["scrape_configs"][0]["job_name"] == "peagle"
    )


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_image_meets_the_requirements_of_sagemaker(kind: str) -> None:
    text = (DEPLOY / "docker" / f"Dockerfile.{kind}").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    instructions = [tuple(line.split(maxsplit=1)) for line in lines if line]
    # the last instruction of each kind is effective
    last = dict(pair for pair in instructions if len(pair) == 2)
    assert last["EXPOSE"] == "8080" and json.loads(last["CMD"]) == ["serve"]
    assert json.loads(last["ENTRYPOINT"])
    assert last["USER"] not in ("root", "0")
    assert "/ping" in last["HEALTHCHECK"]
    assert "--constraint constraints.txt" in text and ":latest" not in text
    assert sum(word == "FROM" for word, *_ in instructions) == 2


def test_the_unit_is_hardened() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "peagle.service", encoding="utf-8")
    service = unit["Service"]
    for key in (
        "NoNewPrivileges",
        "PrivateTmp",
        "ProtectHome",
        "ProtectKernelTunables",
        "RestrictSUIDSGID",
    ):
        assert service[key] == "yes"
    assert service["ProtectSystem"] == "strict" and service["DynamicUser"] == "yes"
    # arguments are visible to every user of the machine
    assert "--api-key" not in service["ExecStart"]
    assert int(service["TimeoutStopSec"]) > 25  # longer than the drain
    # a signal to the whole group would end the workers before the server
    assert service["KillMode"] == "mixed"


def test_the_documentation_quotes_the_unit() -> None:
    unit = (DEPLOY / "systemd" / "peagle.service").read_text(encoding="utf-8")
    documented = re.findall(
        r"`((?:Restart|KillMode)=[\w-]+)`", (DEPLOY.parent / "docs" / "serve.md").read_text("utf-8")
    )
    assert documented and all(re.search(f"(?m)^{line}$", unit) for line in documented)
