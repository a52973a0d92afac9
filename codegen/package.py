"""One request to the bytes of one package: plans every target, renders every file, seals with a digest.

    files = render_package(problem)      # {"op.py": b"...", "csrc/forward_sm80.cu": b"...", "plan.json": ...}

Holds always:
  * Equal requests (and names) give equal bytes: nothing here reads the clock, the machine or the typed
    command.
  * `digest` (sha256) covers every byte of every file, plan.json's request and plans included, with the
    digest's own occurrences blanked; `content_digest` recomputes it from the files alone. The op
    namespace carries its first DIGEST_CHARS characters, so different content never shares a namespace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import __version__, advice, formulas, lint, names, planners, provenance, render
from .devices import DEVICES
from .errors import PlanError, RequestError
from .plan import LENGTH_CLASSES, Decision, Variant, require_dispatch, with_units
from .problem import DEFAULT_SET, ITEMSIZE, Problem

PLAN_FILE = "plan.json"
CERTIFICATE_FILE = "certificate.json"
FORMAT = "tileproof package 1"
DIGEST_CHARS = 12
# Stands where the digest will be while the digest is computed. Hexadecimal, so that it is legal in an identifier.
BLANK_DIGEST = hashlib.sha256(b"the digest of a tileproof package goes here").hexdigest()

# Every template of this family emits a file of the same relative path, without ".j2".
PACKAGE_TEMPLATES = "package"


@dataclass(frozen=True, kw_only=True)
class Plans:
    """A request with what was decided for each of its targets, in the order of `problem.archs`."""

    problem: Problem
    name: str
    decisions: tuple[Decision, ...]

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(v for decision in self.decisions for v in decision.variants)

    @property
    def backward(self) -> tuple[Variant, ...]:
        return tuple(v for decision in self.decisions for v in decision.backward)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One file to render: where its text comes from and which kernels it holds."""

    template: str
    context: Mapping[str, Any]
    variants: tuple[Variant, ...] = field(default=())


def decide(problem: Problem, name: str | None = None) -> Plans:
    """Ask the planner of each target.

    Raises: PlanError when a target has no legal plan, RequestError for a name that is not one.
    """
    chosen = names.package_name(problem) if name is None else names.check_name(name)
    try:
        decisions = _decisions(problem)
    except PlanError as e:
        raise advice.advised(e, problem, _fits) from None
    return Plans(problem=problem, name=chosen, decisions=decisions)


def around(decision: Decision, problem: Problem, name: str) -> Plans:
    """The package of a decision that is already made for one target of `problem`; the others are planned as usual."""
    decisions = tuple(
        (with_units(decision) if _is_exact(arch) else decision) if arch == decision.arch else _decide(problem, arch)
        for arch in problem.archs
    )
    return Plans(problem=problem, name=names.check_name(name), decisions=decisions)


def _decisions(problem: Problem) -> tuple[Decision, ...]:
    decisions = tuple(_decide(problem, arch) for arch in problem.archs)
    for decision in decisions:
        require_dispatch(decision.variants)
        require_dispatch(decision.backward)
    return decisions


def _decide(problem: Problem, arch: str) -> Decision:
    decision = planners.planner(arch).decide(asked_of(problem, arch), arch)
    return with_units(decision) if _is_exact(arch) else decision


def _is_exact(arch: str) -> bool:
    return arch in DEVICES and DEVICES[arch].is_exact


def asked_of(problem: Problem, arch: str) -> Problem:
    """The request as the planner of `arch` gets it: a companion keeps its own tile, whatever --br and --bc say."""
    return replace(problem, br=None, bc=None) if arch in planners.companions(problem.archs) else problem


def _fits(problem: Problem) -> bool:
    try:
        _decisions(problem)
    except PlanError:
        return False
    return True


def render_package(problem: Problem, name: str | None = None, templates: Path = render.TEMPLATES) -> dict[str, bytes]:
    """The files of the package for `problem`: relative path -> bytes, sorted by path.

    Raises: PlanError and RequestError as `decide`; lint.LintError when an emitted CUDA file breaks the
        emulator's contract (our own fault).
    """
    return render_plans(decide(problem, name), templates)


