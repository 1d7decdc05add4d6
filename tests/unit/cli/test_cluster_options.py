"""Tests of safepoint.cli.cluster_options: places of the settings, without a cluster."""

import json
from pathlib import Path

import pytest

from safepoint.errors import ExitCode, UsageError
from safepoint.foundation.configuration import ClusterPlace, Configuration, user_file
from safepoint.jobs.cluster.manifests import Runtime, manifests_for
from safepoint.jobs.cluster.spec import ClusterSpec
from tests.support.cluster.workspace import runtime
from tests.support.commands import safepoint


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own settings file, in a home folder of its own."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("SAFEPOINT_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    file = user_file()
    file.parent.mkdir(parents=True)
    return file


def test_a_place_has_a_context_and_a_namespace(settings: Path) -> None:
    settings.write_text('[places.a]\ncontext = "prod"\nnamespace = "team"\ndefault = true\n[places.b]\n')
    found = Configuration.load()
    assert found.places == {
        "a": ClusterPlace(name="a", context="prod", namespace="team", is_default=True),
        "b": ClusterPlace(name="b"),
    }
    assert found.default_place == found.places["a"]
    shown = safepoint("config", "show").stdout
    assert '[places.a]\ncontext = "prod"\nnamespace = "team"\ndefault = true\n' in shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[places]\ncontext = 'a'", "each place has a table of its own"),
        ("[places.a.b]\ncontext = 'a'", "each place has a table of its own"),
        ("[places.a]\ncontext = 5", "write it in quotation marks"),
        ("[places.a]\nnamespace = ''", "write it in quotation marks"),
        ("[places.a]\ndefault = 'yes'", "write true or false"),
        ("[places.a]\ndefault = true\n[places.b]\ndefault = true", "a is the default already"),
    ],
)
def test_what_is_no_place_is_refused(settings: Path, text: str, why: str) -> None:
    settings.write_text(text)
    with pytest.raises(UsageError, match=why):
        Configuration.load()


@pytest.mark.parametrize("command", [("list",), ("config", "show"), ("submit", "--on", "b", "train.py")])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("contxt = 'a'", "a place has no such option; nothing was done — did you mean context?"),
        ("queu = 'a'", "did you mean queue?"),
        ("nnodes = 'two'", "must be a whole number; nothing was done — see `safepoint submit --help`"),
        ("on = 'b'", "a place has no such option"),
        ("dry-run = true", "a file cannot set it"),
    ],
)
def test_what_is_no_option_of_submit_is_refused(
    settings: Path, text: str, why: str, command: tuple[str, ...]
) -> None:
    """By every command: a wrong key could lead it to another cluster."""
    settings.write_text(f"[places.a]\n{text}\n[places.b]\n")
    done = safepoint(*command)
    assert done.code == ExitCode.USAGE
    assert why in done.stderr


