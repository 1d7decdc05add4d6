"""The template: a process that has imported the packages of a node's ranks. The ranks are forked from it.

The template imports packages, and never computes. The launcher starts it with the command line of a rank, because
`ps` shows this command line for its copies too. If the template must not be copied, it answers `Unfit`, and the
launcher starts ranks as new processes.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from safepoint.foundation import clock
from safepoint.foundation.channels.channel import ChannelError, close_all
from safepoint.foundation.processes import end_with_parent, set_name
from safepoint.training.rank_processes.birth import be_born, make_children_of_reaper
from safepoint.training.rank_processes.canary import can_compute
from safepoint.training.rank_processes.fitness import DENIED, FIT, Fitness, UnfitError, audited
from safepoint.training.rank_processes.messages import (
    Birth,
    Born,
    Import,
    Plan,
    Ready,
    Stale,
    TemplateChannel,
    Unfit,
)
from safepoint.training.rank_processes.module_files import ModuleFiles, module_of_project
from safepoint.training.rank_processes.preload_list import (
    Wanted,
    installed_folders,
    is_below,
    own_names,
    search_folder,
    wanted_imports,
)

VARIABLE = "SAFEPOINT_TEMPLATE"
"""The environment variable with the descriptor of the connection to the launcher, only in a template."""
OWN_VARIABLES = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables of a template that its ranks do not inherit. With these variables, a query for GPUs does not open a GPU,
and OpenBLAS starts no threads."""
_MAY_DIFFER = frozenset({VARIABLE, *OWN_VARIABLES, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"})
_OF_LAUNCHER = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_ELASTIC_")
_OF_RANKS = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)


def is_template() -> bool:
    """Whether the launcher has started this process as a template."""
    return VARIABLE in os.environ


def run_template(
    main: Callable[[list[str]], int],
    hook: Callable[[], None],
    prepare: Callable[[], None],
    environment: Mapping[str, str],
) -> int:
    """Import packages, and make copies that become ranks. Copies do not return.

    This process returns when the launcher has ended, or when the imports show that the process must not be copied.

    Args:
        main: runs a rank; see `be_born`.
        hook: called before the first import; installs the hooks that must exist when packages are imported.
        prepare: called after imports; computes what each rank would compute about the imported modules.
        environment: the variables with which this process was started.

    Returns:
        The exit code of this process.
    """
    started_s = clock.monotonic_s()
    channel = TemplateChannel(socket.socket(fileno=int(os.environ.pop(VARIABLE))))
    set_name("safepoint-templ")
    try:
        plan, _ = channel.receive_message()
        if not isinstance(plan, Plan):
            return 1
        end_with_parent(plan.launcher_pid, signal.SIGKILL)
        Template(channel, plan, main, prepare, environment).serve(hook, started_s)
    except ChannelError:
        return 0  # the launcher has ended
    return 0


class Template:
    """The state of the template.

    Args:
        channel: the connection to the launcher.
        plan: what the ranks will run.
        main: runs a rank.
        prepare: see `run_template`.
        environment: see `run_template`.
    """

    def __init__(
        self,
        channel: TemplateChannel,
        plan: Plan,
        main: Callable[[list[str]], int],
        prepare: Callable[[], None],
        environment: Mapping[str, str],
    ) -> None:
        self._channel = channel
        self._plan = plan
        self._main = main
        self._prepare = prepare
        self._environment = dict(environment)
        self._changes: dict[str, str | None] = {}
        """What has changed in the environment since the start of this process, for example by imports: name → new
        value, or None for a deleted variable."""
        self._left_out = DENIED | set(plan.left_out)
        self._folder = search_folder(plan.program, is_module=plan.is_module)
        self._fitness = Fitness(channel.fileno())
        self._files = ModuleFiles()
        self._base = frozenset(sys.modules)
        """The modules that every rank loads before it can import from the folder of the program."""

    def serve(self, hook: Callable[[], None], started_s: float) -> None:
        """Import what the program imports, then answer the launcher until it closes the connection.

        If the imports show that this process must not be copied, report that to the launcher, and return.

        Raises:
            ChannelError: the launcher has ended.
        """
        try:
            with audited() as check:
                hook()
                for wanted in _doubtful_first(wanted_imports(self._plan.program, is_module=self._plan.is_module)):
                    if wanted.package not in self._left_out:
                        import_wanted(wanted)
                        check()
                        self._fitness.check(wanted.package)
            self._settle()
        except UnfitError as error:
            self._channel.send_message(Unfit(name=error.name, reason=error.reason))
            return
        self._channel.send_message(Ready(num_modules=len(sys.modules), took_s=clock.monotonic_s() - started_s))
        fault: UnfitError | None = None
        while True:
            message, descriptors = self._channel.receive_message()
            try:
                if isinstance(message, Import):
                    try:
                        self._import_more(message.modules)
                    except UnfitError as error:
                        fault = error
                elif isinstance(message, Birth):
                    self._answer(message, descriptors, fault)
            finally:
                close_all(descriptors)

    def _settle(self) -> None:
        """Check this process after imports, and test a copy of it.

        Raises:
            UnfitError: this process must not be copied.
        """
        self._prepare()
        own = module_of_project(self._base)
        if own is not None:
            raise UnfitError(own, "is code of the project, and an installed package imports it")
        names = self._environment.keys() | os.environ.keys()
        self._changes = {
            name: os.environ.get(name) for name in names if os.environ.get(name) != self._environment.get(name)
        }
        try:
            fault = can_compute()
        except OSError as error:
            raise UnfitError("the template", f"cannot be copied: {error.strerror}") from error
        if fault:
            raise UnfitError("a package", fault)
        self._fitness.check("a package")
        self._files.remember()
        gc.collect()
        gc.freeze()  # without this call, a collection in a copy would write to all objects, and so copy their memory

    def _import_more(self, names: Iterable[str]) -> None:
        """Import modules that a rank has loaded, if they are installed and no file of the project has their name.

        Raises:
            UnfitError: an import has made this process unfit.
        """
        own, folders = own_names(self._folder), installed_folders()
        num_before = len(sys.modules)
        with audited() as check:
            for name in names:
                if self._channel.has_data(0):
                    break  # a `Birth` must not wait; after the first step of its ranks, `Import` comes again
                package = name.partition(".")[0]
                if name in sys.modules or package in self._left_out or package in own:
                    continue
                parent = sys.modules.get(name.rpartition(".")[0]) if "." in name else None
                if "." in name and not hasattr(parent, "__path__"):
                    continue
                if _is_installed(name, folders):
                    with contextlib.suppress(Exception):  # a rank imports it by itself, and reports the error
                        importlib.import_module(name)
                    check()
                    self._fitness.check(package)
        if len(sys.modules) > num_before:
            self._settle()

    def _answer(self, birth: Birth, descriptors: Sequence[int], fault: UnfitError | None) -> None:
        try:
            if fault is not None:
                raise fault
            if not len(birth.arguments) == len(birth.environments) == (len(descriptors) - 2) / 2:
                raise UnfitError("the launcher", "sent an incomplete request")  # noqa: TRY301
            self._check(birth, descriptors)
        except UnfitError as error:
            self._channel.send_message(Unfit(name=error.name, reason=error.reason))
            return
        changed = self._files.changed()
        if changed is not None:
            self._channel.send_message(Stale(module=changed))
            return
        pids = make_children_of_reaper(
            len(birth.arguments), lambda number: be_born(birth, number, descriptors, self._changes, self._main)
        )
        if pids is None:
            self._channel.send_message(Unfit(name="the template", reason="could not copy itself"))
        else:
            self._channel.send_message(Born(pids=pids))

    def _check(self, birth: Birth, descriptors: Sequence[int]) -> None:
        """Check that copies would equal new processes.

        Raises:
            UnfitError: copies would differ.
        """
        self._fitness.check("a package", received=descriptors)
        for variables in birth.environments:
            for name in variables.keys() | self._environment.keys():
                is_free = name in _MAY_DIFFER or name in _OF_RANKS or name.startswith(_OF_LAUNCHER)
                if not is_free and variables.get(name) != self._environment.get(name):
                    raise UnfitError(name, "has changed in the environment since the template was started")
        preloaded = {name.partition(".")[0] for name in sys.modules.keys() - self._base}
        hidden = (preloaded - {name.partition(".")[0] for name in self._base}) & own_names(self._folder)
        if hidden:
            raise UnfitError(sorted(hidden)[0], f"is an installed package, and a file in {self._folder} has its name")


def _doubtful_first(imports: Iterable[Wanted]) -> list[Wanted]:
    """The order of the imports: torch, then packages that may be unfit, then packages that are known to be fit.

    torch comes first, because packages with compiled code may need it. An unfit package is found while the launcher
    itself still imports torch. The ranks then start as new processes, hardly later than without a template.
    """
    return sorted(imports, key=lambda wanted: (wanted.package != "torch", wanted.package in FIT))


def import_wanted(wanted: Wanted) -> None:
    """Execute an import statement. If it fails, the rank executes it again, and reports the error."""
    with contextlib.suppress(Exception):
        module: ModuleType = importlib.import_module(wanted.module)
        for name in wanted.names:
            if not hasattr(module, name):  # `hasattr` makes a package that imports lazily load the attribute
                with contextlib.suppress(ImportError):
                    importlib.import_module(f"{wanted.module}.{name}")


def _is_installed(name: str, folders: tuple[str, ...]) -> bool:
    try:
        spec: Any = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None:
        return False
    is_own = name.partition(".")[0] == "safepoint"
    return is_own or bool(spec.origin and os.path.isabs(spec.origin) and is_below(spec.origin, folders))