def render_plans(plans: Plans, templates: Path = render.TEMPLATES) -> dict[str, bytes]:
    """The files of the package for plans that are already made."""
    sources = _sources(plans, templates)
    shared = _shared_context(plans)
    files: dict[str, bytes] = {}
    for path, source in sorted(sources.items()):
        header = provenance.header(
            command=shared["command"],
            variants=source.variants,
            flops=_flops(path, plans.problem),
            templates_digest=render.digest([source.template], templates),
        )
        text = render.render(source.template, {**shared, **source.context, "header": header}, templates)
        if text:  # a template that prints nothing emits no file
            files[path] = text
    lint.require_clean({path: data.decode() for path, data in files.items() if lint.covers(path)})

    plan = _plan_json(plans, sources, templates)
    digest = _digest(files, plan)
    files = {path: _with_digest(data, digest) for path, data in files.items()}
    plan["digest"] = digest
    plan["files"] = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    files[PLAN_FILE] = _json_bytes(plan)
    return dict(sorted(files.items()))


def content_digest(files: Mapping[str, bytes]) -> str:
    """The digest that a package of these files must state, recomputed from them alone.

    `files` has plan.json and every file that it lists; anything else (a certificate) is ignored.
    Raises: RequestError when plan.json is not one of ours.
    """
    plan = read_plan(files.get(PLAN_FILE, b""))
    stated = plan.pop("digest")
    listed = plan.pop("files")
    blanked = {
        path: files[path].replace(stated.encode(), BLANK_DIGEST.encode()).replace(
            stated[:DIGEST_CHARS].encode(), BLANK_DIGEST[:DIGEST_CHARS].encode()
        )
        for path in listed
        if path in files
    }  # fmt: skip
    return _digest(blanked, plan)


def read_plan(data: bytes) -> dict[str, Any]:
    """plan.json as a dictionary.

    Raises: RequestError when it is not the plan of a tileproof package.
    """
    try:
        plan = json.loads(data)
    except (ValueError, RecursionError):  # too deep to be ours
        plan = None
    kinds = {"format": str, "name": str, "request": dict, "digest": str, "files": dict}
    whole = isinstance(plan, dict) and all(isinstance(plan.get(key), kind) for key, kind in kinds.items())
    if not whole or plan["format"] != FORMAT:
        raise RequestError(f"{PLAN_FILE} is not the plan of a tileproof package ({FORMAT})")
    return plan


def _sources(plans: Plans, templates: Path) -> dict[str, _Source]:
    """Every file of the package but plan.json, by relative path."""
    sources = {}
    root = templates / PACKAGE_TEMPLATES
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root).as_posix()
        if path.is_file() and not _is_our_own(relative):
            template = f"{PACKAGE_TEMPLATES}/{relative}"
            sources[relative.removesuffix(render.SUFFIX)] = _Source(template=template, context={})
    for decision in plans.decisions:
        asked = asked_of(plans.problem, decision.arch)
        for relative, (template, context) in planners.planner(decision.arch).files(asked, decision).items():
            source = _Source(template=template, context=context, variants=_variants_of(relative, decision))
            if relative in sources and sources[relative] != source and template.endswith(render.SUFFIX):
                raise AssertionError(f"two targets emit different {relative}")
            sources[relative] = source
    return sources


def _flops(path: str, problem: Problem) -> int:
    """FLOPs per pair of a row and a visible key: S, O; or S, dP, dQ, dK, dV."""
    is_backward = path.rsplit("/", 1)[-1].startswith("backward")
    return 2 * (3 * problem.d + 2 * problem.dv if is_backward else problem.d + problem.dv)


def _is_our_own(relative: str) -> bool:
    """Whether a file of the template folder is for its readers or for other templates, and emits nothing."""
    name = relative.rsplit("/", 1)[-1]
    partial = name.startswith("_") and not name.startswith("__")
    return relative == "README.md" or partial or name.startswith(".") or "__pycache__" in relative


