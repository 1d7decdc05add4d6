"""A client without PyTorch: jobs on a cluster, checkpoints and the SDK; what trains says what to install."""

import importlib.metadata
import json
import sys
import tomllib
import uuid
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from safepoint.cli.failures import explain
from tests.support.blocked import TRAINING, Client
from tests.support.checkpoints import commit, prepared
from tests.support.foreign import write_foreign
from tests.support.moto_server import MotoServer

_LIMIT_BYTES = 150_000_000
_PROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"


def packages_of(*extras: str) -> dict[str, int]:
    """All packages that `pip install safepoint[EXTRAS]` brings, with their sizes in bytes."""
    project = tomllib.loads(_PROJECT.read_text())["project"]
    wanted = [(Requirement(line), frozenset[str]()) for line in project["dependencies"]]
    wanted += [
        (Requirement(line), frozenset()) for extra in extras for line in project["optional-dependencies"][extra]
    ]
    sizes: dict[str, int] = {}
    seen = set[tuple[str, frozenset[str]]]()
    while wanted:
        requirement, context = wanted.pop()
        if requirement.marker is not None and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in context | {""}
        ):
            continue
        key = (requirement.name.lower(), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found = importlib.metadata.distribution(requirement.name)
        sizes[key[0]] = sum(file.size or 0 for file in found.files or [])
        wanted += [(Requirement(line), key[1]) for line in found.requires or []]
    return sizes


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path)


@pytest.mark.parametrize("extras", [(), ("kubernetes",), ("kubernetes", "sdk")])
def test_what_a_client_installs(extras: tuple[str, ...]) -> None:
    """Nothing that trains, and less than the limit; with every extra that trains, PyTorch."""
    sizes = packages_of(*extras)
    assert not sizes.keys() & set(TRAINING)
    assert sum(sizes.values()) <= _LIMIT_BYTES


@pytest.mark.parametrize("extra", ["torch", "transformers", "lightning"])
def test_what_trains_brings_torch(extra: str) -> None:
    extras = tomllib.loads(_PROJECT.read_text())["project"]["optional-dependencies"]
    assert extra == "torch" or "safepoint[torch]" in extras[extra]
    assert {Requirement(line).name for line in extras["torch"]} == {"torch", "numpy"}


def test_commands_about_checkpoints(client: Client, moto: MotoServer) -> None:
    """In a folder and in a bucket: all that reads manifests and files, and writes them again."""
    output = prepared(client.folder / "out")
    for step in (1, 2, 3):
        commit(output, step)
    prefix = f"client-{uuid.uuid4().hex}"
    bucket = str(moto.location(prefix))
    newest = f"{output.root}/checkpoint-3"
    for words in (
        ("list", str(output.root)),
        ("verify", str(output.root)),
        ("show", newest),
        ("diff", newest, f"{output.root}/checkpoint-2"),
        ("copy", newest, f"{bucket}/checkpoint-3"),
        ("verify", bucket),
        ("list", bucket, "--json"),
        ("prune", str(output.root), "--keep", "newest=1"),
        ("repair", str(output.root)),
    ):
        done = client.run("checkpoints", *words, **moto.variables)
        assert done.returncode == 0, (words, done.stderr)
    assert [item.key for item in moto.store(prefix).list("checkpoint-3")]


def test_commands_about_jobs(client: Client) -> None:
    for words in (("list",), ("config", "show"), ("--help",), ("submit", "--help"), ("pack", "--output", "x.pyz")):
        done = client.run(*words)
        assert done.returncode == 0, (words, done.stderr)


def test_plans(client: Client) -> None:
    """A plan is made before anything that trains is installed."""
    for words in (
        ("interval", "--mtbf", "4h", "--stall", "2s", "--svg", "interval.svg"),
        ("cost", "--price", "55"),
        ("simulate", "--ranks", "8", "--days", "1", "--trials", "2"),
    ):
        done = client.run("plan", *words)
        assert done.returncode == 0, (words, done.stderr)
    assert (client.folder / "interval.svg").read_text().startswith("<svg")
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    (client.folder / "config.json").write_text(json.dumps({"model_type": "llama", **dict.fromkeys(fields, 8)}))
    for words in (("--params", "8B", "--strategy", "fsdp", "--nodes", "2"), ("config.json", "--lora-rank", "4")):
        done = client.run("plan", "storage", *words)
        assert done.returncode == 0, done.stderr
        assert "ask for" in done.stdout


def test_the_sdk(client: Client) -> None:
    code = (
        "from safepoint import KubernetesBackendConfig, TrainerClient, TransformersTrainer\n"
        "def train(): pass\n"
        "TransformersTrainer(func=train, output_dir='pvc://claim/run')\n"
        "try:\n"
        "    from safepoint import session\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "from safepoint import TrainerClient, LocalConfig\n"
        "try:\n"
        "    TrainerClient(LocalConfig()).train(trainer=TransformersTrainer(func=train))\n"
        "except NotImplementedError as error:\n"
        "    print(error)\n"
        "print(TrainerClient(LocalConfig()).list_jobs())\n"
    )
    (client.folder / "use.py").write_text(code)
    done = client.python("use.py")
    assert done.returncode == 0, done.stderr
    session, train, jobs = done.stdout.splitlines()
    assert session.startswith("safepoint.session needs PyTorch")
    assert train.startswith("a job on this machine needs PyTorch")
    assert jobs == "[]"


def test_what_trains_says_what_to_install(client: Client) -> None:
    """Exit code 16, and nothing is left behind."""
    script = client.folder / "train.py"
    script.write_text("print('trained')\n")
    for words in (("run", str(script)), ("submit", str(script))):
        done = client.run(*words)
        assert (done.returncode, done.stdout) == (16, ""), done.stderr
        assert "needs PyTorch" in done.stderr
        assert "safepoint[torch]" in done.stderr
    done = client.python("-m", "safepoint.training", str(script))
    assert done.returncode == 16
    assert "a training needs PyTorch" in done.stderr
    assert client.run("list").stdout == "no jobs\n"


def test_checkpoints_of_others(client: Client) -> None:
    """Their pickles are examined without PyTorch, too."""
    write_foreign(client.folder / "out", 4)
    broken = write_foreign(client.folder / "broken", 4)
    content = (broken / "optimizer.pt").read_bytes()
    (broken / "optimizer.pt").write_bytes(content[: len(content) // 2])
    assert "foreign" in client.run("checkpoints", "list", "out").stdout
    done = client.run("checkpoints", "adopt", "out", "--gradient-accumulation", "1")
    assert done.returncode == 0, done.stderr
    assert client.run("checkpoints", "verify", "out").returncode == 0
    done = client.run("checkpoints", "adopt", "broken", "--gradient-accumulation", "1")
    assert done.returncode == 14
    assert "optimizer.pt" in done.stdout + done.stderr


def test_a_command_that_meets_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A net below the checks above, for what is not foreseen; with PyTorch there it is a bug, and shown as one."""
    error = ModuleNotFoundError("No module named 'numpy.linalg'", name="numpy.linalg")
    assert explain(error) is None
    monkeypatch.setitem(sys.modules, "torch", None)
    code, explained = explain(error) or (0, error)
    assert code == 16
    assert "this command needs PyTorch" in str(explained)
    assert explain(ModuleNotFoundError("No module named 'other'", name="other")) is None
