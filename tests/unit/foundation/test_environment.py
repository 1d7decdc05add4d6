"""Where a process runs: among its peers, and which modules it can import."""

import os
from pathlib import Path

import pytest

from safepoint.foundation.environment import Place, forget_service_links, is_importable


def test_a_lone_process_is_first_of_one() -> None:
    """Without torchrun's variables, or with empty ones, there is one rank."""
    assert Place.from_environment({}) == Place.from_environment({"RANK": "", "WORLD_SIZE": ""}) == Place()
    assert Place().is_first


def test_torchruns_variables_are_read() -> None:
    """Rank, world, local rank and restarts arrive, and only rank 0 is first."""
    place = Place.from_environment(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
    )
    assert place == Place(rank=3, world_size=4, local_rank=1, restart=2)
    assert not place.is_first


@pytest.mark.parametrize(
    ("environ", "word"),
    [({"RANK": "x"}, "RANK='x'"), ({"RANK": "1"}, "WORLD_SIZE=1"), ({"RANK": "-1"}, "RANK=-1")],
)
def test_what_cannot_be_is_named(environ: dict[str, str], word: str) -> None:
    """A variable that is no number, or a rank outside the world, is in the message."""
    with pytest.raises(ValueError, match=word):
        Place.from_environment(environ)


def test_a_kubernetes_service_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in every pod beside a Service whose name begins with safepoint is no setting; a setting stays."""
    links = ("SAFEPOINT_METRICS_PORT", "SAFEPOINT_METRICS_PORT_80_TCP", "SAFEPOINT_PORT", "PET_MASTER_PORT")
    for name in links:
        for value in ("tcp://10.0.0.7:80", "sctp6://[::1]:80"):
            monkeypatch.setenv(name, value)
            forget_service_links()
            assert name not in os.environ
    settings = {
        "SAFEPOINT_GRACE": "60",
        "SAFEPOINT_METRICS_PORT": "9000",
        "SAFEPOINT_OUTPUT_DIR": "s3://bucket/run",
        "PET_MASTER_PORT": "29500",
        "OTHER_PORT": "tcp://10.0.0.7:80",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    forget_service_links()
    assert {name: os.environ[name] for name in settings} == settings


def test_what_python_would_find(tmp_path: Path) -> None:
    """In the folder it starts in, and where everything is installed; nothing of it runs."""
    (tmp_path / "mine.py").write_text("raise SystemExit('was run')")
    assert is_importable("mine", str(tmp_path))
    assert is_importable("json.tool", str(tmp_path))
    assert not is_importable("mine", str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("name", ["no_such_module", "no.such.mod", "", ".json"])
def test_what_it_would_not(name: str, tmp_path: Path) -> None:
    """Nor what is no name at all."""
    assert not is_importable(name, str(tmp_path))
