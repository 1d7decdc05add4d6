"""The address of a cluster and the identity to use there.

Both come from a context of the kubeconfig, from a pod's service account, or from the configuration of Kubeflow's SDK.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safepoint.errors import NotFoundError, UnsupportedError, UsageError
from safepoint.foundation.environment import expand_home
from safepoint.foundation.shared_folders.ownership import PlantedError, open_trusted
from safepoint.jobs.cluster.objects import at, items, texts

try:
    import yaml
    from lightkube.config.kubeconfig import KubeConfig, SingleConfig
    from lightkube.config.models import Cluster, User
    from lightkube.core.exceptions import ConfigError
except ModuleNotFoundError as error:
    raise UnsupportedError(
        f"jobs on a cluster need the package lightkube; the module {error.name} is not installed",
        hint="pip install 'safepoint[kubernetes]'",
    ) from error

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EXEC_V1 = "client.authentication.k8s.io/v1"
_EXEC_KNOWN = "client.authentication.k8s.io/v1beta1"
_DEFAULT_NAMESPACE = "default"
_MOST_BYTES = 2 << 20
"""The size limit of a kubeconfig. A parsed file needs about a thousand times its size in memory."""
CORRECT = "fix the kubeconfig, or set KUBECONFIG to another file"
"""What to do when a kubeconfig cannot be used."""
_LOCAL = {"127.0.0.1", "::1", "localhost"}


class _Loader(yaml.SafeLoader):
    """Refuses merge keys (`<<`): thirty lines of them can stand for a billion entries."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem="merge keys are not supported", problem_mark=key.start_mark)
        super().flatten_mapping(node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How to reach a namespace of a cluster.

    Args:
        name: the cluster's name in messages: the context, `in-cluster`, or the address.
        config: address, certificates and identity. It is excluded from `repr`.
        namespace: the namespace of the jobs.
        token_now: a function that reads the token of `config` again from its origin, because the token may have been
            renewed there. The function may raise ConfigError or SafepointError. It is not called if a file or a
            program gives the token.
    """

    name: str
    config: SingleConfig = field(repr=False)
    namespace: str
    token_now: Callable[[], str | None] | None = field(default=None, repr=False, compare=False)


def connect_to(
    context: str | None = None,
    *,
    namespace: str | None = None,
    file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Connection:
    """The connection to a cluster; no request is sent yet.

    Args:
        context: the exact name of a context. None selects the service account if this process runs in a pod and
            `file` is None; otherwise the current context.
        namespace: the namespace; None for the namespace of the context or of the service account.
        file: the kubeconfig; None for the files that KUBECONFIG names. If KUBECONFIG is not set, None stands for
            ~/.kube/config.
        environ: the environment variables to read; None for the variables of this process.

    Raises:
        NotFoundError: there is no kubeconfig, or no such context in it.
        UsageError: a kubeconfig or the service account cannot be used.
    """
    environ = os.environ if environ is None else environ
    if context is None and file is None and "KUBERNETES_SERVICE_HOST" in environ and SERVICE_ACCOUNT.is_dir():
        try:
            config = KubeConfig.from_service_account().get()
        except (ConfigError, OSError, KeyError) as error:
            raise UsageError(f"this pod's service account cannot be used: {error}") from error
        return _connection("in-cluster", config, namespace)
    files = _files(file, environ)
    found = _read(files)
    name = found.current_context if context is None else context
    if name is None or name not in found.contexts:
        known = ", ".join(sorted(found.contexts)) or "none"
        what = "the kubeconfig has no current context" if name is None else f"the kubeconfig has no context {name!r}"
        raise NotFoundError(f"{what}; its contexts: {known}", hint="`kubectl config get-contexts` lists the contexts")
    try:
        config = found.get(name)
        return _connection(name, config, namespace, token_now=partial(_token_in, files, name, config))
    except (ConfigError, KeyError) as error:
        raise UsageError(
            f"context {name!r} of the kubeconfig is not complete: {error} is missing", hint=CORRECT
        ) from error


def _token_in(files: list[Path], context: str, before: SingleConfig | None) -> str | None:
    """The token that a context of the kubeconfig has now, because a person may have logged in again. None if the
    context has no user, or if the user has no token.

    Raises:
        ConfigError: the context now names another server than `before`, so the token is for that other server.
        SafepointError: the kubeconfig cannot be used any more.
    """
    now = _read(files).get(context)
    if now is None or now.user is None:
        return None
    if before is None or now.cluster.server != before.cluster.server:
        raise ConfigError(f"context {context} now has the address {now.cluster.server}")
    return now.user.token


def connect_with(configuration: Any, *, namespace: str) -> Connection:
    """The connection that a `kubernetes.client.Configuration` describes, as users of Kubeflow's SDK pass it.

    Args:
        configuration: the configuration. Its host, token, certificate authority and client certificate are used.
        namespace: the namespace of the jobs.
    """

    def token_now() -> str | None:
        # The library calls `refresh_api_key_hook` here, which renews the token.
        key = configuration.get_api_key_with_prefix
        found: str | None = key("authorization") or key("BearerToken")
        return found.removeprefix("Bearer ").removeprefix("bearer ") if found else None

    config = KubeConfig.from_one(
        cluster=Cluster(
            server=configuration.host,
            certificate_auth=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
        ),
        user=User(token=token_now(), client_cert=configuration.cert_file, client_key=configuration.key_file),
        namespace=namespace,
    ).get()
    return _connection(configuration.host, config, namespace, token_now=token_now)


def _connection(
    name: str,
    config: SingleConfig | None,
    namespace: str | None,
    *,
    token_now: Callable[[], str | None] | None = None,
) -> Connection:
    assert config is not None
    if config.user is None:  # add an empty user, because lightkube requires one
        config = SingleConfig(
            context_name=config.context_name,
            context=config.context,
            cluster=config.cluster,
            user=User(),
            fname=config.fname,
        )
    try:
        server = urlsplit(config.cluster.server)
    except ValueError as error:
        raise UsageError(
            f"the connection to {name} has an invalid address: {error}",
            hint="fix the field `server` in the kubeconfig",
        ) from error
    if server.scheme != "https" and server.hostname not in _LOCAL and config.user != User():
        raise UsageError(
            f"{name} has an address with {server.scheme}:, so your login would be unencrypted; nothing was sent",
            hint="change the field `server` in the kubeconfig to an https:// address",
        )
    program = config.user.exec if config.user is not None else None
    if program is not None and program.apiVersion == _EXEC_V1:
        program.apiVersion = _EXEC_KNOWN  # lightkube accepts only v1beta1; the output of the program is the same
    return Connection(
        name=name,
        config=config,
        namespace=namespace or config.namespace or _DEFAULT_NAMESPACE,
        token_now=token_now,
    )


def missing_files(config: SingleConfig) -> list[str]:
    """The files of certificates and keys that a kubeconfig names although they do not exist."""
    user = config.user or User()
    named = (config.cluster.certificate_auth, user.client_cert, user.client_key)
    return [str(file) for file in named if file and not Path(file).exists()]


def _files(file: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> list[Path]:
    if file is not None:
        return [expand_home(os.fspath(file), environ)]
    named = environ.get("KUBECONFIG", "")
    if named:
        return [expand_home(part, environ) for part in named.split(os.pathsep) if part]
    return [expand_home("~/.kube/config", environ)]


def _read(files: list[Path]) -> KubeConfig:
    """Merge the files. As in kubectl, the first of several entries with the same name is used."""
    merged: dict[str, Any] = {"clusters": [], "contexts": [], "users": []}
    first = None
    for file in files:
        text = _text_of(file)
        if text is None:
            continue
        first = first or file
        try:
            document: Any = _Loader(text).get_single_data()
        except (yaml.YAMLError, RecursionError) as error:
            # The parser's message and its error are not shown, because they quote the file, which may contain a
            # token.
            mark: Any = getattr(error, "problem_mark", None)
            where = "position unknown" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
            raise UsageError(
                f"the kubeconfig {file} is not valid YAML: {where}; nothing was sent", hint=CORRECT
            ) from None
        try:
            _merge(merged, document, file)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the file {file} is not a kubeconfig; nothing was sent", hint=CORRECT) from error
    if first is None:
        names = " or ".join(map(str, files))
        raise NotFoundError(f"there is no kubeconfig {names}", hint="log in to your cluster, or set KUBECONFIG")
    try:
        return KubeConfig.from_dict(merged)  # pyright: ignore[reportUnknownMemberType]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the kubeconfig {first} is not valid: {error}", hint=CORRECT) from error


def _text_of(file: Path) -> str | None:
    """The text of a kubeconfig; None if there is no such file."""
    if not file.is_file():
        return None
    try:
        with open_trusted(file) as stream:
            data = stream.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise UsageError(
                f"the kubeconfig {file} has more than {_MOST_BYTES:,} bytes; it was not used", hint=CORRECT
            )
        return data.decode("utf-8")
    except PlantedError as error:  # refuse the file, because a kubeconfig can name a program to run
        raise UsageError(
            f"kubeconfig {file} was not used: {error.strerror}", hint="set KUBECONFIG to a file of your own"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the kubeconfig {file} cannot be read: {error}", hint=CORRECT) from error


def _merge(merged: dict[str, Any], document: Any, file: Path) -> None:
    current = document.get("current-context")
    merged["current-context"] = (
        merged.get("current-context") or (current if isinstance(current, str) else None) or None
    )
    for kind in ("clusters", "contexts", "users"):
        known = {item["name"] for item in merged[kind]}
        for item in items(document, kind):
            name = at(item, "name")
            if isinstance(name, str) and name not in known:
                merged[kind].append(_with_absolute_paths(item, kind.removesuffix("s"), file.parent))


def _with_absolute_paths(item: Any, kind: str, folder: Path) -> dict[str, Any]:
    """An entry of a kubeconfig with absolute paths, including the path of the program that gives the token.

    Relative paths in a kubeconfig start at the folder of that file.
    """
    paths = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
    inner: dict[str, Any] = {
        key: str(folder / value) if key in paths else value for key, value in texts(item, kind).items()
    }
    command = at(inner, "exec", "command")
    if isinstance(command, str) and "/" in command:
        inner["exec"] = {**inner["exec"], "command": str(folder / command)}
    return {**item, kind: inner}
