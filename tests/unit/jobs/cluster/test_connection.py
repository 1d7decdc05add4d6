"""Tests of safepoint.jobs.cluster.connection."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from safepoint.errors import NotFoundError, UsageError
from safepoint.jobs.cluster.connection import connect_to, connect_with


def kubeconfig(folder: Path, *names: str, current: str | None = None, user: dict[str, Any] | None = None) -> Path:
    document = {
        "clusters": [{"name": name, "cluster": {"server": f"https://{len(name)}:6443"}} for name in names],
        "users": [{"name": name, "user": user or {"token": name}} for name in names],
        "contexts": [
            {"name": name, "context": {"cluster": name, "user": name, "namespace": f"of-{len(name)}"}}
            for name in names
        ],
        **({"current-context": current} if current else {}),
    }
    folder.mkdir(exist_ok=True)
    path = folder / "config"
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_context_with_slashes_is_found_by_its_whole_name(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, "team-a/api-cluster:6443/me", "other", current="other")
    environ = {"KUBECONFIG": str(path)}
    found = connect_to("team-a/api-cluster:6443/me", environ=environ)
    assert (found.name, found.namespace) == ("team-a/api-cluster:6443/me", "of-26")
    assert found.config.user is not None
    assert found.config.user.token == "team-a/api-cluster:6443/me"
    assert connect_to(environ=environ).name == "other"
    assert connect_to(environ=environ, namespace="mine").namespace == "mine"


def test_several_files_are_one_and_the_first_counts(tmp_path: Path) -> None:
    first = kubeconfig(tmp_path / "a", "x", "y", user={"token": "first"})
    second = kubeconfig(tmp_path / "b", "y", "z", current="z", user={"token": "second"})
    environ = {"KUBECONFIG": f"{first}{os.pathsep}{tmp_path / 'missing'}{os.pathsep}{second}"}
    users = [connect_to(name, environ=environ).config.user for name in ("y", "z")]
    assert [user and user.token for user in users] == ["first", "second"]
    assert connect_to(environ=environ).name == "z"


def test_paths_are_relative_to_their_file(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "a", "x", user={"client-certificate": "me.crt", "client-key": "me.key"})
    user = connect_to("x", environ={"KUBECONFIG": str(path)}).config.user
    assert user is not None
    assert user.client_cert == str(tmp_path / "a" / "me.crt")


def test_an_exec_plugin_of_version_1_is_accepted(tmp_path: Path) -> None:
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "get-token"}
    path = kubeconfig(tmp_path, "x", user={"exec": plugin})
    user = connect_to("x", environ={"KUBECONFIG": str(path)}).config.user
    assert user is not None
    assert user.exec is not None
    assert (user.exec.command, user.exec.apiVersion) == ("get-token", "client.authentication.k8s.io/v1beta1")


def test_an_unknown_context_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, "one", "two")
    with pytest.raises(NotFoundError, match="no context 'three'; its contexts: one, two"):
        connect_to("three", environ={"KUBECONFIG": str(path)})
    with pytest.raises(NotFoundError, match="no current context"):
        connect_to(environ={"KUBECONFIG": str(path)})


def test_no_kubeconfig(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no kubeconfig"):
        connect_to(environ={"HOME": str(tmp_path)})


@pytest.mark.parametrize("text", ["- a list", "{", "contexts: 5", "contexts: [{name: x, context: {}}]"])
def test_a_broken_kubeconfig_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises((UsageError, NotFoundError), match="kubeconfig"):
        connect_to("x", environ={"KUBECONFIG": str(path)})


def test_the_configuration_of_a_notebook() -> None:
    configuration = SimpleNamespace(
        host="https://api:6443",
        ssl_ca_cert="/ca.crt",
        verify_ssl=True,
        cert_file=None,
        key_file=None,
        get_api_key_with_prefix=lambda name: "Bearer sha256~secret" if name == "authorization" else None,
    )
    found = connect_with(configuration, namespace="team")
    assert (found.config.cluster.server, found.namespace) == ("https://api:6443", "team")
    assert found.config.user is not None
    assert found.config.user.token == "sha256~secret"
