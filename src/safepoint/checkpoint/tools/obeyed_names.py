"""Names of files that a program obeys, or imports, only because of their name. An export leaves such files out.

A checkpoint may contain files of any name, and someone else may have written it. At the target of an export they
would belong to this user. There they could become the settings of a program, such as `.git/hooks` or `uv.toml`, or
modules that Python, when it is started there, imports instead of its own, such as `json.py` or `torch.py`. Python
also looks there for installed packages: the file `entry_points.txt` in a folder `x.dist-info` names modules, which
libraries such as torch import as their plugins.

No file of a model has such a name. The code of a model (`modeling_x.py`) has other names, and runs only if the user
trusts it. It is never compiled: a person could not read what runs.
"""

import functools
import os
import re
import sys

_SETTINGS = {
    *("safepoint.toml", "pyproject.toml", "setup.cfg", "tox.ini", "pytest.ini", "mypy.ini", "ruff.toml", "uv.toml"),
    *("pdm.toml", "poetry.toml", "hatch.toml", "pixi.toml", "pipfile", "tox.toml", "pytest.toml", "dvc.yaml"),
    *("makefile", "gnumakefile", "bsdmakefile", "justfile", "cmakelists.txt", "meson.build"),
    *("sconstruct", "sconscript", "snakefile", "earthfile", "tiltfile", "skaffold.yaml", "mise.toml", "brewfile"),
    *("taskfile.yml", "taskfile.yaml", "rakefile", "gemfile", "vagrantfile", "jenkinsfile", "procfile", "wscript"),
    *("workspace", "module.bazel", "build.bazel", "flake.nix", "shell.nix", "default.nix"),
    *("package.json", "deno.json", "bunfig.toml", "cargo.toml", "build.rs", "build.gradle", "pom.xml", "build.xml"),
    *("dockerfile", "containerfile", "compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml"),
    *("docker-bake.hcl", "docker-bake.json", "docker-bake.override.hcl", "docker-bake.override.json"),
    *("mlproject", "cog.yaml", "bentofile.yaml", "config.properties"),
    # Weights & Biases reads `wandb/settings`, which may name the server that gets the user's key.
    *("pylintrc", "pylintrc.toml", "gunicorn.conf.py", "ansible.cfg", "wandb"),
    *("compose.override.yaml", "compose.override.yml", "docker-compose.override.yml", "docker-compose.override.yaml"),
    # Its `backend` may name a module.
    *("matplotlibrc", "supervisord.conf", "celeryconfig.py", "caddyfile", "php.ini", "startup.m"),
    *("guardfile", "podfile", "fastfile", "capfile", "thorfile", "dangerfile", "berksfile", "puppetfile"),
    *("build.sbt", "settings.gradle", "settings.gradle.kts", "build.gradle.kts", "package.swift", "mix.exs"),
    *("build.zig", "magefile.go", "build", "buck", "meson.options", "meson_options.txt", "cmakepresets.json"),
    *("cmakeuserpresets.json", "taskfile.dist.yml", "taskfile.dist.yaml", "devbox.json", "devenv.nix"),
    *("lefthook.yml", "turbo.json", "nx.json", "lerna.json", "pulumi.yaml", "kustomization.yaml", "chart.yaml"),
    # Compiled modules that Python runs in place of their sources, and what describes an installed package.
    *("__pycache__", "egg-info"),
}
"""The names, in lower case, of files that a program obeys when a person starts it in their folder: Safepoint itself,
Python's tools, and tools that build or start something."""
_FORMS = re.compile(
    r"(jupyter|ipython)(_\w+)?_config\.(py|json)|(gulp|grunt)file\.\w+|.+\.config\.[cm]?[jt]s|.+\.tf"
    # The folders of installed packages; and compiled modules, libraries and programs.
    r"|.+\.(dist-info|egg-info|egg)|.+\.(py[co]|so|pyd|dll|dylib|exe|bat|cmd)|.+\.so\.[\d.]+",
    re.ASCII,
)
"""Forms of such names, in lower case."""
_STARTED = {
    *("setup", "conftest", "noxfile", "tasks", "fabfile", "dodo", "wscript", "manage", "locustfile"),
    *("sitecustomize", "usercustomize", "__main__"),
}
"""The modules that Python and its tools run."""
_USUAL = {
    *("torch", "torchvision", "torchaudio", "transformers", "tokenizers", "safetensors", "accelerate", "peft", "trl"),
    *("datasets", "evaluate", "diffusers", "huggingface_hub", "sentencepiece", "tiktoken", "deepspeed", "lightning"),
    *("numpy", "scipy", "pandas", "sklearn", "pil", "tqdm", "requests", "urllib3", "yaml", "packaging", "filelock"),
    *("jax", "flax", "tensorflow", "triton", "flash_attn", "bitsandbytes", "vllm", "einops", "regex"),
    *("pytest", "pip", "ipython", "ipykernel", "matplotlib", "wandb", "mlflow", "tensorboard", "ray"),
    *("fsspec", "jinja2", "markupsafe", "typing_extensions", "setuptools", "safepoint", "psutil", "sympy", "mpmath"),
    *("networkx", "httpx", "httpcore", "h11", "anyio", "certifi", "idna", "charset_normalizer", "aiohttp", "hf_xet"),
    *("xxhash", "pyarrow", "dill", "multiprocess", "google", "ml_dtypes", "click", "typer", "rich", "pygments"),
    *("pydantic", "pydantic_core", "dateutil", "six", "joblib", "threadpoolctl", "cloudpickle", "numba", "llvmlite"),
    *("onnx", "onnxruntime", "optimum", "gguf", "kernels", "compressed_tensors", "xformers", "apex", "timm", "cv2"),
    *("av", "librosa", "soundfile", "functorch", "torchgen", "torchao", "torchdata", "nvidia", "cuda", "cupy"),
    *("pynvml", "unsloth", "liger_kernel", "sglang", "llama_cpp", "ctranslate2", "mpi4py", "jax_plugins"),
    *("mpl_toolkits", "azure", "opentelemetry"),
}
"""The packages, in lower case, that programs import to use a model. They may be installed on another machine only."""
_SUFFIXES = (".py", ".pyw", ".pyc", ".pyo", ".so", ".pyd")
_SOURCES = (".py", ".pyw")


def is_obeyed(path: str) -> bool:
    """Whether a file of a checkpoint, by its path there, is to be left out of an export."""
    parts = path.lower().split("/")
    # A shell passes a name that begins with a hyphen to a command as an option: `rm *`.
    if any(part.startswith((".", "-")) or part in _SETTINGS or _FORMS.fullmatch(part) for part in parts):
        return True
    if not parts[-1].endswith(_SOURCES):
        return False
    module = parts[-1].partition(".")[0]
    if module == "__init__" and len(parts) > 1:
        module = parts[-2]
    # Of a package without a file `__init__.py`, such as `google`, Python imports each part that it finds first.
    return module in _STARTED or _is_imported(parts[0].partition(".")[0])


def _is_imported(module: str) -> bool:
    return module in sys.stdlib_module_names or module in _USUAL or module in _installed()


@functools.cache
def _installed() -> frozenset[str]:
    """The modules and packages, in lower case, that are installed beside this one.

    Their folders are listed, because a package may have no file `__init__.py`.
    """
    found: set[str] = set()
    for place in (place for place in sys.path if place.endswith(("site-packages", "dist-packages"))):
        if os.path.isdir(place):
            with os.scandir(place) as entries:
                names = [one.name for one in entries if one.name.endswith(_SUFFIXES) or one.is_dir()]
            found |= {name.partition(".")[0].lower() for name in names}
    return frozenset(found)
