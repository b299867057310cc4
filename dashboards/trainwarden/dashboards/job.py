"""The dashboard "Training job": one job at a glance, then why. `make dashboards` writes json/job.json from it.

What stands there when it is opened answers, without scrolling on a screen of 1080 lines: is it training, how fast,
what is wrong. Below: does it learn, could it go back, where did the time go. Folded up, and not asked until they are
opened: what was done about incidents, and are we well. Each panel answers the one question that is its description.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as grafana

from trainwarden.core.kinds import KINDS
from trainwarden.dashboards import look
from trainwarden.dashboards import queries as q
from trainwarden.dashboards.look import PLAIN, SECONDS, SHARE, Part, Shown, bars, lines, number, rows

FILE: Final = Path(__file__).parent / "json" / "job.json"
RUNBOOKS: Final = "docs/runbooks"
"""Where the pages are, unless `trainwarden dashboards push --runbooks URL` says it: a path of this repository."""


def main() -> None:
    """Write the JSON that is committed."""
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")


def text() -> str:
    """The dashboard as JSON, the same from the same sources."""
    written = json.dumps(_dashboard(), cls=JSONEncoder, sort_keys=True, indent=1)
    # The SDK knows one place for links and annotations, a menu in which nobody looks; without it they are in sight.
    return re.sub(r'\n *"placement": "inControlsMenu",', "", written) + "\n"


def _dashboard() -> grafana.Dashboard:
    runbooks = grafana.DashboardLink(title="Runbooks", type_val=grafana.DashboardLinkType.LINK, url="${runbooks}")
    runbooks.icon, runbooks.target_blank = "doc", True
    return grafana.Dashboard(
        uid="trainwarden-job",
        title="Training job",
        description="One job that trainwarden watches: is it training, how fast, what is wrong, could it go back.",
        tags=["trainwarden"],
        time=grafana.DashboardDashboardTime(from_val="now-3h", to="now"),
        refresh="30s",
        timepicker=grafana.TimePickerConfig(refresh_intervals=["10s", "30s", "1m", "5m", "15m"]),
        graph_tooltip=grafana.DashboardCursorSync.CROSSHAIR,
        templating=grafana.DashboardDashboardTemplating(list_val=_variables()),
        annotations=grafana.AnnotationContainer(list_val=_annotations()),
        links=[runbooks],
        panels=look.placed([_glance(), _learning(), _checkpoints(), _time(), _repairs(), _ourselves()]),
    )


def _variables() -> list[grafana.VariableModel]:
    """The runbooks' address is a variable, since only the site knows where its people read them."""
    source = grafana.VariableModel(type_val=grafana.VariableType.DATASOURCE, name="datasource", query="prometheus")
    job = grafana.VariableModel(type_val=grafana.VariableType.QUERY, name="job_id", query=q.jobs())
    job.datasource, job.refresh = look.DATASOURCE, grafana.VariableRefresh.ON_TIME_RANGE_CHANGED
    job.sort = grafana.VariableSort.NATURAL_ASC
    runbooks = grafana.VariableModel(type_val=grafana.VariableType.TEXTBOX, name="runbooks", query=RUNBOOKS)
    runbooks.current = grafana.VariableOption(text=RUNBOOKS, value=RUNBOOKS)
    source.label, job.label, runbooks.label = "Prometheus", "Job", "Runbooks at"
    for one in (source, job, runbooks):
        one.auto = one.auto_min = one.auto_count = None  # of interval variables only; the SDK writes it for all
    return [source, job, runbooks]


def _annotations() -> list[grafana.AnnotationQuery]:
    """Asked every 15 s of the graph, so that what began stands where it began (Grafana's own step is 60 s)."""
    incidents = grafana.AnnotationQuery(name="incidents", icon_color=look.BAD, expr=q.incidents_began())
    incidents.title_format, incidents.text_format, incidents.tag_keys = "incident", "{{kind}}", "kind"
    attempts = grafana.AnnotationQuery(name="attempts", icon_color=look.NOTICE, expr=q.attempts_began())
    attempts.title_format = "another attempt"
    for one in (incidents, attempts):
        one.datasource, one.step = look.DATASOURCE, "15s"
    return [incidents, attempts]


def _glance() -> Part:
    steps = lines(
        "Step time",
        "How long do steps take (the newest 100 of the attempt, slowest rank), and how long should they?",
        {"{{quantile}}": q.newest("step_window_seconds", "quantile"), "expected": q.newest("step_expected_seconds")},
        SECONDS,
        shown=look.OF_STEPS,
    )
    activities = lines(
        "Where the time goes",
        "What is each second of wall time spent on? Only training brings the job on.",
        {"{{activity}}": q.per_second("job_activity_seconds_total", "activity")},
        SHARE,
        shown=look.ACTIVITIES,
        stacked=True,
    )
    numbers = [(3, 4, one) for one in (*_training(), *_wrong())]
    return Part(panels=[*numbers, (12, 8, steps), (12, 8, activities), *((6, 8, one) for one in _reasons())])


