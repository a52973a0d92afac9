"""The Python of the README runs as it stands there. Whether its results are right is the judge's question."""

from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def test_the_example_of_the_readme_runs():
    text = (ROOT / "README.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    for name in "qkv":
        tensor = names[name]
        assert tensor.grad.shape == tensor.shape and tensor.grad.isfinite().all() and tensor.grad.any()
    assert not torch.equal(names["q"].grad, names["k"].grad)
