"""Settings in files: ./safepoint.toml, [tool.safepoint] in ./pyproject.toml, and the user's own config.toml.

A file has these tables:

- one for each command, such as `[run]` and `[checkpoints.list]`: the options of the command;
- `[pvc]`: the folders of this machine that stand for claims (volumes of a cluster);
- `[local]`, only in the user's own file: the slots of this machine (the CPU cores and GPUs that jobs may use);
- `[places.NAME]`, only in the user's own file: a place, that is, a namespace of a cluster; and the options of
  `submit` there.

Dashes and underscores are equivalent. If several files have the same setting, ./safepoint.toml takes precedence
over ./pyproject.toml, and both take precedence over the user's own file.

The settings of a project's file decide which programs run and where checkpoints go. So the file is ignored if another
user may have written it. The file is also ignored if it is in a checkpoint, because a checkpoint may have come from
another person's bucket. `Configuration.ignored` says why a file is ignored. The environment variable
SAFEPOINT_TRUSTED_FOLDERS names folders whose files are used in any case.

If a file cannot be read, or a setting is invalid, a UsageError is raised. It names the file, the line (if it can be
found), the table, the key, the value, and what to do. This module does not check which commands and options exist;
`safepoint.cli` does.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from safepoint.errors import UsageError, printable
from safepoint.foundation.environment import expand_home
from safepoint.foundation.shared_folders.no_links import RECORDS
from safepoint.foundation.shared_folders.ownership import is_planted, open_only_file, open_trusted, why_foreign
from safepoint.foundation.units import nearest

PROJECT_FILE = "safepoint.toml"
_PYPROJECT = "pyproject.toml"
TRUSTED_FOLDERS = "SAFEPOINT_TRUSTED_FOLDERS"
"""The environment variable with a list of folders, separated by colons. The settings files in these folders are used
even if other users own the files."""
_MOST_BYTES = 1 << 20
_MOST_DEPTH = 10
_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?")
_OWN_TABLE = re.compile(r"tool[\s\"']*\.[\s\"']*safepoint")
_KEY = re.compile(r"\s*([^=#\[\]{}]+?)\s*=")
_PVC, _LOCAL, _PLACES = "pvc", "local", "places"
RESERVED = (_PVC, _LOCAL, _PLACES)
"""The tables that do not belong to a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value of a file.

    Args:
        file: the path of the file, for messages.
        line: the number of the line, from 1; None if the line is uncertain, for example because the value has several
            lines.
        table: the name of the setting's table, split at the dots; in a pyproject.toml, without `tool.safepoint`.
        key: the key, as it is written in the file.
        value: the value, as TOML reads it.
    """

    file: str
    line: int | None
    table: tuple[str, ...]
    key: str
    value: object

    @property
    def place(self) -> str:
        """The place of the setting in messages, such as `safepoint.toml, line 3`."""
        return self.file if self.line is None else f"{self.file}, line {self.line}"

    @property
    def name(self) -> str:
        """The key with dashes, as an option is written: `save_steps` → `save-steps`."""
        return self.key.replace("_", "-")

    def refuse(self, why: str, *, hint: str) -> UsageError:
        """An error about this setting."""
        shown = printable(f"{self.key} = {toml(self.value)}")
        return UsageError(f"{self.place}: [{'.'.join(self.table)}] {shown}: {why}; nothing was done", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of a file: its first line, and its settings, if it has any."""

    file: str
    line: int | None
    name: tuple[str, ...]
    settings: tuple[Setting, ...]

    def refuse(self, why: str, *, hint: str) -> UsageError:
        """An error about this table."""
        place = self.file if self.line is None else f"{self.file}, line {self.line}"
        return UsageError(f"{place}: [{printable('.'.join(self.name))}]: {why}; nothing was done", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMachine:
    """`[local]`: how many slots of this machine all jobs together may use; None for all slots.

    Args:
        cpu_slots: the number of CPU cores.
        gpu_slots: the number of GPUs.
    """

    cpu_slots: int | None = None
    gpu_slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlace:
    """`[places.NAME]`: a namespace of a cluster, which `--on NAME` selects.

    Args:
        name: its name.
        context: a context of the kubeconfig; None for the current context.
        namespace: a namespace of the cluster; None for the namespace of the context.
        is_default: whether commands without `--on` look for jobs in this place too.
        settings: the options of `submit` that the table sets. Whether these options exist is not checked here.
    """

    name: str
    context: str | None = None
    namespace: str | None = None
    is_default: bool = False
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The settings in the files of one folder and one user.

    Args:
        tables: the tables of commands, in order of precedence.
        pvc: name of a claim → the folder of this machine that stands for the claim; an absolute path.
        local: what jobs may use of this machine.
        places: the clusters, by name.
        origins: the settings that `pvc`, `local` and `places` come from, by table and name.
        ignored: a warning for each file that was ignored. It names the file and the reason.
    """

    tables: tuple[Table, ...] = ()
    pvc: Mapping[str, Path] = field(default_factory=dict[str, Path])
    local: LocalMachine = LocalMachine()
    places: Mapping[str, ClusterPlace] = field(default_factory=dict[str, ClusterPlace])
    origins: Mapping[tuple[str, str], Setting] = field(default_factory=dict[tuple[str, str], Setting])
    ignored: tuple[str, ...] = ()

    @property
    def default_place(self) -> ClusterPlace | None:
        """The place where commands look for jobs besides this machine; None if no place is the default."""
        return next((place for place in self.places.values() if place.is_default), None)

    def settings(self, *table: str) -> dict[str, Setting]:
        """The settings of one command, by option. `settings("checkpoints", "list")` reads `[checkpoints.list]`."""
        found: dict[str, Setting] = {}
        for one in self.tables:
            if one.name == table:
                found = {setting.name: setting for setting in one.settings} | found
        return found

    @classmethod
    def load(cls, folder: Path | None = None, environ: Mapping[str, str] | None = None) -> "Configuration":
        """Read the files.

        Args:
            folder: the folder of the project's files; None for the current folder.
            environ: the environment with XDG_CONFIG_HOME, HOME and SAFEPOINT_TRUSTED_FOLDERS; None for the
                environment of this process.

        Raises:
            UsageError: a file cannot be read, or a setting in it is invalid.
        """
        folder = Path() if folder is None else folder
        paths = (folder / PROJECT_FILE, folder / _PYPROJECT, user_file(environ))
        return cls._read(paths, is_trusted=_is_trusted(folder, environ))

    @classmethod
    def of_user(cls, environ: Mapping[str, str] | None = None) -> "Configuration":
        """Read only the user's own file, which is the same in every folder.

        Raises:
            UsageError: as for `load`.
        """
        return cls._read((user_file(environ),))

    @classmethod
    def _read(cls, paths: Sequence[Path], *, is_trusted: bool = False) -> "Configuration":
        tables: list[Table] = []
        pvc: dict[str, Path] = {}
        local: dict[str, int] = {}
        places: dict[str, ClusterPlace] = {}
        origins: dict[tuple[str, str], Setting] = {}
        ignored: list[str] = []
        for path in paths:
            source = _read(path, is_users=path == paths[-1], is_trusted=is_trusted)
            if source.why_ignored is not None:
                ignored.append(_warning(path, source.why_ignored))
            for table in _tables(path, source.text):
                kind, *below = table.name
                if kind not in RESERVED:
                    tables.append(table)
                    continue
                if kind in {_LOCAL, _PLACES} and path != paths[-1]:
                    what = "slots are a setting of the machine" if kind == _LOCAL else "clusters are a user's setting"
                    raise table.refuse(f"{what}, and not of a project", hint=f"move it to {paths[-1]}")
                if kind == _PLACES:
                    _add_place(places, table)
                    origins |= {(".".join(table.name), setting.name): setting for setting in table.settings}
                    continue
                if below:
                    why = f"[{kind}] may not contain tables"
                    raise table.refuse(why, hint=f"write its settings below [{kind}]")
                for setting in table.settings:
                    name = setting.key if kind == _PVC else setting.name
                    if (kind, name) in origins:
                        continue
                    origins[kind, name] = setting
                    if kind == _PVC:
                        pvc[name] = _claim_folder(setting, path.parent)
                    else:
                        local[name.replace("-", "_")] = _slots(setting)
        return cls(
            tables=tuple(tables),
            pvc=pvc,
            local=LocalMachine(**local),
            places=places,
            origins=origins,
            ignored=tuple(ignored),
        )


def xdg_folder(variable: str, usual: str, environ: Mapping[str, str] | None = None) -> Path:
    """The user's folder that a variable of the XDG specification names.

    Args:
        variable: the variable, such as XDG_CACHE_HOME. A relative path is ignored, as the specification requires.
        usual: a folder below the home folder, such as `.cache`. It is used if the variable has no absolute path.
        environ: see `expand_home`.
    """
    named = (os.environ if environ is None else environ).get(variable, "")
    return Path(named) if os.path.isabs(named) else expand_home(f"~/{usual}", environ)


def user_file(environ: Mapping[str, str] | None = None) -> Path:
    """The user's own file: `safepoint/config.toml` in XDG_CONFIG_HOME, or in `~/.config` if that is not set."""
    return xdg_folder("XDG_CONFIG_HOME", ".config", environ) / "safepoint" / "config.toml"


def _claim_folder(setting: Setting, base: Path) -> Path:
    if not isinstance(setting.value, str) or not setting.value.strip():
        raise setting.refuse("the value is not a folder's path", hint='write its path in quotation marks: "/data"')
    if "," in setting.value or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", setting.key):
        raise setting.refuse(
            "this is not a valid name of a claim, or its folder's path is invalid",
            hint="a claim's name has letters, digits, dots and dashes; its folder's path must have no comma",
        )
    try:
        folder = expand_home(setting.value)
    except UsageError as error:
        raise setting.refuse(error.message, hint=error.hint or "") from error
    return Path(os.path.abspath(base / folder))


def _add_place(places: dict[str, ClusterPlace], table: Table) -> None:
    if len(table.name) != 2:
        if table.settings or len(table.name) > 2:
            raise table.refuse("each place has a table of its own", hint="write its settings below [places.NAME]")
        return
    name, values = table.name[1], {setting.name: setting for setting in table.settings}
    kinds: dict[str, type] = {"context": str, "namespace": str, "default": bool}
    own = [setting for setting in table.settings if setting.name in kinds]
    for setting in own:
        if not isinstance(setting.value, kinds[setting.name]) or setting.value == "":
            hint = "write true or false" if setting.name == "default" else "write it in quotation marks"
            raise setting.refuse("it is empty or has the wrong type", hint=hint)
    given = {setting.name: cast("Any", setting.value) for setting in own}
    place = ClusterPlace(
        name=name,
        context=given.get("context"),
        namespace=given.get("namespace"),
        is_default=given.get("default", False),
        settings=tuple(setting for setting in table.settings if setting.name not in kinds),
    )
    others = [other.name for other in places.values() if other.is_default]
    if place.is_default and others:
        raise values["default"].refuse(f"{others[0]} is the default already", hint="delete one of the two lines")
    places[name] = place


def _slots(setting: Setting) -> int:
    names = ("cpu-slots", "gpu-slots")
    if setting.name not in names:
        raise setting.refuse("[local] has no such key", hint=nearest(setting.name, names))
    if isinstance(setting.value, bool) or not isinstance(setting.value, int) or setting.value < 0:
        raise setting.refuse(
            "slots are a whole number, 0 or more", hint="write a number without quotation marks, such as 4"
        )
    return setting.value


def _is_trusted(folder: Path, environ: Mapping[str, str] | None) -> bool:
    """Whether the user trusts the files of this folder, even if other users own them."""
    named = (os.environ if environ is None else environ).get(TRUSTED_FOLDERS, "")
    known = {os.path.realpath(one) for one in named.split(os.pathsep) if os.path.isabs(one)}
    return bool(known) and os.path.realpath(folder) in known


def _warning(path: Path, why: str) -> str:
    folder = printable(os.path.realpath(path.parent))
    return (
        f"the settings in {printable(str(path))} were ignored: {why}. A user who can write this file could run "
        "programs as you. Use a copy that belongs to you and that only you can write to. Or, if you trust everyone "
        f"who may write there, set {TRUSTED_FOLDERS}={folder}"
    )


def _tables(path: Path, text: str | None) -> Iterator[Table]:
    prefix = ("tool", "safepoint") if path.name == _PYPROJECT else ()
    # A pyproject.toml without our table is not parsed, so that an error in another tool's table is not reported.
    if text is None or (prefix and "safepoint" not in text):
        return
    import tomllib  # not at the top, because the import takes 10 ms, and most commands find no file

    try:
        document: Any = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not valid TOML: {printable(str(error))}; nothing was done",
            hint="fix the file; strings need quotation marks",
        ) from error
    for name in prefix:
        document = cast("dict[str, Any]", document).get(name, {}) if isinstance(document, dict) else document
    if not isinstance(document, dict):
        raise UsageError(
            f"{path}: {'.'.join(prefix)} is not a table; nothing was done",
            hint=f"write tables below it, such as [{'.'.join((*prefix, 'run'))}]",
        )
    yield from _walk(cast("dict[str, Any]", document), str(path), prefix, (), _lines(text))