def _training() -> Sequence[grafana.Panel]:
    """Is it training, how fast."""
    doing = "What does the job spend its time on now?"
    moved = "How long ago did any rank enter another phase or step? 5 min is a stalled training."
    slower = "How do steps (P50 of the newest 100) compare to what they should take? 10 % more is a change."
    tokens = "How many tokens a second does each GPU get through, interruptions included?"
    effective = "Which share of the last 24 hours of wall time closed new steps? Good is 90 %."
    progress = q.age("last_progress_timestamp_seconds")
    return (
        number("Doing now", doing, q.doing_now(), SHARE, legend="{{activity}}", shown=look.ACTIVITIES),
        number("Last progress", moved, progress, SECONDS, scale=look.STALLED, decimals=0),
        number("Step", "Which step has closed last?", q.newest("last_step"), PLAIN),
        number("Step time / expected", slower, q.against_expected("0.5"), SHARE, scale=look.SLOWER, decimals=0),
        number("Tokens/s per GPU", tokens, q.tokens_per_gpu(), look.TOKENS_PER_SECOND),
        number("Effective training, 24 h", effective, q.effective(q.DAY), SHARE, scale=look.EFFECTIVE, decimals=1),
    )


def _wrong() -> Sequence[grafana.Panel]:
    """What is wrong, and could we know."""
    tiers = {str(place): (tier, how.colour) for place, (tier, how) in enumerate(look.TIERS.items(), 1)}
    worst = "Is anything wrong, and how loudly must it be said?"
    blind = "How many sources cannot be read? What they would show is unknown, not healthy."
    return (
        number("Worst open incident", worst, q.worst_tier(), PLAIN, meanings={"0": ("none", look.GOOD)} | tiers),
        number("Blind sources", blind, q.blind_count(), PLAIN, scale=look.SOME),
    )


def _reasons() -> Sequence[grafana.Panel]:
    throughput = lines(
        "Tokens/s per GPU over time",
        "Does the throughput hold?",
        {"tokens/s per GPU": q.tokens_per_gpu()},
        look.TOKENS_PER_SECOND,
        shown={"tokens/s per GPU": Shown(colour=look.GOOD)},
    )
    slowest = bars(
        "Slowest ranks by own work",
        "Which ranks work longer than their peers, waiting left out? 130 % makes a slow rank.",
        q.slowest(),
        SHARE,
        legend="rank {{rank}} on {{device}}",
        scale=look.OWN_WORK,
    )
    tiers = bars(
        "Open incidents by tier",
        "How many incidents are not resolved? ERROR and CRITICAL page somebody.",
        q.total("incidents", "tier"),
        PLAIN,
        legend="{{tier}}",
        shown=look.TIERS,
    )
    opened = rows(
        "Incidents",
        "Of which kinds were incidents opened so far, and which page says what to do?",
        q.opened_kinds(),
        PLAIN,
        value="opened",
        links={"runbook": "${runbooks}/${__value.text}.md"},
    )
    return throughput, slowest, tiers, opened


def _learning() -> Part:
    loss, norm = (
        lines(title, question, {"{{quantile}}": q.of_ranks(signal)}, PLAIN, shown=look.OF_RANKS)
        for title, question, signal in (
            ("Loss", "Does the loss fall, and is one rank apart?", "loss"),
            ("Gradient norm", "Are the gradients calm, and is one rank apart?", "grad_norm"),
        )
    )
    question = "In how many steps was a value not finite? One is one too many."
    steps = q.total("nonfinite_steps_total", "signal")
    nonfinite = bars("Steps with NaN or infinity", question, steps, PLAIN, legend="{{signal}}", scale=look.ANY)
    return Part(heading="Does it learn?", panels=[(10, 8, loss), (10, 8, norm), (4, 8, nonfinite)])


def _checkpoints() -> Part:
    age, interval = q.age("checkpoint_last_timestamp_seconds"), q.newest("checkpoint_interval_seconds")
    step = number("Newest checkpoint", "From which step could it go on?", q.newest("checkpoint_last_step"), PLAIN)
    overdue = "Is a checkpoint overdue? Twice its interval is late."
    late = number("Age / interval", overdue, q.ratio(f"({age})", interval), SHARE, scale=look.OVERDUE, decimals=0)
    ages = lines(
        "Checkpoint age",
        "How much work would be lost if the job ended now?",
        {"age": age, "interval": interval},
        SECONDS,
        shown={"age": Shown(colour=look.GOOD), "interval": look.EXPECTED},
    )
    pending = lines(
        "Pending saves",
        "Does storage keep up? More than one that lasts means it does not.",
        {"pending": q.newest("checkpoint_pending_saves")},
        PLAIN,
        shown={"pending": Shown(colour=look.ORANGE)},
    )
    results = bars(
        "Checkpoints by result",
        "How many checkpoints were published, how many refused?",
        q.total("checkpoints_total", "result"),
        PLAIN,
        legend="{{result}}",
        shown={"published": Shown(colour=look.GOOD), "refused": Shown(colour=look.BAD)},
    )
    panels = [(4, 7, step), (4, 7, late), (8, 7, ages), (4, 7, pending), (4, 7, results)]
    return Part(heading="Could it go back?", panels=panels)


