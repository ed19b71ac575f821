"""Every architecture of transformers' causal language models, made small, beside transformers.

    python benchmarks/architectures.py > docs/models.md       # all; minutes
    python benchmarks/architectures.py --only llama gpt_oss   # these

Each architecture's configuration class is made small (three layers, windows shorter than the
prompts), its model gets random weights, and two prompts are completed greedily in float32 by
transformers' own ``generate`` and by specplug in three ways: plain, with prompts cut into chunks of
5 tokens over pages of 3, and with trees of drafts of which some are right. All tokens must be the
same, and the log-probabilities of all tokens at all positions equal up to rounding. Each
architecture runs in a process of its own with a time limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch

from specplug import (
    LLM,
    AlgorithmInfo,
    Batch,
    Capabilities,
    CheckpointError,
    CommittedOutput,
    Defaults,
    Draft,
    DraftInput,
    Runtime,
    SamplingParams,
    hookimpl,
)

PROMPTS = ((5, 80, 33, 2, 2, 61, 7, 90, 14, 55, 31, 8, 77, 20, 4, 68), (9, 41, 3, 70, 12))
NEW_TOKENS = 16
VOCAB_SIZE = 96
TOLERANCE = 1e-3
_DEPTH, _NODES = 4, 9
_RIGHT = 0.67
_VALUES: dict[Any, str] = {
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input",
    32: "hidden_size n_embd d_model",
    48: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim",
    3: "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers",
    4: (
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts qk_rope_head_dim rotary_dim index_topk"
    ),
    2: (
        "num_key_value_heads num_experts_per_tok n_group eos_token_id moe_k moe_topk "
        "index_n_heads attn_layer_period"
    ),
    8: (
        "head_dim qk_nope_head_dim index_head_dim mamba_n_heads mamba_d_head "
        "hidden_size_per_layer_input"
    ),
    128: "max_position_embeddings n_positions max_seq_len",
    6: "sliding_window v_head_dim keep_window_size",
    1: (
        "max_window_layers n_shared_experts num_shared_experts topk_group "
        "first_k_dense_replace bos_token_id attn_layer_offset depth"
    ),
    16: "moe_intermediate_size shared_expert_intermediate_size",
    12: "q_lora_rank qk_head_dim",
    10: "kv_lora_rank",
    0: "pad_token_id num_kv_shared_layers",
}
SHAPE: dict[str, Any] = {
    **{name: value for value, names in _VALUES.items() for name in names.split()},
    "use_sliding_window": True,
    "attention_dropout": 0.0,
}
"""What a configuration gets of these, if its class has it."""
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
OWN_SHAPE: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gpt_neo": {
        "attention_types": [[["global"], 1], [["local"], 1], [["global"], 1]],
        "window_size": 6,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "lfm2_moe": {"num_hidden_layers": 4},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "jamba": {"num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [1]},
}
"""By architecture, where the class needs something else."""


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 2.5, 3.0, 4.0],
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "gemma2, soft caps": (
        "gemma2",
        {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3_text, bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}),
    "phimoe, no window": ("phimoe", {"sliding_window": None}),
    "qwen2, no window": ("qwen2", {"use_sliding_window": False}),
    "gpt_bigcode, all key heads": ("gpt_bigcode", {"multi_query": False}),
    "bert, decoder": ("bert", {"is_decoder": True}),
}
"""What an architecture is beside what its class makes of ``SHAPE``."""


def small_config(model_type: str, **changes: Any) -> Any:
    """A configuration of that type, as small as it can be."""
    from transformers import CONFIG_MAPPING

    return _shrunk(CONFIG_MAPPING[model_type], {**OWN_SHAPE.get(model_type, {}), **changes})


def _shrunk(cls: Any, changes: dict[str, Any]) -> Any:
    default = cls()
    shape = {name: value for name, value in SHAPE.items() if _can_set(default, name)}
    if "qk_rope_head_dim" in shape:  # latent attention; its ``head_dim`` is the rotated part
        shape["num_key_value_heads"] = 4
        if "head_dim" in shape:
            shape["head_dim"] = shape["qk_rope_head_dim"]
    for name, value in vars(default).items():
        if name.endswith(_KINDS_OF_LAYERS) and isinstance(value, list):
            shape[name] = _some_of_each(value, changes.get("num_hidden_layers", 3))
    for name in default.sub_configs or {}:
        sub = getattr(default, name, None)
        if sub is not None and name not in changes:
            shape[name] = _shrunk(type(sub), {}).to_dict()
    return cls(**{**shape, **changes})


_KINDS_OF_LAYERS = ("layer_types", "indexer_types", "layers_block_type", "block_types")


def _can_set(config: Any, name: str) -> bool:
    """Whether a configuration has a value of that name, and not under another one."""
    if name in (config.attribute_map or {}) or isinstance(
        getattr(type(config), name, None), property
    ):
        return False
    try:
        return hasattr(config, name)
    except Exception:  # a value that differs by layer
        return False


def _some_of_each(kinds: Sequence[str], count: int) -> list[str]:
    """``count`` of them in which each kind occurs."""
    chosen = list(dict.fromkeys(kinds))[:count]
    return (chosen * count)[:count]


def save_random_model(config: Any, folder: Path) -> None:
    """Weights that keep the size of what runs through them, and norms and biases that are not one
    and zero, which would hide a slip."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        embeddings = model.get_input_embeddings()
        if embeddings is not None:
            embeddings.weight.normal_()
    if model.generation_config is not None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "forced_eos_token_id"):
            setattr(model.generation_config, name, None)
    model.save_pretrained(folder)


