"""Every hook: the contract between the engine and an algorithm. Read this file first.

A plugin is an object whose methods carry ``@specplug.hookimpl``; its package names that object in
the entry-point group ``specplug.algorithms`` under the name that users type. Required are
``describe``, ``create_worker``, ``build_draft_input`` and ``propose``; all else has a default.

One run has one ``pluggy.PluginManager`` with the core's defaults (called last), the chosen
algorithm, and all installed extensions (group ``specplug.extensions``). A wrapper
(``hookimpl(wrapper=True)``) in an extension can time, trace or veto any hook of any algorithm.
Unless said otherwise a hook is ``firstresult``: the first implementation that does not return None
answers, and None means "ask the next", in the end the core.

Words: bs batch size, S ``num_steps``, K ``topk``, N nodes a request, T the nodes of all requests
of the batch, one behind the other (bs·N when all are equally wide).

One decode step, and where each hook stands in it::

    resolve the future map -> propose -> target forward over T nodes -> verify
        -> compact the accepted path -> build_draft_input (draft extend) -> publish, stash

What a hook raises is a ``PluginError`` that names the plugin, its version and the hook, sys.exit
too; so is a result of another type, dtype, shape or device than is said here. Only the hooks before
the run (``validate_config``, ``create_worker``, ``create_future_map``) may refuse what the user
gave, by ``UsageError`` or ``CheckpointError``. An extension whose ``on_step`` or
``on_request_finished`` raises is switched off, and the run goes on. All tensors that a hook gets
are lent: what is written to them is lost, or is the plugin's own affair, and changes no token.
Values (tokens, parents, depths, accepted paths) are bounded on the device, where nothing waits for
them. With ``SPECPLUG_DEBUG=1`` in the environment they are read on the host and told as the rest
is: set it in tests of a plugin.

A rank without requests takes part in the pass of other ranks as an idle batch (bs 0, nothing
captured): verify, then ``fixup_idle`` in the place of ``build_draft_input``. A prefill step has the
pass and ``build_draft_input`` alone. Where prompts and drafts share a step,
each half calls its hooks with a batch of its own, so a batch is always one or the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping

    import click
    from torch import Tensor

    from specplug.algorithm import AlgorithmInfo, SpecConfig
    from specplug.speculative.batch import Batch
    from specplug.speculative.draft import Draft, DraftInput
    from specplug.speculative.future_map import FutureMap
    from specplug.speculative.report import RequestReport, StepReport
    from specplug.speculative.runtime import Runtime
    from specplug.speculative.target_output import CommittedOutput, TargetOutput
    from specplug.speculative.verify import VerifyOutput

PROJECT = "specplug"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

REQUIRED = ("describe", "create_worker", "build_draft_input", "propose")
"""Hooks without which a plugin is no algorithm."""


@hookspec(firstresult=True)
def describe() -> AlgorithmInfo:  # type: ignore[empty-body]
    """Say what the algorithm is. Required.

    Called for listing and selection, before anything is loaded, so the module it stands in must
    not import torch, transformers or triton at its top. ``AlgorithmInfo.name`` equals the entry
    point's name.
    """


@hookspec(firstresult=True)
def validate_config(config: SpecConfig) -> SpecConfig | None:
    """Check the settings of a run, or change them.

    Called once, after selection and before any weight is loaded. Return
    ``config.adjust("why", field=value)`` to change it (the user reads the reason), raise
    ``specplug.UsageError`` to refuse it. None accepts it as it is. An algorithm whose draft KV at a
    position depends on more or fewer than the one token behind it says so by ``draft_lookahead``:
    in ``describe()``, or here where it depends on the settings.
    """


@hookspec(firstresult=True)
def create_worker(runtime: Runtime) -> object:
    """Load the draft weights, allocate the draft's KV cache, name the target layers to capture.

    Required. Called once, when the target is loaded and before the KV pool is made. What is
    returned is ``runtime.worker`` in every later hook; None is taken as "not implemented".

    A worker whose ``DraftInput`` carries state declares it by a method ``state_spec()`` -> mapping
    of names to ``StateTensor``, the shape and type of one request's tensor::

        def state_spec(self):
            return {"hidden_states": StateTensor((self.width,), runtime.dtype)}

    It is the one source for whoever has to make such a tensor: idle ranks, received requests, the
    relay between steps. A declared tensor is always there in ``propose``, as zeros if nobody has
    left it, and one of another form is refused. What is not declared is relayed as it comes, and
    absent where it did not. Other state an algorithm keeps by request index (``batch.req_indices``,
    below ``runtime.req_table_size``) or by ``request_id``.
    """


@hookspec(firstresult=True)
def create_future_map(runtime: Runtime) -> FutureMap | None:
    """Make the relay between one decode step and the next.

    Called once, after ``create_worker``, for the plain loop too: both run the same step. A plugin
    returns its own subclass to relay more than tensors by request row, for example a copy of the
    accepted tokens on the host. None: the core's map.
    """


@hookspec(firstresult=True)
def build_draft_input(  # type: ignore[empty-body]
    runtime: Runtime, batch: Batch, target_output: CommittedOutput, future_map: FutureMap
) -> DraftInput:
    """Feed the draft model what the target has just computed, and say what the next step needs.

    Required. Called after every prefill chunk (``batch.is_prefill``) and after every verify (the
    *draft extend*). ``target_output`` holds, in order of position,

    - ``next_tokens`` [R] the token **after** each row's position: on a prefill the prompt shifted
      by one with the next prompt token (or, on the last chunk, the sampled one) at the tail, after
      a verify what the target said at each accepted node. A request that was retracted is prefilled
      with its output so far, as if that were prompt,
    - ``per_node`` the captured outputs, leading size R,
    - ``accept_lens`` [bs] how many rows of each request count.

    R is the number of prefill tokens, or bs·C after a verify, with C columns a request: one more
    than the verified draft is deep, which is less than what was proposed where the KV pool was
    short, so take it from ``len(next_tokens) // batch.size``. Columns beyond ``accept_lens`` are
    padding whose results nobody may use. A request's first chunk (``batch.first_chunk``) may begin
    behind position 0: the KV before it, the draft's too, was found in the prefix cache, and the
    tokens before it are ``request.token_ids[: start]``. What was kept by its row is another
    request's.
    The result's tensors (leading size bs) are stashed by request row and come back in the next
    ``propose``.
    """


@hookspec(firstresult=True)
def build_disagg_draft_input(
    runtime: Runtime, batch: Batch, last_tokens: Any, future_map: FutureMap
) -> DraftInput | None:
    """Make the draft input of requests that another instance has prefilled.

    Called by a decode instance for a batch of received requests, before their first step; their KV,
    the draft's too, is in the pool by then. ``last_tokens`` [bs] int64 are the roots of that step,
    ``batch.seq_lens`` [bs] their positions, ``request.draft_state`` what ``export_draft_state``
    gave over there. The batch may be empty, and a request may have come without a state (its
    prefill ran under another algorithm, say) or without draft KV, which is zeros then: it drafts
    from its last tokens. The prefill may have had another ``topk`` or ``num_steps``: then a tensor
    has more or fewer entries (``StateTensor.kept`` says which of them count), and a draft's cache
    more or fewer layers, of which the first are taken. ``received_state`` stacks the states and
    says how much of each came. The result is stashed as that of ``build_draft_input`` is. None:
    what was exported, as far as it is as ``state_spec()`` declares it, zeros for the rest.
    """


@hookspec(firstresult=True)
def propose(runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:  # type: ignore[empty-body]
    """Draft the next tokens of every request of a decode batch. Required.

    ``draft_input.bonus_tokens`` [bs] are the roots: tokens that are decided, and whose KV is not
    written yet; ``batch.seq_lens`` [bs] are their positions. Return ``Draft.chain(tokens)`` or
    ``Draft.tree(tokens, parents)``, [bs, N] with the root first. A request with nothing to propose
    has width 1. Draft tokens are proposals only: nothing here can change what is generated. The
    engine puts in the root itself; a token outside the vocabulary becomes one inside, and a node
    that is deeper than the draft's declared depth, or has no parent before it, is never accepted.

    ``batch.max_draft_nodes`` [bs], numbers on the host, is how many nodes of each request can be
    verified in this step: N or more of them, fewer where the KV pool is short. Nodes beyond it are
    cut, the last ones first. So a draft that costs something is best made no deeper and no wider
    than their maximum, and a tree's likeliest nodes stand first.
    """


@hookspec(firstresult=True)
def verify(  # type: ignore[empty-body]
    runtime: Runtime, batch: Batch, draft: Draft, target_output: TargetOutput
) -> VerifyOutput:
    """Accept the path of the draft that the target agrees with.

    Called each decode step with ``target_output.predict`` [T], the target's token after each node
    (sampling, penalties and masks already applied along the node's own path). None: the core's
    tree verify, which is exact. An implementation may add tensors of leading size T to
    ``target_output.per_node`` before it returns None: they are compacted with all others and come
    to ``build_draft_input``. An idle batch has no node and nothing in ``per_node``: hidden states
    are absent, and their width is not guessed at. A replacement must accept a node only if its
    token is what ``predict`` says at its parent, or the output is no longer that of the target.
    What it returns is cut to a path of the draft from each root, every token of which its
    ``predict`` gives at the parent, so that a wrong one harms its own requests alone.
    """


@hookspec(firstresult=True)
def fixup_idle(runtime: Runtime, batch: Batch, draft_input: DraftInput) -> DraftInput:  # type: ignore[empty-body]
    """Rebuild the draft input when the draft extend has no tokens.

    Called whenever nothing is left to extend: on a rank without requests, and on a batch all of
    whose requests have ended. ``draft_input`` has no hidden states then. What is returned is
    stashed for no row. None: the core's, with empty tensors as ``worker.state_spec()`` declares
    them.
    """


@hookspec(firstresult=True)
def supports_target_verify_for_draft() -> bool | None:
    """Whether the draft model's pass has the shape of a target verify, for the graph runner.

    Called once, before ``create_worker``. True: one pass over the same number of nodes for every
    request, so a pass given to ``runtime.record_draft`` is recorded as the target's verify is.
    None: False; drafts that go token by token run as they are.
    """


@hookspec(firstresult=True)
def export_draft_state(
    runtime: Runtime, batch: Batch, future_map: FutureMap
) -> Mapping[str, Tensor | None] | None:
    """The draft state that travels with prefilled requests to a decode instance.

    Called by a prefill instance after ``build_draft_input``, with a prefill batch in which some
    request is at its last chunk. Return named tensors of leading size bs, on the device: the core
    brings each request's row to the other side, where ``request.draft_state`` holds it. None: what
    is stashed in the future map for the requests, which is all that ``build_draft_input`` returned.
    """


@hookspec
def on_step(runtime: Runtime, report: StepReport) -> None:
    """A step has been processed. For extensions; every implementation is called."""


@hookspec
def on_request_finished(runtime: Runtime, report: RequestReport) -> None:
    """A request has ended, for whatever reason. Every implementation is called; an algorithm
    that keeps state by request drops it here."""


@hookspec
def register_commands(cli: click.Group) -> None:
    """Add commands to the ``specplug`` command line. Called for extensions when it starts."""