def _time() -> Part:
    windows = [
        number(
            f"Effective training, {title}",
            f"Which share of the wall time {words_} closed new steps? Good is 90 %.",
            expr,
            SHARE,
            scale=look.EFFECTIVE,
            decimals=1,
        )
        for title, words_, expr in (
            ("range shown", "that is shown", q.effective(q.RANGE)),
            ("since start", "since the job is watched", q.effective()),
        )
    ]
    spent = bars(
        "Time spent in the range shown",
        "How much wall time went where?",
        q.grown("job_activity_seconds_total", "activity"),
        SECONDS,
        legend="{{activity}}",
        shown=look.ACTIVITIES,
    )
    return Part(heading="Where did the time go?", panels=[*((4, 7, one) for one in windows), (16, 7, spent)])


def _repairs() -> Part:
    waiting = "Is something being done, or does a plan wait for a person?"
    running = number("Plans under way", waiting, q.newest("plans_running"), PLAIN, scale=look.DOING)
    attempt = number("Attempt", "Which attempt of the job is watched?", q.newest("attempt"), PLAIN)
    states = bars(
        "Open incidents by state",
        "How far is the answer to each incident?",
        q.total("incidents", "state"),
        PLAIN,
        legend="{{state}}",
    )
    over_time = lines(
        "Open incidents over time",
        "When was how much wrong?",
        {"{{tier}}": q.total("incidents", "tier")},
        PLAIN,
        shown=look.TIERS,
        stacked=True,
    )
    outcome = "What did each rule do, and did it help?"
    ended = rows("Plans by outcome", outcome, q.total("plans_total", "rule", "mode", "result"), PLAIN, value="plans")
    guards = q.total("plan_refusals_total", "guard")
    refused = bars("Plans refused", "What kept a plan from being carried out?", guards, PLAIN, legend="{{guard}}")
    losing = "Where do recoveries lose their time, on average?"
    phases = bars("Phases of a recovery", losing, q.mean_phase(), SECONDS, legend="{{phase}}")
    pages = look.words("What to do", "Which page says what to do about an incident?", _pages())
    first = [(4, 6, running), (4, 6, attempt), (8, 6, states), (8, 6, over_time)]
    second = [(8, 8, ended), (4, 8, refused), (4, 8, phases), (8, 8, pages)]
    return Part(heading="What was done about it?", folded=True, panels=[*first, *second])


def _pages() -> str:
    """A line for each kind of finding, from the table of kinds."""
    found = [kind for kind in KINDS.values() if kind.of == "finding"]
    cells = [f"| [{kind.name}](${{runbooks}}/{kind.runbook}.md) | {kind.meaning} |" for kind in found]
    return "\n".join(["| kind | what it means |", "|---|---|", *cells])


def _ourselves() -> Part:
    heartbeat, journal = q.age("heartbeat_timestamp_seconds"), q.lowest("journal_writable")
    looks = "Does the supervisor look at its sources?"
    written = "Can decisions be written down? If not, nothing is done."
    undelivered, lost = q.newest("notices_undelivered"), q.total("recording_lost_items_total")
    numbers = (
        number("Heartbeat age", looks, heartbeat, SECONDS, scale=look.SILENT, decimals=0),
        number("Journal writable", written, journal, PLAIN, meanings=look.UP),
        number("Notices undelivered", "Do people hear of what happens?", undelivered, PLAIN, scale=look.SOME),
        number("Recordings lost", "Can the run be replayed in full?", lost, PLAIN, scale=look.SOME),
    )
    sources = rows(
        "Sources, blind ones first",
        "Which sources cannot be read?",
        q.blindest(),
        PLAIN,
        value="readable",
        lowest_first=True,
        meanings=look.UP,
    )
    peers = bars(
        "Alertmanager peers",
        "Which peers took the alerts last sent (1), which did not (0)?",
        q.newest("alertmanager_peer_up", "peer"),
        PLAIN,
        legend="{{peer}}",
        scale=((0, look.BAD), (1, look.GOOD)),
    )
    notices, fates = q.total("notices_total", "channel", "result"), q.per_second("rows_total", "fate")
    over_time = (
        lines("Own CPU", "How many cores does watching cost?", {"cores": q.own_cpu()}, PLAIN),
        lines("Turn", "How long does one look at all sources take?", {"mean turn": q.turn()}, SECONDS),
        lines("Frame lag", "How old is what arrives?", {"lag": q.newest("frame_lag_seconds")}, SECONDS),
        lines("Rows", "What becomes of the ranks' rows?", {"{{fate}}": fates}, look.ROWS_PER_SECOND),
        lines("Notices", "Which channels take what they are told?", {"{{channel}} {{result}}": notices}, PLAIN),
    )
    widths = (5, 5, 4, 5, 5)
    first = [*((3, 7, one) for one in numbers), (6, 7, sources), (6, 7, peers)]
    second = [(width, 7, one) for width, one in zip(widths, over_time, strict=True)]
    return Part(heading="Are we well?", folded=True, panels=[*first, *second])


if __name__ == "__main__":
    main()
