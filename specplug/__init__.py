"""specplug: speculative decoding in which an algorithm is a pip package.

What a plugin imports, it imports from here. Nothing heavy loads until a name that needs it is
touched: ``import specplug`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specplug.algorithm import (
    API_VERSION,
    DEFAULT_MODEL,
    AlgorithmInfo,
    Capabilities,
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

if TYPE_CHECKING:
    from specplug.engine.llm import LLM
    from specplug.engine.outputs import Logprob, RequestOutput
    from specplug.engine.sampling_params import SamplingParams
    from specplug.spec import layers
    from specplug.spec.batch import Batch, RequestView
    from specplug.spec.checkpoint import Checkpoint
    from specplug.spec.coupling import couple
    from specplug.spec.draft import Draft, DraftInput
    from specplug.spec.feature_drafter import FeatureDrafter
    from specplug.spec.future_map import FutureMap
    from specplug.spec.received import ReceivedState, received_state
    from specplug.spec.report import RequestReport, StepReport
    from specplug.spec.rotation import chunk_tails, rotate_chunks
    from specplug.spec.runtime import AttentionPlan, KVCache, Runtime
    from specplug.spec.state import StateTensor
    from specplug.spec.target_output import CommittedOutput, TargetOutput
    from specplug.spec.tree import select_tree
    from specplug.spec.verify import VerifyOutput, verify_tree

__version__ = "0.1.0"

_LAZY = {
    "LLM": "specplug.engine.llm",
    "Logprob": "specplug.engine.outputs",
    "RequestOutput": "specplug.engine.outputs",
    "SamplingParams": "specplug.engine.sampling_params",
    "Batch": "specplug.spec.batch",
    "RequestView": "specplug.spec.batch",
    "Checkpoint": "specplug.spec.checkpoint",
    "couple": "specplug.spec.coupling",
    "Draft": "specplug.spec.draft",
    "DraftInput": "specplug.spec.draft",
    "FeatureDrafter": "specplug.spec.feature_drafter",
    "FutureMap": "specplug.spec.future_map",
    "ReceivedState": "specplug.spec.received",
    "received_state": "specplug.spec.received",
    "RequestReport": "specplug.spec.report",
    "StepReport": "specplug.spec.report",
    "AttentionPlan": "specplug.spec.runtime",
    "KVCache": "specplug.spec.runtime",
    "Runtime": "specplug.spec.runtime",
    "StateTensor": "specplug.spec.state",
    "chunk_tails": "specplug.spec.rotation",
    "rotate_chunks": "specplug.spec.rotation",
    "CommittedOutput": "specplug.spec.target_output",
    "TargetOutput": "specplug.spec.target_output",
    "select_tree": "specplug.spec.tree",
    "VerifyOutput": "specplug.spec.verify",
    "verify_tree": "specplug.spec.verify",
}

__all__ = [
    "API_VERSION",
    "DEFAULT_MODEL",
    "LLM",
    "AlgorithmInfo",
    "AttentionPlan",
    "Batch",
    "Capabilities",
    "Checkpoint",
    "CheckpointError",
    "CommittedOutput",
    "Defaults",
    "Draft",
    "DraftInput",
    "FallbackWarning",
    "FeatureDrafter",
    "FutureMap",
    "KVCache",
    "Logprob",
    "PluginError",
    "RankError",
    "ReceivedState",
    "RequestOutput",
    "RequestReport",
    "RequestView",
    "Runtime",
    "SamplingParams",
    "SpecConfig",
    "SpecplugError",
    "StateTensor",
    "StepReport",
    "TargetOutput",
    "UnknownAlgorithm",
    "UsageError",
    "VerifyOutput",
    "__version__",
    "chunk_tails",
    "couple",
    "hookimpl",
    "layers",
    "received_state",
    "rotate_chunks",
    "select_tree",
    "verify_tree",
]


def __getattr__(name: str) -> Any:
    if name == "layers":
        return import_module("specplug.spec.layers")
    if name not in _LAZY:
        raise AttributeError(f"module 'specplug' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