def test_command_line_then_variable_then_place_then_other_tables(
    settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.write_text(
        '[places.a]\nqueue = "gpus"\nnnodes = 4\ngrace = 90\nmemory = "8Gi"\nconnection = "models"\n'
        '[places.b]\nqueue = "other"\n[submit]\nqueue = "general"\nmemory = "1Gi"\nruntime = "own"\n'
        "[run]\ngrace = 60\nsave-steps = 5\n"
    )
    Path("train.py").touch()
    seen: list[ClusterSpec] = []
    monkeypatch.setattr("safepoint.cli.on_cluster.submit", lambda on, namespace, spec, **_: seen.append(spec))
    monkeypatch.setenv("SAFEPOINT_NNODES", "3")
    common = ("--output-dir", "s3://b/run")
    for options in (("--on", "a", "--memory", "2Gi"), ("--on", "b"), ("--on", "else")):
        done = safepoint("submit", *common, *options, "train.py", "--on", "c", "--queue", "of-the-script")
        assert done.code == 0, done.stderr
    a, b, other = seen
    assert (a.queue, a.num_nodes, a.grace_s, a.resources["memory"]) == ("gpus", 3, 90, "2Gi")
    assert (a.connection, a.runtime, a.settings.save_steps) == ("models", "own", 5)
    assert (b.queue, b.grace_s, b.resources["memory"], b.connection) == ("other", 60, "1Gi", None)
    assert other.queue == "general"
    shown = safepoint("config", "show", "--origin").stdout
    assert f'queue = "gpus"  # {settings}, line 2' in shown


@pytest.mark.parametrize(
    ("options", "number", "counted"),
    [
        (("cpu",), None, "cpu"),
        (("gpu",), None, "gpu"),
        (("cpu", "--cpu", "4"), 4, "cpu"),
        (("gpu", "--gpu", "2"), 2, "gpu"),
        (("auto", "--gpu", "2"), None, None),
        (("3",), 3, None),
    ],
)
def test_ranks_are_those_of_the_request_or_of_the_pod(
    options: tuple[str, ...], number: int | None, counted: str | None, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("train.py").touch()
    seen: list[ClusterSpec] = []
    monkeypatch.setattr("safepoint.cli.on_cluster.submit", lambda on, namespace, spec, **_: seen.append(spec))
    done = safepoint("submit", "--on", "a", "--nproc-per-node", *options, "train.py")
    assert done.code == 0, done.stderr
    assert (seen[0].ranks_per_node, seen[0].ranks_from) == (number, counted)


def test_the_general_table_may_name_the_place(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.write_text('[submit]\non = "a"\n[places.a]\nnnodes = 2\n')
    Path("train.py").touch()
    seen: list[ClusterSpec] = []
    monkeypatch.setattr("safepoint.cli.on_cluster.submit", lambda on, namespace, spec, **_: seen.append(spec))
    assert safepoint("submit", "--output-dir", "s3://b/run", "train.py").code == 0
    assert seen[0].num_nodes == 2


def test_an_error_names_the_line_of_the_place(settings: Path) -> None:
    settings.write_text('[places.a]\npriority-class = "low"\n')
    Path("train.py").touch()
    done = safepoint("submit", "--on", "a", "train.py")
    assert done.code == ExitCode.USAGE
    assert f"(--priority-class is set by {settings}, line 2)" in done.stderr


def test_a_project_names_no_cluster(settings: Path) -> None:
    """Else a folder that someone sends could direct commands to another cluster."""
    Path("safepoint.toml").write_text('[places.a]\ncontext = "prod"\n')
    with pytest.raises(UsageError, match="clusters are a user's setting, and not of a project"):
        Configuration.load()


def test_jobs_of_this_machine_are_listed_when_the_default_place_cannot_be_reached(settings: Path) -> None:
    settings.write_text('[places.a]\ncontext = "prod"\ndefault = true\n')
    done = safepoint("list")
    assert (done.code, done.stdout) == (0, "no jobs\n")
    assert "the jobs of place a cannot be listed: there is no kubeconfig" in done.stderr
    assert "there is no kubeconfig" in safepoint("status", "x").stderr
    assert "there is no kubeconfig" in safepoint("list", "--on", "a").stderr
    assert safepoint("list", "--on", "local").stderr == ""


@pytest.fixture
def submitted(settings: Path, monkeypatch: pytest.MonkeyPatch) -> list[ClusterSpec]:
    """The jobs that `submit --on` would create."""
    Path("train.py").touch()
    found: list[ClusterSpec] = []
    monkeypatch.setattr("safepoint.cli.on_cluster.submit", lambda on, namespace, spec, **_: found.append(spec))
    return found


def test_a_priority_has_no_effect_on_a_cluster(submitted: list[ClusterSpec]) -> None:
    done = safepoint("submit", "--on", "a", "--priority", "5", "train.py")
    assert (done.code, submitted) == (ExitCode.USAGE, [])
    assert "--priority has no effect with --on a — use --priority-class, with --queue" in done.stderr


@pytest.mark.parametrize("options", [("--memory", ""), ("--queue", ""), ("--dry-run",)])
def test_an_option_for_clusters_has_no_effect_on_this_machine(settings: Path, options: tuple[str, ...]) -> None:
    """Also an empty one."""
    done = safepoint("submit", *options, "train.py")
    assert done.code == ExitCode.USAGE
    assert f"{options[0]} has no effect on this machine" in done.stderr


def test_several_options_without_effect(settings: Path) -> None:
    """The message and its hint are in the plural."""
    done = safepoint("submit", "--memory", "1Gi", "--queue", "a", "train.py")
    assert done.code == ExitCode.USAGE
    assert "--queue, --memory have no effect on this machine" in done.stderr
    assert "or omit the options" in done.stderr


@pytest.mark.parametrize("command", [("submit", "train.py"), ("doctor",)])
def test_local_is_this_machine_for_every_command(settings: Path, command: tuple[str, ...]) -> None:
    """A table may name a cluster, and `--on local` overrides it."""
    settings.write_text('[submit]\non = "a"\n[doctor]\non = "a"\n')
    name, *arguments = command
    done = safepoint(name, "--on", "local", "--namespace", "team", *arguments)
    assert done.code == ExitCode.USAGE
    assert "--namespace has no effect on this machine" in done.stderr


@pytest.mark.parametrize(
    ("options", "variables", "table", "grace_s"),
    [
        ((), {}, "", None),
        (("--grace", "30"), {}, "", 30),
        ((), {"SAFEPOINT_GRACE": "30"}, "", 30),
        ((), {}, "[run]\ngrace = 30\n", 30),
    ],
)
def test_an_option_that_equals_its_default_is_given_all_the_same(
    submitted: list[ClusterSpec],
    settings: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    variables: dict[str, str],
    table: str,
    grace_s: int | None,
) -> None:
    """The runtime has a grace period of its own, and its pods may have variables of their own."""
    settings.write_text(table)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    done = safepoint("submit", "--on", "a", *options, "--resume", "auto", "--verify-access", "train.py")
    assert done.code == 0, done.stderr
    (spec,) = submitted
    assert spec.grace_s == grace_s
    trainer = manifests_for(spec, Runtime(document=runtime())).trainjob["spec"]["trainer"]
    sent = {entry["name"]: entry["value"] for entry in trainer["env"]}
    assert sent["SAFEPOINT_GRACE"] == str(grace_s or 60)
    assert (sent["SAFEPOINT_RESUME"], sent["SAFEPOINT_VERIFY_ACCESS"]) == ("auto", "1")
    assert "SAFEPOINT_ON_UPLOAD_FAILURE" not in sent


def test_the_plan_of_a_model_that_an_argument_names(submitted: list[ClusterSpec], tmp_path: Path) -> None:
    fields = {"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 1, "num_attention_heads": 2}))
    where = ("--on", "a", "--output-dir", "s3://b/run", "--save-total-limit", "2")
    named = ("train.py", "--model_name_or_path", str(tmp_path / "config.json"))
    for options in ((), ("--local-limit", "5Gi"), ("--local-limit", "none")):
        done = safepoint("submit", *where, *options, *named)
        assert done.code == 0, done.stderr
    automatic, given, none = submitted
    assert automatic.needs is not None
    assert automatic.needs.local_bytes is not None
    assert (automatic.staging_bytes, automatic.is_staging_given) == (None, False)
    assert (given.staging_bytes, given.is_staging_given) == (5 << 30, True)
    assert (none.staging_bytes, none.is_staging_given) == (None, True)
    assert safepoint("submit", *where, "train.py").code == 0
    assert submitted[-1].needs is None


def test_a_local_limit_without_a_local_folder_is_a_warning(submitted: list[ClusterSpec]) -> None:
    done = safepoint("submit", "--on", "a", "--output-dir", "pvc://c/run", "--local-limit", "5Gi", "train.py")
    assert (done.code, len(submitted)) == (0, 1)
    assert "--local-limit 5Gi has no effect with output location pvc://c/run" in done.stderr


def test_a_limit_of_shared_memory(submitted: list[ClusterSpec]) -> None:
    done = safepoint("submit", "--on", "a", "--shared-memory", "8Gi", "--memory", "32Gi", "train.py")
    assert (done.code, [spec.shared_memory_bytes for spec in submitted]) == (0, [8 << 30])
    done = safepoint("submit", "--on", "a", "--shared-memory", "8Gi", "--memory", "4Gi", "train.py")
    assert (done.code, len(submitted)) == (2, 1)
    assert "--shared-memory 8Gi is more than the memory of the pod, 4Gi" in done.stderr
