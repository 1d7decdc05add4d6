"""Names of files that a program obeys, or imports, only because of their name. An export leaves such files out.

A checkpoint may contain files of any name, and someone else may have written it. At the target of an export they
would belong to this user. There they could become the settings of a program, such as `.git/hooks` or `uv.toml`, or
modules that Python, when it is started there, imports instead of its own, such as `json.py` or `torch.py`.

No file of a model has such a name. The code of a model (`modeling_x.py`) has other names, and runs only if the user
trusts it.
"""

import sys

_SETTINGS = {
    *("safepoint.toml", "pyproject.toml", "setup.cfg", "tox.ini", "pytest.ini", "mypy.ini", "ruff.toml", "uv.toml"),
    *("pdm.toml", "poetry.toml", "hatch.toml", "pixi.toml", "pipfile", "tox.toml", "pytest.toml", "dvc.yaml"),
    *("makefile", "gnumakefile", "bsdmakefile", "justfile", "cmakelists.txt", "meson.build"),
    *("sconstruct", "snakefile"),
    *("taskfile.yml", "taskfile.yaml", "rakefile", "gemfile", "vagrantfile", "jenkinsfile", "procfile", "wscript"),
    *("workspace", "module.bazel", "build.bazel", "flake.nix", "shell.nix", "default.nix"),
    *("package.json", "deno.json", "bunfig.toml", "cargo.toml", "build.rs", "build.gradle", "pom.xml", "build.xml"),
    *("dockerfile", "containerfile", "compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml"),
    *("compose.override.yaml", "compose.override.yml", "docker-compose.override.yml", "docker-compose.override.yaml"),
}
"""The names, in lower case, of files that a program obeys when a person starts it in their folder: Safepoint itself,
Python's tools, and tools that build or start something."""
_STARTED = {
    *("setup", "conftest", "noxfile", "tasks", "fabfile", "dodo", "wscript"),
    *("sitecustomize", "usercustomize", "__main__"),
}
"""The modules that Python and its tools run."""
_USUAL = {
    *("torch", "torchvision", "torchaudio", "transformers", "tokenizers", "safetensors", "accelerate", "peft", "trl"),
    *("datasets", "evaluate", "diffusers", "huggingface_hub", "sentencepiece", "tiktoken", "deepspeed", "lightning"),
    *("numpy", "scipy", "pandas", "sklearn", "pil", "tqdm", "requests", "urllib3", "yaml", "packaging", "filelock"),
    *("jax", "flax", "tensorflow", "triton", "flash_attn", "bitsandbytes", "vllm", "einops", "regex"),
    *("pytest", "pip"),
    *("fsspec", "jinja2", "typing_extensions", "setuptools", "safepoint"),
}
"""The packages, in lower case, that programs import to use a model."""
_SUFFIXES = (".py", ".pyw", ".pyc", ".pyo", ".so", ".pyd")


def is_obeyed(path: str) -> bool:
    """Whether a file of a checkpoint, by its path there, is to be left out of an export."""
    parts = path.split("/")
    # A shell passes a name that begins with a hyphen to a command as an option: `rm *`.
    if any(part.startswith((".", "-")) or part.lower() in _SETTINGS for part in parts):
        return True
    name = parts[-1].lower()
    if not name.endswith(_SUFFIXES):
        return False
    module = name.partition(".")[0]
    is_package = module == "__init__" and len(parts) > 1
    if is_package:
        module = parts[-2].lower()
    is_at_top = len(parts) == (2 if is_package else 1)
    return module in _STARTED or (is_at_top and (module in sys.stdlib_module_names or module in _USUAL))
