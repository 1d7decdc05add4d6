"""One cluster for all tests of the lane, and a namespace for each."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.browser import served
from tests.support.cluster.figures import Figures
from tests.support.cluster.running import RunningCluster, chosen_cluster
from tests.support.cluster.workspace import Workspace, workspace
from tests.support.visitor import Visitor

PLACE = "team"
"""The name of the namespace in the settings of `visitor`."""

_FIGURES = Figures()


@pytest.fixture(scope="session")
def figures() -> Figures:
    """Collects what is measured; pytest's output ends with it."""
    return _FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _FIGURES.table():
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(autouse=True)
def collected(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test leaves open with a reason, such as Kubeflow's client, is no warning in the next test."""
    yield
    if request.node.get_closest_marker("filterwarnings"):
        gc.collect()


@pytest.fixture(scope="session")
def cluster() -> Iterator[RunningCluster]:
    with chosen_cluster() as chosen:
        yield chosen


@pytest.fixture
def team(cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """A namespace, and a kubeconfig whose current context is in it."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    with workspace(cluster, tmp_path) as team:
        yield team


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """The output of the same training on this machine without a fault, for a number of ranks and of epochs."""
    found: dict[tuple[int, int], Path] = {}

    def run(ranks: int, epochs: int) -> Path:
        if (ranks, epochs) not in found:
            output = tmp_path_factory.mktemp("undisturbed") / str(ranks)
            program = jobs.tiny(output, "--epochs", str(epochs))
            job = jobs.safepoint(output, "--nproc-per-node", str(ranks), program=program)
            assert job.wait(200) == 0, job.text
            found[ranks, epochs] = output
        return found[ranks, epochs]

    return run


@pytest.fixture
def visitor(team: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Visitor]:
    """A visitor of a dashboard that shows the namespace as the place `team`."""
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    settings = tmp_path / "xdg_config_home" / "safepoint" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f'[places.{PLACE}]\ncontext = "test"\nnamespace = "{team.namespace}"\n')
    with served(tmp_path, "--on", PLACE) as server:
        yield Visitor(server)
