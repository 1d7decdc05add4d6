"""`safepoint plan interval`, `cost` and `simulate`: answers, pictures, and messages about bad input."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from safepoint.estimates.interval import blocking_optimum_s, daly_s, young_s
from safepoint.jobs.local.history import History
from safepoint.jobs.local.paths import job_folder
from safepoint.jobs.model.spec import JobSpec
from safepoint.jobs.model.states import JobState
from tests.support.commands import safepoint

INTERVAL = ("plan", "interval", "--mtbf", "4h", "--stall", "2s")
SIMULATE = ("plan", "simulate", "--ranks", "8,64", "--days", "3", "--trials", "3")


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs of these tests are not those of the user who runs them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_an_interval() -> None:
    document = safepoint(*INTERVAL, "--json").document
    assert document["best_interval_s"] == pytest.approx(blocking_optimum_s(2, 14_400))
    assert document["young_s"] == young_s(2, 14_400)
    assert document["daly_s"] == daly_s(2, 14_400)
    best = [row for row in document["intervals"] if row["more_than_best_percent"] < 1e-9]
    assert [row["interval_s"] for row in best] == [pytest.approx(document["best_interval_s"])]
    assert best[0]["lost_percent"] == pytest.approx(100 * (1 - document["productive"]))
    text = safepoint(*INTERVAL).stdout
    assert text.startswith("best interval  3 m 59 s; 98.")
    assert "Young 1974     4 m 00 s" in text


def test_intervals_are_not_shorter_than_a_save() -> None:
    document = safepoint(*INTERVAL, "--durable", "3m", "--json").document
    assert min(row["interval_s"] for row in document["intervals"]) >= 178


def test_snapshots_in_memory_let_saves_be_rarer() -> None:
    """They protect from the end of the ranks; saves are only needed for the loss of a machine."""
    words = (*INTERVAL, "--ranks-only", "0.9", "--restart", "5m", "--ranks-restart", "10s")
    alone = safepoint(*words, "--json").document
    both = safepoint(*words, "--snapshot-every", "30s", "--snapshot-stall", "0.01s", "--json").document
    assert both["best_interval_s"] > 2 * alone["best_interval_s"]
    assert both["productive"] > alone["productive"]


@pytest.mark.parametrize("words", ["--mtbf 4h", "--mtbf 36500d", "--mtbf 1s", "--mtbf 4h --announced 0.5"])
def test_saves_that_delay_nothing_are_best_after_each_step(words: str, project: Path) -> None:
    """An interval of 0.00 s, and others of as many digits, would be no answer."""
    words = f"plan interval --stall 0s {words} --svg free.svg"
    outcome = safepoint(*words.split())
    assert outcome.stdout.startswith("best interval  after each step; ")
    assert "a save after each step" in (project / "free.svg").read_text()
    cells = [line.split("  ")[0] for line in outcome.stdout.splitlines()]
    rows = cells[cells.index("INTERVAL") + 1 : -2]
    assert len(rows) == len(set(rows)) >= 9
    assert safepoint(*words.split(), "--json").document["best_interval_s"] == 0


def test_short_intervals_differ_in_the_table() -> None:
    outcome = safepoint("plan", "interval", "--mtbf", "1h", "--stall", "0.00000001s")
    cells = [line.split("  ")[0] for line in outcome.stdout.splitlines()]
    rows = cells[cells.index("INTERVAL") + 1 :]
    assert "8.49 ms" in rows
    assert len(rows) == len(set(rows)) >= 9


def test_the_cost_of_saves_that_delay_nothing() -> None:
    words = "plan cost --announced 0 --blocking 0s --stall 0s --durable 0s"
    outcome = safepoint(*words.split())
    assert outcome.stdout.count("each step") == 3
    document = safepoint(*words.split(), "--json").document
    assert [loss["interval_s"] for loss in document["policies"]] == [None, 0, 0, 0]


def test_no_interval_if_everything_is_announced() -> None:
    outcome = safepoint(*INTERVAL, "--announced", "1")
    assert outcome.stdout.startswith("best interval  none: periodic saves gain nothing; 100.00 %")
    assert safepoint(*INTERVAL, "--announced", "1", "--json").document["best_interval_s"] is None


@pytest.mark.parametrize(
    "words",
    [
        "--mtbf 1h --stall 0s --durable 10h --announced 1",
        "--mtbf 1h --stall 1s --durable 20h --announced 1",
        "--mtbf 10m --stall 9m --durable 2h --announced 0.9",
        "--mtbf 1h --stall 1s --durable 2h",
        "--mtbf 1s --stall 0s --durable 36500d --announced 0.5",
    ],
)
def test_saves_that_are_durable_late_have_rows_and_a_picture(words: str, project: Path) -> None:
    """Also if a save takes longer than many times the mean time between interruptions."""
    document = safepoint("plan", "interval", *words.split(), "--svg", "late.svg", "--json").document
    assert len(document["intervals"]) >= 5
    picture = ElementTree.fromstring((project / "late.svg").read_text())
    (description,) = [child.text or "" for child in picture if child.tag.endswith("desc")]
    assert ("The least time is lost at" in description) == (document["best_interval_s"] is not None)
    assert "no interval is shorter than" in safepoint("plan", "interval", *words.split()).stdout


@pytest.mark.parametrize(
    "words",
    [INTERVAL, (*INTERVAL, "--announced", "0.5", "--durable", "1m"), (*INTERVAL, "--announced", "1"), SIMULATE],
)
def test_pictures(words: tuple[str, ...], project: Path) -> None:
    outcome = safepoint(*words, "--svg", "curve.svg")
    assert outcome.code == 0, outcome.stderr
    assert "the picture is in curve.svg" in outcome.stdout
    assert ElementTree.fromstring((project / "curve.svg").read_text()).tag.endswith("svg")
    assert safepoint(*words, "--svg", "missing/curve.svg").code == 13


def test_the_costs_of_the_article() -> None:
    document = safepoint("plan", "cost", "--example", "--json").document
    assert {figure["stated"] for figure in document["figures"]} == {3960, 165, 660, 53, 213, 9, 37, 176, 9100, 92}
    words = ("plan", "cost", "--price", "55", "--interval", "1h")
    losses = {loss["policy"]: loss for loss in safepoint(*words, "--json").document["policies"]}
    assert losses["no checkpoints"]["money"] > losses["periodic"]["money"] > losses["snapshots and JIT"]["money"]
    assert "snapshots and JIT" in safepoint(*words).stdout
    assert "MONEY" in safepoint("plan", "cost").stdout


def test_a_given_interval_that_is_too_short_has_a_note() -> None:
    words = ("plan", "cost", "--price", "55", "--interval", "1h", "--announced", "0", "--durable", "5h")
    document = safepoint(*words, "--json").document
    assert [loss["interval_s"] for loss in document["policies"][1:]] == [3600, 3600, pytest.approx(17_999.99)]
    (note,) = document["notes"]
    assert note.startswith("snapshots and JIT: the interval is 5 h 00 m in place of 1h")
    assert f"note           {note}" in safepoint(*words).stdout
    assert safepoint(*words[:-2], "--json").document["notes"] == []


def _job(name: str, *events: tuple[str, str, dict[str, object]]) -> None:
    """A job of this machine that is only in the history, with these events of its run."""
    with History() as history:
        history.add(JobSpec(name=name, program=("train.py",), python="python", working_dir="/"), actor="me")
        history.become(name, JobState.COMPLETE, actor="me", exit_code=0, attempt=1)  # needs no supervisor
    folder = job_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"time": time, "event": event, "actor": "rank 0", **fields}) for time, event, fields in events
    ]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")


def test_the_costs_of_a_job() -> None:
    _job(
        "tiny",
        ("2026-01-01T00:00:00.000Z", "attempt_started", {}),
        ("2026-01-01T01:30:00.000Z", "saved", {"step": 9}),
        ("2026-01-01T02:00:00.000Z", "failed", {}),
        ("2026-01-01T02:10:00.000Z", "resumed", {"step": 9}),
        ("2026-01-01T02:12:00.000Z", "attempt_started", {}),
        ("2026-01-01T03:12:00.000Z", "interrupted", {"step": 30, "saved": True}),
    )
    words = ("plan", "cost", "--for", "tiny", "--price", "60")
    document = safepoint(*words, "--json").document
    assert document["trained_s"] == 3 * 3600
    assert document["seconds"] == {
        "lost": 1800,
        "down": 720,
        "without_checkpoints": 7200,
        "saved": 5400,
        "with_interval": 0,
        "saved_against_interval": -1800,
    }
    assert document["money"]["lost"] == pytest.approx(30)
    (past,) = document["interruptions"]
    assert (past["cause"], past["lost_s"]) == ("machine", 1800)
    text = safepoint(*words).stdout
    assert text.startswith("tiny trained for 3 h 00 m, with 1 interruption:")
    assert "how much less was lost in fact" in text
    assert "-30 m 00 s" in text, "a save every hour had lost less, as the interruption came right after one"
    assert safepoint(*words, "--interval", "45m", "--json").document["seconds"]["with_interval"] == 1800


def test_a_job_without_training() -> None:
    _job("idle")
    outcome = safepoint("plan", "cost", "--for", "idle")
    assert (outcome.code, outcome.stdout) == (10, "")
    assert "has no training" in outcome.stderr


def test_a_simulation() -> None:
    first = safepoint(*SIMULATE, "--json").document
    assert first == safepoint(*SIMULATE, "--json").document
    assert first != safepoint(*SIMULATE, "--seed", "1", "--json").document
    assert {(row["ranks"], row["policy"]) for row in first["results"]} > {(8, "hf-jit"), (64, "safepoint")}
    for row in first["results"]:
        assert 0 <= row["ettr"] <= 1
        lost = row["repeated_hours"] + row["stalled_hours"] + row["down_hours"]
        assert row["lost_hours"] == pytest.approx(lost, abs=1e-9)
        assert row["ettr"] == pytest.approx(row["expected_ettr"], abs=0.03)
    text = safepoint(*SIMULATE).stdout
    assert "seed 0" in text
    assert "466 interruptions in 54 days" in text
    assert "safepoint-replicas *" in text
    assert "64 ranks, interrupted every" in text


def test_a_simulation_with_everything() -> None:
    words = (
        "--failures none --machine-failures 6/year --ranks-only 0.5 --rack-failures 1/month --machines-per-rack 4 "
        "--preemptions 2/day --notice 1m --waiting 20m --reclaims 1/week --reclaim-notice 2m --store-requests 3500 "
        "--state 1Gi --ranks-per-machine 4 --policy safepoint --policy hf-best --machine-rate 1G --store-rate 1T "
        "--step 1s --restart 30s --replace 2m --json"
    )
    document = safepoint(*SIMULATE, *words.split()).document
    assert [row["policy"] for row in document["results"]] == ["safepoint", "hf-best"] * 2
    assert all(row["waiting_hours"] > 0 for row in document["results"])
    none = safepoint(*SIMULATE, "--failures", "none", "--json").document
    assert all(row["between_s"] is None and row["interruptions"] == 0 for row in none["results"])
    assert "never interrupted" in safepoint(*SIMULATE, "--failures", "none").stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((*INTERVAL, "--durable", "1s"), "--durable 1s is shorter than --stall 2s"),
        ((*INTERVAL, "--announced", "50"), "50 % is 0.5"),
        ((*INTERVAL, "--announced", "0.7", "--ranks-only", "0.7"), "their sum is more than 1"),
        (("plan", "interval", "--mtbf", "4", "--stall", "2s"), "--mtbf: '4' is not a time"),
        (("plan", "interval", "--mtbf", "0s", "--stall", "2s"), "--mtbf '0s' is too short"),
        (("plan", "cost", "--price", "nan"), "--price nan is not a number"),
        (("plan", "cost", "--price", "-1"), "--price -1 is not a number"),
        (("plan", "cost", "--interruptions", "4"), "for example --interruptions 4/week"),
        (("plan", "cost", "--interruptions", "0/week"), "--interruptions is 0"),
        (("plan", "cost", "--interruptions", "4/fortnight"), "hour, day, week, month or year"),
        (("plan", "cost", "--durable", "0s"), "--durable 0s is shorter than --stall"),
        (("plan", "cost", "--on", "local"), "add --for JOB"),
        ((*SIMULATE, "--policy", "safepont"), "did you mean safepoint?"),
        ((*SIMULATE, "--failures", "lama3"), "did you mean llama3?"),
        ((*SIMULATE, "--ranks", "8,,9"), "'' is not a number of ranks"),
        ((*SIMULATE, "--ranks", "0"), "'0' is not a number of ranks"),
        ((*SIMULATE, "--ranks", ",".join(map(str, range(1, 99)))), "at most 64 are compared"),
        ((*SIMULATE, "--days", "inf"), "--days inf"),
        ((*SIMULATE, "--trials", "0"), "--trials 0"),
        ((*SIMULATE, "--days", "36525", "--ranks", "10000000"), "reduce --trials, --days or --ranks"),
        ((*SIMULATE, "--state", "4 GB"), "--state: '4 GB' is not a size"),
        ((*SIMULATE, "--state", "0"), "--state '0' is not a size from"),
        ((*SIMULATE, "--store-requests", "0"), "--store-requests 0 is less than one"),
        ((*SIMULATE, "--ranks-only", "0.95"), "give at most 0.90"),
        ((*SIMULATE, "--reclaims", "999999999/hour"), "more than one in each second"),
    ],
)
def test_bad_input(words: tuple[str, ...], expected: str) -> None:
    outcome = safepoint(*words)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert expected in " ".join(outcome.stderr.split())
    assert safepoint(*words, "--json").exit_error["code"] == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "interval --mtbf 4h --stall 2s --snapshot-stall 1s",
            "--snapshot-stall can be used only with --snapshot-every",
        ),
        (
            "interval --mtbf 4h --stall 2s --ranks-restart 1s",
            "--ranks-restart is for interruptions that end only ranks",
        ),
        ("interval --mtbf 4h --stall 2s --copied 3s", "--copied is for interruptions that end only ranks"),
        ("interval --mtbf 4h --stall 2s --notice-restart 3s", "--notice-restart is for announced interruptions"),
        ("cost --example --price 3", "--price cannot be used with --example"),
        ("cost --example --for job", "--for cannot be used with --example"),
        ("cost --example --on local", "--on cannot be used with --example"),
        ("cost --example --interval 1h", "--interval cannot be used with --example"),
        ("cost --example --blocking 1h", "--blocking cannot be used with --example"),
        ("cost --for job --interruptions 4/week", "--interruptions cannot be used with --for"),
        ("cost --for job --announced 1", "--announced cannot be used with --for"),
        ("cost --for job --durable 1m", "--durable cannot be used with --for"),
        ("cost --announced 0 --notice-save 1m", "--notice-save is for announced interruptions"),
        ("simulate --failures none --ranks-only 0.5", "--ranks-only is for failures of machines"),
        ("simulate --failures none --waiting 1m", "--waiting is for preemptions"),
        ("simulate --preemptions 0/week --waiting 1m", "--waiting is for preemptions"),
        ("simulate --failures meta-rsc1 --notice 1m", "--notice is for preemptions and maintenance"),
        ("simulate --reclaim-notice 1m", "--reclaim-notice is for reclaims"),
        ("simulate --machines-per-rack 4", "--machines-per-rack is for failures of racks"),
        ("simulate --failures meta-rsc1 --restart 1m", "--restart is for failures of ranks only"),
        ("simulate --failures none --replace 1m", "--replace is for other failures"),
        ("simulate --failures none --machine-failures 1/day --ranks-only 1 --replace 1m", "--replace is for other"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(words: str, expected: str) -> None:
    outcome = safepoint("plan", *words.split())
    assert (outcome.code, outcome.stdout) == (2, "")
    assert expected in " ".join(outcome.stderr.split())
    assert "nothing was computed" in " ".join(outcome.stderr.split())


def test_the_answers_state_what_they_were_computed_with() -> None:
    """Defaults too, and in JSON as numbers of seconds and bytes."""
    words = ("plan", "interval", "--mtbf", "4h", "--stall", "2s", "--announced", "0.5")
    assert (
        "inputs         --mtbf 4h --stall 2s --restart 0s --announced 0.5 --ranks-only 0\n"
        in safepoint(*words).stdout
    )
    inputs = safepoint(*words, "--json").document["inputs"]
    assert (inputs["between_s"], inputs["stall_s"], inputs["announced"]) == (14_400, 2, 0.5)
    text = safepoint("plan", "cost", "--interruptions", "2/day").stdout
    assert (
        "inputs         --price 0 --interruptions 2/day --announced 1 --ranks-only 0 --job 72h --blocking 10m" in text
    )
    assert "notice-save" not in safepoint("plan", "cost", "--announced", "0").stdout
    assert safepoint("plan", "cost", "--json").document["inputs"]["job_s"] == 72 * 3600
    words = ("plan", "simulate", "--ranks", "8", "--trials", "2", "--state", "1G")
    assert (
        "platform       8 ranks on a machine, each with 1.0 GB; 2.0 GB/s from a machine" in safepoint(*words).stdout
    )
    assert safepoint(*words, "--json").document["inputs"]["state_bytes"] == 10**9


def test_json_has_no_numbers_that_are_none() -> None:
    """JSON has neither NaN nor infinity."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} in JSON")

    for words in (
        (*INTERVAL, "--announced", "1"),
        ("plan", "cost", "--announced", "1"),
        (*SIMULATE, "--failures", "none", "--trials", "1"),
        (*SIMULATE, "--failures", "queue", "--policy", "safepoint"),
    ):
        json.loads(safepoint(*words, "--json").stdout, parse_constant=refuse)
