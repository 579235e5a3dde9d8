import json
import subprocess
import sys

import torch

from flexray.doctor import examine


def test_what_is_here_is_found():
    report = examine()
    found = {finding.name: finding for finding in report.findings}
    assert found["torch"].detail == torch.__version__
    assert found["GPUs"].status == ("ok" if torch.cuda.is_available() else "missing")
    assert found["Ray"].status == found["Weights & Biases"].status == "ok"
    usable = [backend.name for backend in report.attention if backend.usable]
    assert "sdpa" in usable
    assert report.used["attention"] == usable[0]
    assert report.used["device"].startswith("cuda" if torch.cuda.is_available() else "cpu")


# Hides modules from import and their packages from importlib.metadata.
WITHOUT = """
import importlib.metadata, json, sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden}:
            raise {error}

sys.meta_path.insert(0, Hide())
distributions = importlib.metadata.Distribution.from_name
def from_name(name):
    if name in {hidden}:
        raise importlib.metadata.PackageNotFoundError(name)
    return distributions(name)
importlib.metadata.Distribution.from_name = from_name

from flexray.doctor import examine
report = examine()
print(json.dumps(report.to_dict()))
"""


def examine_without(hidden, error):
    program = WITHOUT.format(hidden=set(hidden), error=error)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    return {finding["name"]: finding for finding in report["findings"]}, report


def test_nothing_installed():
    hidden = ["torch", "ray", "wandb", "transformers", "flash_attn"]
    found, report = examine_without(hidden, "ModuleNotFoundError(name)")
    for name in ("torch", "CUDA", "GPUs", "NCCL", "Ray", "Weights & Biases", "transformers"):
        assert found[name]["status"] == "missing"
    assert found["Python"]["status"] == found["memory"]["status"] == "ok"
    assert report["used"]["device"] == "none: torch cannot be loaded"
    assert report["used"]["attention"] == "none"


def test_a_torch_that_cannot_be_loaded():
    found, report = examine_without(["torch"], "OSError('libcudart.so.12:\\n no such file')")
    assert found["torch"]["status"] == "broken"
    assert found["torch"]["detail"] == "OSError: libcudart.so.12: no such file"
    assert found["Ray"]["status"] == "ok"
    assert report["used"]["attention"] == "none"
