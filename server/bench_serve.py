"""`vl2 bench serve`: a server under load as its clients see it, ours or any other of the OpenAI API.

`server.load` does the work; here it gets its server, and its figures are printed and written.

Measured for every answer, all streamed:

* time to first token: from the first byte of the request to the first event with text;
* time per token: between the first event with text and the last, over the tokens in between;
* gap: between two events with text that follow each other;
* whole: from the first byte of the request to the last of the answer.

Rates are over the time from the first request of a run to the end of its last answer. Failed requests count in none.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import httpx

from server.load.connection import Target
from server.load.figures import Figures, table
from server.load.scenarios import Bench, BenchError, Plan
from server.logs import configure_logging
from server.settings import ConfigurationError, Settings, quiet
from server.terminal import connect

Scenario = Literal["load", "idle", "arrivals"]
# Above this share of a core the client may be what is measured.
BUSY_CLIENT = 0.7


def measure(
    settings: Settings, plan: Plan, *, scenario: Scenario, base_url: str | None, json_file: Path | None
) -> None:
    """Run a scenario against a server (a private one without `base_url`), print the figures, and write them as JSON.

    Raises ConfigurationError for a plan that no server can run, StartupError for a private server that does not start,
    BenchError for a server that cannot be measured.
    """
    _check(plan, scenario, base_url)
    settings = quiet(settings)
    configure_logging(settings.log_level, settings.log_format)
    with connect(settings, base_url) as client:
        name = settings.served_model_name or _first_model(client)
        authorization = client.headers.get("Authorization")
        plan = replace(plan, form=replace(plan.form, model=name))
        bench = Bench(Target(str(client.base_url), authorization), plan)
        report = asyncio.run(_run(bench, scenario))
    report = {"server": base_url or "private", "scenario": scenario, "plan": asdict(plan), **report}
    report["client_cpu"] = bench.client_cpu
    if base_url is not None and bench.client_cpu > BUSY_CLIENT:
        print(f"the client took {bench.client_cpu:.0%} of a core: it may have slowed what it measures", file=sys.stderr)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def _check(plan: Plan, scenario: Scenario, base_url: str | None) -> None:
    """Raises ConfigurationError, naming the option."""
    if base_url is not None:
        try:
            Target(base_url)
        except ValueError as error:
            raise ConfigurationError(f"--base-url: {error}") from error
    if scenario != "load" and (plan.shared_pictures is not None or plan.questions != 1):
        raise ConfigurationError("--shared-pictures and --questions are for --scenario load")
    if scenario != "load" and plan.picture_size is None:
        raise ConfigurationError(f"--scenario {scenario} needs --pictures WIDTHxHEIGHT")
    if plan.shared_pictures is not None and plan.picture_size is None:
        raise ConfigurationError("--shared-pictures needs --pictures WIDTHxHEIGHT")
    if scenario == "idle" and plan.clients not in ((), (1,)):
        raise ConfigurationError("--scenario idle has one client")
    if scenario == "arrivals" and len(plan.clients) > 1:
        raise ConfigurationError("--scenario arrivals takes one number of --clients")


def _first_model(client: httpx.Client) -> str:
    """The name of the model that a server serves. Raises BenchError."""
    try:
        response = client.get("/v1/models").raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{client.base_url} does not say which model it serves: {error}") from error


async def _run(bench: Bench, scenario: Scenario) -> dict[str, Any]:
    """Run it, print its figures, and return them for JSON."""
    rows: list[tuple[str, Figures]] = []
    takes_ignore_eos = await bench.probe()
    if not takes_ignore_eos:
        print("this server does not take ignore_eos: answers may be shorter than --max-tokens", file=sys.stderr)
    extra: dict[str, Any] = {"ignore_eos": takes_ignore_eos}
    if scenario == "load":
        await bench.load(lambda name, row: rows.append((name, row)))
    elif scenario == "idle":
        await bench.idle(lambda name, row: rows.append((name, row)))
    else:
        arrivals = await bench.arrivals()
        rows.append(("arrived", arrivals.arrived))
        extra |= {"quiet_gap_ms": asdict(arrivals.quiet_gap_ms) if arrivals.quiet_gap_ms else None}
        extra |= {"longest_gap_ms": arrivals.longest_gap_ms}
    print(table(rows))
    if scenario == "arrivals":
        quiet = "-" if arrivals.quiet_gap_ms is None else f"{arrivals.quiet_gap_ms.p50:.1f}"
        worst = ", ".join(f"{gap:.1f}" for gap in arrivals.longest_gap_ms)
        print(f"running answer: gap {quiet} ms (p50) before the pictures came, the longest while they came {worst} ms")
    return {**extra, "results": [{"name": name, **asdict(row)} for name, row in rows]}
