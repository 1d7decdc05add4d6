"""What a job is to do: written down and read again, and an invalid one is refused."""

import json
import string
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.errors import UsageError
from safepoint.jobs.model.identity import SECRET_KEYS
from safepoint.jobs.model.spec import JobSpec, check_name, name_from, names_of_secrets
from safepoint.settings.run_settings import RunSettings
from tests.support.job_values import job_spec

texts = st.text(max_size=20)
variables = st.text(string.ascii_letters + "_", min_size=1, max_size=9)
specs = st.builds(
    job_spec,
    st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True),
    program=st.lists(texts, min_size=1, max_size=4).map(tuple),
    is_module=st.booleans(),
    python=texts,
    working_dir=texts.map("/{}".format),
    num_nodes=st.integers(1, 9),
    ranks_per_node=st.integers(1, 9),
    cpu_per_node=st.integers(0, 9),
    gpu_per_node=st.integers(0, 9),
    max_restarts=st.integers(0, 9),
    env=st.dictionaries(variables, st.text(st.characters(exclude_characters="\0"), max_size=9), max_size=3),
    data_connection=st.none() | texts,
    priority=st.integers(-9, 9),
    packages=st.lists(texts.map("a{}".format), max_size=3).map(tuple),
    settings=st.fixed_dictionaries(
        {}, optional={"save_steps": st.integers(1, 9), "grace_s": st.floats(1, 99), "from_scratch": st.booleans()}
    ),
)


@settings(max_examples=100, deadline=None)
@given(spec=specs)
def test_what_is_written_down_is_read_again(spec: JobSpec) -> None:
    """All fields, through JSON."""
    assert JobSpec.from_json(spec.to_json()) == spec


def test_what_launchers_set_is_not_written_down() -> None:
    """It belongs to one attempt."""
    spec = JobSpec(
        name="a",
        program=("x",),
        python="python",
        working_dir="/",
        settings=RunSettings(record_folder="/tmp/x", launcher_pid=7, keeper="k"),
    )
    read = JobSpec.from_json(spec.to_json())
    assert (read.settings.record_folder, read.settings.launcher_pid, read.settings.keeper) == (None, None, None)


def test_what_a_newer_release_has_added_is_ignored() -> None:
    """In the job and in the options of its run."""
    record = json.loads(job_spec().to_json())
    record["colour"] = "green"
    record["settings"]["shape"] = "round"
    assert JobSpec.from_json(json.dumps(record)) == job_spec()


def test_what_an_older_release_did_not_know_has_its_default() -> None:
    """Whatever field is missing, as long as it has one."""
    needed = {"name", "program", "python", "working_dir", "settings"}
    for field in {field.name for field in fields(JobSpec)} - needed:
        record = json.loads(job_spec().to_json())
        del record[field]
        assert JobSpec.from_json(json.dumps(record)) == job_spec(), field


@pytest.mark.parametrize("name", ["a", "0", "a-b", "a" * 63])
def test_names_that_kubernetes_takes(name: str) -> None:
    """Lower case letters, digits, dashes between them."""
    check_name(name)


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a_b", "a.b", "a" * 64, "a/b", "..", "a\n", "é", " a"])
def test_other_names_are_refused(name: str) -> None:
    """One of them would even be another folder."""
    with pytest.raises(UsageError, match=r"the job name .* is invalid"):
        job_spec(name)