def _variants_of(path: str, decision: Decision) -> tuple[Variant, ...]:
    """The kernels that the file holds: by the pass and the unit in its name, else all of the target's pass."""
    stem = path.rsplit("/", 1)[-1].split(".")[0]
    among = decision.backward if stem.startswith("backward") else decision.variants
    return tuple(v for v in among if stem.endswith("_" + v.unit)) or among


def _shared_context(plans: Plans) -> dict[str, Any]:
    """What every template may ask about the whole package."""
    digest = BLANK_DIGEST[:DIGEST_CHARS]
    lengths = {v.length_class for v in plans.variants}
    return {
        "problem": plans.problem,
        "name": plans.name,
        "digest": digest,
        "namespace": f"tileproof_{plans.name}_{digest}",
        "command": names.canonical_command(plans.problem, plans.name),
        "version": __version__,
        "decisions": plans.decisions,
        "variants": plans.variants,
        "backward": list(plans.backward),
        "backward_kinds": sorted({"cuda" if v.target in DEVICES else "cpu" for v in plans.backward}),
        "portable": [v for v in plans.variants if v.target in DEVICES and not _is_exact(v.target)],
        "exact": [v for v in plans.variants if _is_exact(v.target)],
        "length_classes": {name: most for name, most in LENGTH_CLASSES.items() if name in lengths},
    }


def _plan_json(plans: Plans, sources: Mapping[str, _Source], templates: Path) -> dict[str, Any]:
    """plan.json without `digest` and `files`, which depend on the rest."""
    problem = plans.problem
    used = sorted({one for s in sources.values() for one in render.sources(s.template, templates)})
    return {
        "format": FORMAT,
        "name": plans.name,
        "command": names.canonical_command(problem, plans.name),
        "generator": f"tileproof {__version__}",
        "default_set": DEFAULT_SET,
        "request": problem.as_dict(),
        "variants": [variant_dict(v, problem) for v in plans.variants],
        "backward": [backward_dict(v, problem) for v in plans.backward],
        "templates": {one: hashlib.sha256((templates / one).read_bytes()).hexdigest() for one in used},
    }


def variant_dict(variant: Variant, problem: Problem) -> dict[str, Any]:
    """One row of plan.json's `variants`."""
    return {
        "target": variant.target,
        "isa": variant.isa,
        **({"unit": variant.unit} if _is_exact(variant.target) else {}),
        "dtype": variant.dtype,
        "causal": variant.causal,
        "length_class": variant.length_class,
        **_plan_dict(variant),
        "formulas": formulas.forward(d=problem.d, dv=problem.dv, br=variant.plan.br, itemsize=ITEMSIZE[variant.dtype]),
    }


def backward_dict(variant: Variant, problem: Problem) -> dict[str, Any]:
    """One row of plan.json's `backward`: a kernel of the gradients, for every mask and length."""
    plan = variant.plan
    texts = formulas.backward(
        target=variant.target, d=problem.d, dv=problem.dv, br=plan.br, bc=plan.bc, itemsize=ITEMSIZE[variant.dtype]
    )
    row = {"target": variant.target, "isa": variant.isa, "dtype": variant.dtype}
    return {**row, **_plan_dict(variant), "formulas": texts}


def _plan_dict(variant: Variant) -> dict[str, Any]:
    return {
        "arithmetic": variant.arithmetic,
        "plan": variant.plan.as_dict(),
        "memory": [{"name": part.name, "bytes": part.bytes} for part in variant.plan.memory],
        "fast_memory_bytes": variant.plan.fast_memory_bytes,
    }


def _digest(files: Mapping[str, bytes], plan: Mapping[str, Any]) -> str:
    h = hashlib.sha256(_json_bytes(plan))
    for path, data in sorted(files.items()):
        h.update(f"{path}\0{len(data)}\0".encode())
        h.update(data)
    return h.hexdigest()


def _with_digest(data: bytes, digest: str) -> bytes:
    return data.replace(BLANK_DIGEST[:DIGEST_CHARS].encode(), digest[:DIGEST_CHARS].encode())


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
