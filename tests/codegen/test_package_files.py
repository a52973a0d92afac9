"""What a rendered package promises: determinism, provenance, a digest over everything, plans that add up."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

import codegen
from codegen import formulas, lint, package, problem, render
from codegen.package import BLANK_DIGEST, DIGEST_CHARS, PLAN_FILE
from codegen.problem import ITEMSIZE

DEFAULT = problem.make(sram_bytes=196608, d=128)


@pytest.fixture(scope="module")
def files():
    return package.render_package(DEFAULT)


@pytest.fixture(scope="module")
def plan(files):
    return json.loads(files[PLAN_FILE])


@pytest.fixture(scope="module")
def forward_only():
    return package.render_package(problem.make(sram_bytes=196608, d=128, backward=False))


RENDER = """
import hashlib, sys
from codegen import package, problem
files = package.render_package(problem.make(sram_bytes=196608, d=128))
print(hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest())
"""


def test_bytes_do_not_depend_on_the_process(files):
    want = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    for seed in ("1", "2"):
        env = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(Path(codegen.__file__).parents[1]),
            "TZ": "UTC-9",
        }
        got = subprocess.run([sys.executable, "-c", RENDER], env=env, capture_output=True, text=True, check=True)
        assert got.stdout.strip() == want


def test_every_rendered_file_opens_with_the_canonical_command(files, plan):
    verbatim = {name.split("/", 1)[1] for name in plan["templates"] if not name.endswith(".j2")}
    for path, data in files.items():
        if path == PLAN_FILE or any(path.endswith(name) for name in verbatim):
            continue
        head = "\n".join(data.decode().splitlines()[:12])
        assert "codegen --sram 192KB --d 128" in head, path
        assert "Templates: sha256 " in data.decode(), path


@pytest.mark.parametrize("rows, start, products", [("variants", "forward", 2), ("backward", "backward", 5)])
def test_a_file_with_kernels_states_their_plans_and_costs(files, plan, rows, start, products):
    assert {row["target"] for row in plan[rows]} == {"cpu", "sm80"}
    for variant in plan[rows]:
        target = variant["target"] if variant["target"] != "cpu" else f"cpu_{variant['isa']}"
        (source,) = [p for p in files if p.startswith(f"csrc/{start}_{target}.")]
        head = files[source].decode()[:4000]
        tile = f"Br={variant['plan']['br']} Bc={variant['plan']['bc']}, {variant['fast_memory_bytes']} bytes"
        assert f"{variant['isa']} {variant['dtype']}: {tile}" in head, source
        assert f"FLOPs per head without a mask: {products * 2 * 128} * Nq * Nk" in head


def test_the_digest_is_recomputed_from_the_files_alone(files, plan):
    assert package.content_digest(files) == plan["digest"]
    assert BLANK_DIGEST[:DIGEST_CHARS].encode() not in b"".join(files.values())
    assert f"tileproof_attn_d128_sram192k_{plan['digest'][:DIGEST_CHARS]}".encode() in b"".join(files.values())


def test_the_digest_covers_every_file(files, plan):
    for path in plan["files"]:
        assert package.content_digest({**files, path: files[path] + b"\n"}) != plan["digest"], path
    changed = dict(plan, variants=plan["variants"][1:])
    assert package.content_digest({**files, PLAN_FILE: json.dumps(changed).encode()}) != plan["digest"]


def test_plan_json_lists_every_file_and_template_with_its_digest(files, plan):
    assert {p: hashlib.sha256(d).hexdigest() for p, d in files.items() if p != PLAN_FILE} == plan["files"]
    for name, digest in plan["templates"].items():
        assert hashlib.sha256((render.TEMPLATES / name).read_bytes()).hexdigest() == digest


def test_variants_have_distinct_keys_and_memory_that_adds_up(plan):
    keys = [tuple(v[k] for k in ("target", "isa", "dtype", "causal", "length_class")) for v in plan["variants"]]
    assert len(set(keys)) == len(keys)
    for v in plan["variants"]:
        assert sum(part["bytes"] for part in v["memory"]) == v["fast_memory_bytes"] <= plan["request"]["sram_bytes"]
        assert v["formulas"] == formulas.forward(d=128, dv=128, br=v["plan"]["br"], itemsize=ITEMSIZE[v["dtype"]])


def test_gradient_kernels_have_distinct_keys_and_memory_that_fits(plan):
    keys = [tuple(v[k] for k in ("target", "isa", "dtype")) for v in plan["backward"]]
    assert len(set(keys)) == len(keys)
    for v in plan["backward"]:
        size = sum(part["bytes"] for part in v["memory"])
        assert size <= v["fast_memory_bytes"] < size + 64 and v["fast_memory_bytes"] <= plan["request"]["sram_bytes"]
        br, bc = v["plan"]["br"], v["plan"]["bc"]
        itemsize = ITEMSIZE[v["dtype"]]
        assert v["formulas"] == formulas.backward(target=v["target"], d=128, dv=128, br=br, bc=bc, itemsize=itemsize)


@pytest.mark.parametrize("rows", ["variants", "backward"])
def test_the_default_package_serves_every_dtype_of_every_default_target(plan, rows):
    cpu = {v["dtype"] for v in plan[rows] if v["target"] == "cpu"}
    gpu = {v["dtype"] for v in plan[rows] if v["target"] == "sm80"}
    assert cpu == {"float32", "float64", "bf16", "fp16"} and gpu == {"bf16", "fp16"}


def test_a_package_without_backward_has_the_same_forward_kernels_and_nothing_of_the_other_pass(plan, forward_only):
    stated = json.loads(forward_only[PLAN_FILE])
    assert stated["variants"] == plan["variants"] and stated["backward"] == []
    assert stated["command"] == "codegen --sram 192KB --d 128 --no-backward"
    assert not [path for path in forward_only if "backward" in path]
    assert not [path for path, data in forward_only.items() if b"BackwardArgs" in data or b"BACKWARD_VARIANTS" in data]


def test_an_emitted_package_imports_nothing_of_ours(files):
    for path, data in files.items():
        if path.endswith(".py"):
            for node in ast.walk(ast.parse(data)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
                assert not {n.split(".")[0] for n in names} & {"spec", "codegen", "verify", "numpy"}, path


def test_emitted_cuda_keeps_the_emulators_contract(files):
    covered = [path for path in files if lint.covers(path)]
    assert "csrc/forward_sm80.cu" in covered and "csrc/ptx_sm80.cuh" in covered
    assert [v for path in covered for v in lint.violations(path, files[path].decode())] == []


@pytest.mark.field("R092")
def test_requests_that_differ_in_one_option_give_distinct_artefacts():
    base = {"sram_bytes": 98304, "d": 64}
    changes = (
        {}, {"sram_bytes": 65536}, {"sram_bytes": 98305}, {"d": 72}, {"dv": 32}, {"dtypes": ["bf16"]},
        {"archs": ["cpu"]}, {"archs": ["sm80"]}, {"archs": ["sm86"]}, {"debug": True},
        {"backward": False},
    )  # fmt: skip
    made = []
    for change in changes:
        p = problem.make(**{**base, **change})
        made.append(package.render_package(p))
        # The same name must not hide different content either.
        made.append(package.render_package(p, "same"))
    namespaces = [package.read_plan(f[PLAN_FILE])["digest"][:DIGEST_CHARS] for f in made]
    for (i, a), (j, b) in combinations(enumerate(namespaces), 2):
        assert a != b, (changes[i // 2], changes[j // 2])


@pytest.mark.field("R092")
@pytest.mark.parametrize("override", [{"br": 64}, {"bc": 64}])
def test_a_tile_override_reaches_the_text(override):
    p = problem.make(sram_bytes=98304, d=64, archs=["sm80"])
    chosen = package.decide(p).variants[0].plan
    ours = {"br": chosen.br, "bc": chosen.bc, **override}
    other = package.render_package(problem.make(sram_bytes=98304, d=64, archs=["sm80"], **ours))
    assert other["csrc/forward_sm80.cu"] != package.render_package(p)["csrc/forward_sm80.cu"]


def test_a_changed_template_changes_the_digest(tmp_path, plan):
    shutil.copytree(render.TEMPLATES, tmp_path / "t")
    (tmp_path / "t/package/csrc/forward.h.j2").open("a").write("// more\n")
    assert (
        package.read_plan(package.render_package(DEFAULT, templates=tmp_path / "t")[PLAN_FILE])["digest"]
        != plan["digest"]
    )


def test_a_template_that_breaks_the_contract_emits_nothing(tmp_path):
    shutil.copytree(render.TEMPLATES, tmp_path / "t")
    (tmp_path / "t/sm80/forward_sm80.cu.j2").open("a").write("__shared__ float tile[64];\n")
    with pytest.raises(lint.LintError, match="rule 2"):
        package.render_package(problem.make(sram_bytes=98304, d=64, archs=["sm80"]), templates=tmp_path / "t")