@attrs.frozen
class Expected:
    """What transformers gives for a prompt: tokens, and log-probabilities [n, V]."""

    tokens: tuple[int, ...]
    logprobs: torch.Tensor


@torch.inference_mode()
def generate_plainly(folder: Path) -> list[Expected]:
    """Each prompt on its own, by transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    found = []
    for prompt in PROMPTS:
        out = model.eval().generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.stack(out.logits, 1)[0].double()
        tokens = tuple(out.sequences[0, len(prompt) :].tolist())
        found.append(Expected(tokens, logits.log_softmax(-1)))
    return found


class RandomTrees:
    """An algorithm that drafts random trees; some of their nodes are right.

    Args:
        expected: tokens after each prompt.
    """

    def __init__(self, expected: Mapping[tuple[int, ...], tuple[int, ...]]) -> None:
        self._known = {prompt: prompt + tokens for prompt, tokens in expected.items()}
        self._random = random.Random(0)

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="RANDOM_TREES",
            summary="Random trees, right by chance",
            api_version=1,
            capabilities=Capabilities(branching=True),
            defaults=Defaults(num_steps=_DEPTH, num_draft_tokens=_NODES),
        )

    @hookimpl
    def create_worker(self, runtime: Runtime) -> RandomTrees:
        return self

    @hookimpl
    def build_draft_input(self, target_output: CommittedOutput) -> DraftInput:
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        starts, roots = batch.seq_lens.tolist(), draft_input.bonus_tokens.tolist()
        tokens, parents = [], []
        for request, start, root in zip(batch.requests, starts, roots, strict=True):
            known = self._known[tuple(request.prompt_token_ids)]
            nodes, above = self._tree(root, known[start + 1 :])
            tokens.append(nodes)
            parents.append(above)
        return Draft.tree(torch.tensor(tokens), torch.tensor(parents), _DEPTH)

    def _tree(self, root: int, future: Sequence[int]) -> tuple[list[int], list[int]]:
        nodes, parents, depths = [root], [-1], [0]
        while len(nodes) < _NODES:
            open_nodes = [i for i, depth in enumerate(depths) if depth < _DEPTH]
            parent = self._random.choice(open_nodes[-3:])
            depth = depths[parent]
            right = depth < len(future) and self._random.random() < _RIGHT
            token = future[depth] if right else self._random.randrange(VOCAB_SIZE)
            if (parent, token) not in zip(parents, nodes, strict=True):
                nodes.append(token)
                parents.append(parent)
                depths.append(depth + 1)
        return nodes, parents


def difference(folder: Path, expected: Sequence[Expected]) -> str | None:
    """What differs first between specplug's runs and what is expected; None: nothing."""
    known = {prompt: one.tokens for prompt, one in zip(PROMPTS, expected, strict=True)}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "in chunks": {"chunked_prefill_size": 5, "page_size": 3},
        "with trees": {"speculative_algorithm": RandomTrees(known), "page_size": 3},
    }
    vocab_size = expected[0].logprobs.shape[-1]
    params = SamplingParams(max_tokens=NEW_TOKENS, logprobs=vocab_size, ignore_eos=True)
    for way, settings in ways.items():
        with LLM(folder, dtype="float32", device="cpu", num_threads=1, **settings) as llm:
            outputs = llm.generate(PROMPTS, params)
            llm.check_pool()
        for output, one in zip(outputs, expected, strict=True):
            if output.token_ids != one.tokens:
                return f"{way}: other tokens"
            rows = [[row[i].logprob for i in range(vocab_size)] for row in output.logprobs or ()]
            gap = (torch.tensor(rows, dtype=torch.float64) - one.logprobs).abs().max().item()
            if not gap < TOLERANCE:
                return f"{way}: log-probabilities differ by {gap:.2g}"
        if way == "with trees" and max(max(output.accept_lens) for output in outputs) < 2:
            return f"{way}: no draft was accepted"
    return None