@given(text=st.text(max_size=100))
def test_a_name_can_be_made_of_anything(text: str) -> None:
    """And is unique by what is added."""
    name = name_from(text, "1a2b")
    check_name(name)
    assert name.endswith("-1a2b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"program": ()}, "no program"),
        ({"num_nodes": 0}, "num_nodes 0"),
        ({"ranks_per_node": 0}, "ranks_per_node 0"),
        ({"cpu_per_node": -1}, "cpu_per_node -1"),
        ({"gpu_per_node": -1}, "gpu_per_node -1"),
        ({"max_restarts": -1}, "max_restarts -1"),
        ({"working_dir": "here"}, "must be an absolute path"),
        ({"num_nodes": 1.5}, "num_nodes must be a whole number, not 1.5"),
        ({"num_nodes": True}, "num_nodes must be a whole number, not True"),
        ({"priority": "high"}, "priority must be a whole number, not 'high'"),
        ({"priority": 1.5}, "priority must be a whole number, not 1.5"),
        ({"priority": None}, "priority must be a whole number, not None"),
        ({"program": "train.py"}, "program must be a tuple of strings, not 'train.py'"),
        ({"env": ["A=1"]}, "env must be a mapping of names to strings, not a value of type list"),
        ({"env": {"A": 1}}, "env must be a mapping"),
        ({"data_connection": 5}, "data_connection must be a string or None, not 5"),
        ({"is_module": 1}, "is_module must be True or False, not 1"),
        ({"env": {"1A": "x"}}, "'1A'"),
        ({"env": {"A=B": "x"}}, "'A=B'"),
        ({"env": {"A": "x\0"}}, "'A'"),
        ({"env": {"AWS_SECRET_ACCESS_KEY": "x", "A": "b"}}, "env has AWS_SECRET_ACCESS_KEY, but env is stored"),
        ({"env": {"AWS_SESSION_TOKEN": "x", "AWS_ACCESS_KEY_ID": "b"}}, "AWS_ACCESS_KEY_ID, AWS_SESSION_TOKEN"),
        (
            {"env": {"AZURE_STORAGE_ACCOUNT_KEY": "x", "A": "b"}},
            "env has AZURE_STORAGE_ACCOUNT_KEY, but env is stored",
        ),
        ({"env": {"AZURE_STORAGE_SAS_TOKEN": "x"}}, "env has AZURE_STORAGE_SAS_TOKEN"),
        ({"env": {"GOOGLE_SERVICE_ACCOUNT_KEY": "x"}}, "env has GOOGLE_SERVICE_ACCOUNT_KEY"),
        ({"env": {"aws_secret_access_key": "x"}}, "env has aws_secret_access_key"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, object], message: str) -> None:
    """With the field and its value."""
    with pytest.raises(UsageError, match=message):
        job_spec(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"package_indexes": ("https://me:geheim@host/simple",)}, "address of a package index contains a user name"),
        (
            {"package_indexes": ("https://host/simple", "http://geheim@host")},
            "address of a package index contains a user",
        ),
        ({"packages": ("git+https://geheim:token@github.com/a/b",)}, "a package contains a user name or a password"),
        ({"packages": ("git+https://geheim@github.com/a/b@main",)}, "a package contains a user name or a password"),
        ({"packages": ("thing @ https://a:geheim@host/thing.whl",)}, "a package contains a user name or a password"),
        ({"packages": ("git+ssh://a:geheim@host/thing",)}, "a package contains a user name or a password"),
        ({"packages": ("peft", "--index-url=http://u:geheim@x")}, "a package contains a user name or a password"),
        ({"packages": ("--index-url=http://x/geheim",)}, "or an option of pip"),
        ({"packages": (" -r geheim.txt",)}, "or an option of pip"),
        ({"packages": ("",)}, "is empty"),
    ],
)
def test_a_password_among_packages_is_refused_and_not_repeated(changes: dict[str, object], message: str) -> None:
    """The history, the command line of pip and its log would have it."""
    with pytest.raises(UsageError, match=message) as caught:
        job_spec(**changes)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(SECRET_KEYS))
def test_no_key_of_an_object_store_is_stored(name: str) -> None:
    """The history would have it, and the message does not repeat it."""
    with pytest.raises(UsageError, match=f"env has {name}, but env is stored") as caught:
        job_spec(env={name: "geheim"})
    assert "geheim" not in f"{caught.value} {caught.value.hint}"


def test_variables_that_may_be_secret() -> None:
    """By their names, or because an address in them has a password."""
    env = {"HF_TOKEN": "x", "HTTPS_PROXY": "http://me:geheim@proxy", "URL": "http://host/a", "GIT": "git+ssh://git@h"}
    assert names_of_secrets(env) == ["HF_TOKEN", "HTTPS_PROXY"]


def test_packages_from_a_repository() -> None:
    """Without a password; the user of ssh is everybody's, and a revision is no user."""
    wanted = ("git+ssh://git@github.com/a/b.git@v1", "thing @ git+https://github.com/a/b@v1", "peft>=0.18")
    assert job_spec(packages=wanted).packages == wanted
