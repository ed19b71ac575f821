"""``--enable-deterministic-inference`` on the CPU, where SGLang has none: for seeded sampling.

Its matrix products are replaced by kernels for GPUs, and its torch attention is not among those
that it takes for deterministic. In float32 both are what plain decoding has too. Run with
``TORCHDYNAMO_DISABLE=1``: SGLang compiles the function that samples.
"""

from __future__ import annotations

BACKEND = "torch_native"


def register() -> None:
    """Register with SGLang, in each of its processes."""
    try:
        from sglang.srt.arg_groups import choices
    except ImportError:  # of 0.5.17
        from sglang.srt import server_args as choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode",
        lambda *arguments, **named: None,
        HookType.REPLACE,
    )