@attrs.frozen
class Row:
    """What became of an architecture: identical, refused, not made, wrong or crashed, and why."""

    name: str
    result: str
    why: str = ""


def examine(name: str, model_type: str, changes: dict[str, Any]) -> Row:
    """Run one architecture in this process."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            config = small_config(model_type, **changes)
            config.save_pretrained(folder)
        except Exception as error:
            return Row(name, "not made", _told(error))
        try:
            save_random_model(config, folder)
            expected = generate_plainly(folder)
        except Exception as error:
            return _refused_by_config(name, folder) or Row(name, "not made", _told(error))
        try:
            found = difference(folder, expected)
        except CheckpointError as error:
            return Row(name, "refused", _reason(error))
        except Exception as error:
            return Row(name, "crashed", _told(error))
        return Row(name, "wrong", found) if found else Row(name, "identical")


def _refused_by_config(name: str, folder: Path) -> Row | None:
    """What transformers cannot run when it is small may be refused before its weights are read."""
    try:
        LLM(folder, device="cpu").close()
    except CheckpointError as error:
        return Row(name, "refused", _reason(error)) if " has " in str(error) else None
    except Exception:
        return None
    return None


def _reason(error: CheckpointError) -> str:
    """What a refusal says of the model itself."""
    return str(error).split("; expected", 1)[0].partition(") has ")[2] or (
        str(error).split("; expected", 1)[0].partition("): ")[2] or str(error)
    )


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(map(str.strip, lines))[:160]}"


def _child(name: str, model_type: str, changes: dict[str, Any], pipe: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    warnings.simplefilter("ignore")
    pipe.send(examine(name, model_type, changes))


def examine_apart(name: str, limit: float = 300.0) -> Row:
    """Run one architecture in a process of its own, for ``limit`` seconds at most."""
    model_type, changes = VARIANTS.get(name, (name, {}))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, model_type, changes, theirs))
    process.start()
    theirs.close()
    try:
        late = Row(name, "crashed", f"it took more than {limit:.0f} s")
        row: Row = ours.recv() if ours.poll(limit) else late
    except EOFError:
        process.join()
        row = Row(name, "crashed", f"the process ended with {process.exitcode}")
    process.kill()
    process.join()
    return row


def examine_all(names: Sequence[str], jobs: int) -> list[Row]:
    """Run these architectures; what all need is imported once."""
    torch.set_num_threads(1)
    examine("llama", "llama", {})
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(examine_apart, names))


def page(rows: Sequence[Row]) -> str:
    """The rows as docs/models.md."""
    import transformers

    counts = Counter(row.result for row in rows)
    total = ", ".join(f"{counts[result]} {result}" for result in counts)
    lines = [
        "# Models",
        "",
        "Every architecture of transformers' causal language models, made small from its",
        "configuration class, with random weights, beside transformers' own `generate`.",
        "*Identical*: the same tokens and, up to rounding, the same log-probabilities of the whole",
        "vocabulary, plain, with prompts in chunks of 5 over pages of 3, and with trees of drafts.",
        "*Refused*: when it is loaded, with the reason given here. *Not made*: its class could not",
        "be made small, or transformers could not run it.",
        "",
        "A model need not be in this list. Every target is proved when it is loaded: a short",
        "sequence runs through its own attention and masks, then through the engine's passes",
        "(whole, in chunks, two requests together, as a tree). If more than rounding differs, the",
        "model is refused. `LLM(skip_model_check=True)` and `--skip-model-check` skip the proof.",
        "",
        "[loading.md](loading.md) describes how weights load, also quantized ones.",
        "",
        "A command wrote this page:",
        "",
        "    python benchmarks/architectures.py > docs/models.md",
        "",
        f"With transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]},",
        f"in float32 on the CPU: {total}.",
        "",
        "| architecture | result | why |",
        "| --- | --- | --- |",
        *(f"| {row.name} | {row.result} | {row.why.replace('|', '/')} |" for row in rows),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Print the page; 1 if any model is wrong or crashes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="architectures and variants; else all")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    rows = examine_all(
        options.only or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS], options.jobs
    )
    sys.stdout.write(page(rows))
    return int(any(row.result in ("wrong", "crashed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
