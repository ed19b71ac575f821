"""specplug: speculative decoding in which an algorithm is a pip package.

Plugins import everything from here. A package that brings specplug to another engine imports from
here and from ``specplug.speculative``: what it implements of the command line (``HostPlugin``), the
``Registry`` of what is installed, and how its settings are declared (``settings``).

A module that needs torch is loaded when one of its names is first used: ``import specplug`` does
not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specplug.algorithm import (
    API_VERSION,
    DATA_ONLY,
    DEFAULT_MODEL,
    DEFAULT_MODEL_PATH,
    HELD_OUT_PROMPTS,
    AlgorithmInfo,
    Capabilities,
    Conformance,
    Defaults,
    SpecConfig,
)
from specplug.errors import (
    CheckpointError,
    FallbackWarning,
    PluginError,
    RankError,
    SpecplugError,
    UnknownAlgorithm,
    UsageError,
)
from specplug.hookspecs import hookimpl
from specplug.host import (
    Completion,
    EngineOptions,
    HostCapabilities,
    HostPlugin,
    MeasuredEngine,
    RunOptions,
    ServerOptions,
)
from specplug.speculative.draft_model_algorithm import DraftModelAlgorithm

if TYPE_CHECKING:
    from specplug import settings
    from specplug.config import EngineConfig
    from specplug.kernels.argmax import LikeliestTokens, argmax_rows, likeliest_tokens
    from specplug.kernels.plugin_library import load_compiled, runs_plugin_kernels
    from specplug.llm import LLM
    from specplug.model.paged_model import PagedModel
    from specplug.outputs import Logprob, RequestOutput
    from specplug.registry import Registry
    from specplug.sampling_params import SamplingParams
    from specplug.speculative import layers
    from specplug.speculative.draft import Draft, DraftInput
    from specplug.speculative.draft_checkpoint import Checkpoint
    from specplug.speculative.draft_joining import (
        append_nodes,
        choose_drafts,
        keep_likeliest,
        merge_drafts,
    )
    from specplug.speculative.draft_plan import (
        DraftChoices,
        DraftPlan,
        ForcedTokens,
        ForeseenDrafts,
        Hindsight,
    )
    from specplug.speculative.draft_state import ReceivedState, StateTensor, received_state
    from specplug.speculative.feature_drafter import FeatureDrafter
    from specplug.speculative.future_map import FutureMap
    from specplug.speculative.hook_order import Batch, RequestView
    from specplug.speculative.host_copy import upload_together
    from specplug.speculative.initial_weights import begin_like, layer_sizes, norm_weight
    from specplug.speculative.lattice import Lattice, likeliest_tree, longest_path
    from specplug.speculative.noise import couple
    from specplug.speculative.output_kind import PerTokenOutput
    from specplug.speculative.report import RequestReport, StepReport
    from specplug.speculative.rotation import chunk_tails, rotate_chunks
    from specplug.speculative.runtime import AttentionPlan, KVCache, Runtime, TargetPlan
    from specplug.speculative.target_drafter import TargetDrafter
    from specplug.speculative.token_drafter import TokenDrafter
    from specplug.speculative.token_map import TokenMap
    from specplug.speculative.trainer import (
        DraftFiles,
        FeatureTrainer,
        Trainer,
        TrainingBatch,
        TrainingLoss,
        TrainingRuntime,
        UnrolledAttention,
    )
    from specplug.speculative.tree import select_nodes
    from specplug.speculative.verify import CommittedOutput, TargetOutput, VerifyOutput, verify_tree
    from specplug.startup import report_progress

__version__ = "0.1.0"

_MODULES = {"layers": "specplug.speculative.layers", "settings": "specplug.settings"}

_LAZY = {
    "EngineConfig": "specplug.config",
    "LLM": "specplug.llm",
    "PagedModel": "specplug.model.paged_model",
    "Logprob": "specplug.outputs",
    "RequestOutput": "specplug.outputs",
    "Registry": "specplug.registry",
    "SamplingParams": "specplug.sampling_params",
    "Batch": "specplug.speculative.hook_order",
    "RequestView": "specplug.speculative.hook_order",
    "Checkpoint": "specplug.speculative.draft_checkpoint",
    "couple": "specplug.speculative.noise",
    "Draft": "specplug.speculative.draft",
    "DraftInput": "specplug.speculative.draft",
    "DraftChoices": "specplug.speculative.draft_plan",
    "DraftPlan": "specplug.speculative.draft_plan",
    "ForcedTokens": "specplug.speculative.draft_plan",
    "ForeseenDrafts": "specplug.speculative.draft_plan",
    "Hindsight": "specplug.speculative.draft_plan",
    "FeatureDrafter": "specplug.speculative.feature_drafter",
    "FutureMap": "specplug.speculative.future_map",
    "PerTokenOutput": "specplug.speculative.output_kind",
    "ReceivedState": "specplug.speculative.draft_state",
    "received_state": "specplug.speculative.draft_state",
    "RequestReport": "specplug.speculative.report",
    "StepReport": "specplug.speculative.report",
    "AttentionPlan": "specplug.speculative.runtime",
    "OwnText": "specplug.speculative.runtime",
    "TokenPieces": "specplug.speculative.token_drafter",
    "KVCache": "specplug.speculative.runtime",
    "Lattice": "specplug.speculative.lattice",
    "likeliest_tree": "specplug.speculative.lattice",
    "longest_path": "specplug.speculative.lattice",
    "Runtime": "specplug.speculative.runtime",
    "StateTensor": "specplug.speculative.draft_state",
    "TargetDrafter": "specplug.speculative.target_drafter",
    "TargetPlan": "specplug.speculative.runtime",
    "TokenDrafter": "specplug.speculative.token_drafter",
    "TokenMap": "specplug.speculative.token_map",
    "begin_like": "specplug.speculative.initial_weights",
    "layer_sizes": "specplug.speculative.initial_weights",
    "norm_weight": "specplug.speculative.initial_weights",
    "DraftFiles": "specplug.speculative.trainer",
    "FeatureTrainer": "specplug.speculative.trainer",
    "Trainer": "specplug.speculative.trainer",
    "TrainingBatch": "specplug.speculative.trainer",
    "TrainingLoss": "specplug.speculative.trainer",
    "TrainingRuntime": "specplug.speculative.trainer",
    "UnrolledAttention": "specplug.speculative.trainer",
    "chunk_tails": "specplug.speculative.rotation",
    "rotate_chunks": "specplug.speculative.rotation",
    "select_nodes": "specplug.speculative.tree",
    "CommittedOutput": "specplug.speculative.verify",
    "TargetOutput": "specplug.speculative.verify",
    "VerifyOutput": "specplug.speculative.verify",
    "append_nodes": "specplug.speculative.draft_joining",
    "choose_drafts": "specplug.speculative.draft_joining",
    "keep_likeliest": "specplug.speculative.draft_joining",
    "merge_drafts": "specplug.speculative.draft_joining",
    "argmax_rows": "specplug.kernels.argmax",
    "likeliest_tokens": "specplug.kernels.argmax",
    "LikeliestTokens": "specplug.kernels.argmax",
    "load_compiled": "specplug.kernels.plugin_library",
    "report_progress": "specplug.startup",
    "runs_plugin_kernels": "specplug.kernels.plugin_library",
    "upload_together": "specplug.speculative.host_copy",
    "verify_tree": "specplug.speculative.verify",
}

__all__ = [
    "API_VERSION",
    "DATA_ONLY",
    "DEFAULT_MODEL",
    "DEFAULT_MODEL_PATH",
    "HELD_OUT_PROMPTS",
    "LLM",
    "AlgorithmInfo",
    "AttentionPlan",
    "Batch",
    "Capabilities",
    "Checkpoint",
    "CheckpointError",
    "CommittedOutput",
    "Completion",
    "Conformance",
    "Defaults",
    "Draft",
    "DraftChoices",
    "DraftFiles",
    "DraftInput",
    "DraftModelAlgorithm",
    "DraftPlan",
    "EngineConfig",
    "EngineOptions",
    "FallbackWarning",
    "FeatureDrafter",
    "FeatureTrainer",
    "ForcedTokens",
    "ForeseenDrafts",
    "FutureMap",
    "Hindsight",
    "HostCapabilities",
    "HostPlugin",
    "KVCache",
    "Lattice",
    "LikeliestTokens",
    "Logprob",
    "MeasuredEngine",
    "PagedModel",
    "PerTokenOutput",
    "PluginError",
    "RankError",
    "ReceivedState",
    "Registry",
    "RequestOutput",
    "RequestReport",
    "RequestView",
    "RunOptions",
    "Runtime",
    "SamplingParams",
    "ServerOptions",
    "SpecConfig",
    "SpecplugError",
    "StateTensor",
    "StepReport",
    "TargetDrafter",
    "TargetOutput",
    "TargetPlan",
    "TokenDrafter",
    "TokenMap",
    "Trainer",
    "TrainingBatch",
    "TrainingLoss",
    "TrainingRuntime",
    "UnknownAlgorithm",
    "UnrolledAttention",
    "UsageError",
    "VerifyOutput",
    "__version__",
    "append_nodes",
    "argmax_rows",
    "begin_like",
    "choose_drafts",
    "chunk_tails",
    "couple",
    "hookimpl",
    "keep_likeliest",
    "layer_sizes",
    "layers",
    "likeliest_tokens",
    "likeliest_tree",
    "load_compiled",
    "longest_path",
    "merge_drafts",
    "norm_weight",
    "received_state",
    "report_progress",
    "rotate_chunks",
    "runs_plugin_kernels",
    "select_nodes",
    "settings",
    "upload_together",
    "verify_tree",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _LAZY:
        raise AttributeError(f"module 'specplug' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
