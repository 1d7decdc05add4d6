"""What the pods of Red Hat's guides have and this machine does not: in PYTHONPATH, it stands in for that.

The article uses names whose values its readers choose: here these are environment variables. It asks for bfloat16 and
flash attention, for which transformers wants a GPU: here the CPU computes both, the latter by PyTorch's own function.
"""

import builtins
import importlib.abc
import importlib.machinery
import os
import sys


def _compute_on_the_cpu(module):
    module.is_torch_bf16_gpu_available = lambda: True


def _attend_on_the_cpu(module):
    choose = module.PreTrainedModel._check_and_adjust_attn_implementation

    def choose_here(self, asked, *args, **kwargs):
        return choose(self, "sdpa" if asked == "flash_attention_2" else asked, *args, **kwargs)

    module.PreTrainedModel._check_and_adjust_attn_implementation = choose_here


_STAND_INS = {"transformers.training_args": _compute_on_the_cpu, "transformers.modeling_utils": _attend_on_the_cpu}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls the function of a module when the module was imported."""

    def find_spec(self, fullname, path, target=None):
        change = _STAND_INS.pop(fullname, None)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if change is not None else None
        if spec is not None:
            run = spec.loader.exec_module

            def run_and_change(module):
                run(module)
                change(module)

            spec.loader.exec_module = run_and_change
        return spec


sys.meta_path.insert(0, _AfterImport())
for _name in ("MODEL_LOCAL_PATH", "DATASET_LOCAL_PATH", "OUTPUT_DIR"):
    setattr(builtins, _name, os.environ[_name])