def _walk(
    content: dict[str, Any],
    file: str,
    prefix: tuple[str, ...],
    name: tuple[str, ...],
    lines: Mapping[tuple[str, ...], tuple[int, str]],
) -> Iterator[Table]:
    settings: dict[str, Setting] = {}
    if len(name) > _MOST_DEPTH:
        raise UsageError(
            f"{file} has tables that are nested more than {_MOST_DEPTH} deep; nothing was done",
            hint="no table of Safepoint is nested so deep; fix the file",
        )
    for key, value in content.items():
        if isinstance(value, dict):
            continue
        line = _confirmed(lines.get((*prefix, *name, key)), key, value)
        setting = Setting(file=file, line=line, table=name, key=key, value=value)
        if not name:
            raise UsageError(
                f"{setting.place}: {printable(f'{key} = {toml(value)}')} is in no table; nothing was done",
                hint=f"put it below a command's name, such as [{'.'.join((*prefix, 'run'))}]",
            )
        # The keys of [pvc] are names of claims, not options. In these names, `_` is not another spelling of `-`.
        known = key if name[0] == _PVC else setting.name
        if known in settings:
            raise setting.refuse(
                f"{settings[known].key} in the same table sets it too", hint="delete one of the two lines"
            )
        settings[known] = setting
    if name:
        line = lines.get((*prefix, *name))
        yield Table(file=file, line=line and line[0], name=name, settings=tuple(settings.values()))
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _walk(cast("dict[str, Any]", value), file, prefix, (*name, key), lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The text of a file, and why it is ignored. The text is None if the file is missing or ignored."""

    text: str | None = None
    why_ignored: str | None = None


def _read(path: Path, *, is_users: bool, is_trusted: bool) -> _Source:
    """Read a file.

    Args:
        path: the file.
        is_users: whether the file is the user's own. The user's own file is never ignored: if `open_trusted` refuses
            it, an error is raised.
        is_trusted: whether the files of the project are used, even if other users own them.

    Raises:
        UsageError: the file cannot be read, or `open_trusted` refuses it.
    """
    why, is_checked = None, not is_users and not is_trusted
    try:
        with (open_trusted if is_users else open_only_file)(path) as file:
            if is_checked:
                why = why_foreign(path, file.fileno()) or _why_in_checkpoint(path)
            data = file.read(_MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return _Source()
    except OSError as error:
        # In many containers the user has no home folder, and may not enter the folder in which the file would be.
        if isinstance(error, PermissionError) and not os.path.lexists(path):
            return _Source()
        if is_checked and (foreign := why_foreign(path) or _why_in_checkpoint(path)):
            return _Source(why_ignored=foreign)
        raise _unreadable(path, error.strerror or str(error)) from error
    if why is not None:
        is_ours = path.name != _PYPROJECT or _OWN_TABLE.search(data.decode("utf-8", errors="replace"))
        return _Source(why_ignored=why if is_ours else None)
    if len(data) > _MOST_BYTES:
        raise _unreadable(path, f"it has more than {_MOST_BYTES} bytes")
    try:
        return _Source(text=data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _unreadable(path, f"line {line} is not UTF-8") from error


def _why_in_checkpoint(path: Path) -> str | None:
    """The reason to ignore a file that is in a checkpoint; None if the file is in no checkpoint.

    The files of a checkpoint belong to this user if a run has fetched them from an object store, or if a command has
    copied them. But the person who has written the checkpoint has chosen the names and the content of the files.
    """
    for folder in Path(os.path.realpath(path)).parents:
        # Another user may have put a manifest into a shared folder such as /tmp. That manifest is ignored.
        if any(os.path.isfile(record := folder / name) and not is_planted(record) for name in RECORDS):
            return (
                f"the file is in the checkpoint {printable(str(folder))}, and another person may have written the "
                "checkpoint, so start the command in another folder"
            )
    return None


def _unreadable(path: Path, why: str) -> UsageError:
    return UsageError(
        f"the settings in {path} cannot be read: {why}; nothing was done",
        hint="fix the file or its permissions, or move it away",
    )


def _lines(text: str) -> dict[tuple[str, ...], tuple[int, str]]:
    """The number and the text of the line on which each table or key probably is. tomllib does not report lines."""
    found: dict[tuple[str, ...], tuple[int, str]] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.fullmatch(line)
        if header is not None:
            table = _names(header[1])
            found.setdefault(table, (number, line))
        elif (key := _KEY.match(line)) is not None:
            found.setdefault((*table, *_names(key[1])), (number, line))
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _confirmed(line: tuple[int, str] | None, key: str, value: object) -> int | None:
    """The number of the line, if the line alone is valid TOML that sets `key` to `value`; otherwise None."""
    import tomllib

    if line is None:
        return None
    try:
        parsed: Any = tomllib.loads(line[1])
    except tomllib.TOMLDecodeError:
        return None
    while isinstance(parsed, dict) and key not in parsed and len(cast("dict[str, Any]", parsed)) == 1:
        parsed = next(iter(cast("dict[str, Any]", parsed).values()))
    return line[0] if isinstance(parsed, dict) and cast("dict[str, Any]", parsed).get(key) == value else None


def toml(value: object) -> str:
    """A value as TOML writes it, for messages."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(toml(item) for item in cast('list[object]', value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
