"""Every hook: the contract between an algorithm and the engine that hosts it. Read this first.

A plugin is an object whose methods carry ``@specplug.hookimpl``. Its package names that object in
the entry-point group ``specplug.algorithms``, under the name that users type. An algorithm must
implement ``describe``, ``create_worker``, ``build_draft_input`` and ``propose``. Every other hook
has a default.

One run has one ``pluggy.PluginManager`` with the core's defaults (asked last), the chosen algorithm
and all installed extensions (group ``specplug.extensions``). An extension's wrapper
(``hookimpl(wrapper=True)``) can time, trace or veto any hook of the run's algorithm. Parts (below)
have no extensions, so no wrapper sees ``grow_draft``. An implementation may take fewer arguments
than its hook has.

Words: bs batch size; S ``num_steps``; K ``topk``; N nodes per request; T the nodes of all requests
(bs·N where all are equally wide); R rows of a tensor; C columns, the most tokens that a step can
accept.

**Order.** Before a run: ``describe``, ``validate_config``, ``supports_target_verify_for_draft``,
``create_worker``, then the KV pool is made, ``create_future_map``. In a run, ``HookOrder`` in
``specplug/speculative/hook_order.py`` is the order, and every host drives it::

    decode    on_host_tensors, of what has come to the host -> foresee_drafts -> plan_drafts
              -> resolve the future map, if anything is to be drafted
              -> build_draft_input of what was not fed yet (a part with late_feed)
              -> on_host_tensors, of all that steps have left
              -> propose (a part of another algorithm: or grow_draft)
              -> the target's pass over T nodes -> verify
              -> compact the accepted path -> build_draft_input (the draft extend)
              -> publish and stash in the future map
    prefill   the target's pass over the chunks -> build_draft_input -> publish, stash
              -> export_draft_state, if another instance decodes the request
    received  build_disagg_draft_input -> publish, stash
    idle      verify -> fixup_idle -> publish, stash, for a batch of no request

Where prompts and drafts share a step, each half calls its hooks with a batch of its own, so a batch
is always one or the other. An idle rank takes part in the pass of other ranks: bs 0, nothing
captured. A host may call ``propose`` right after ``build_draft_input``, even for requests that have
just ended.

**firstresult.** Implementations are asked one after the other, extensions first. The first result
that is not None is taken. None means "ask the next", in the end the core; each hook says what the
core then does.

**Observers** are the hooks that are not firstresult: they return nothing, and all implementations
are called. An extension whose observer raises is switched off, and the run goes on.

**Streams.** All hooks of a run are called one at a time, by whichever thread runs the step. What
they launch goes to the device's current stream, in order. A hook that uses another stream makes the
current one wait for it before it returns.

**Blocking.** With overlap the host is a step ahead of the device. So no hook between the resolve
and the publish may wait for the device: no ``.item()``, ``.cpu()`` or ``.tolist()`` of a device
tensor, no shape that depends on device data. What the host is to know a step leaves by
``DraftInput(host=…)``, and ``on_host_tensors`` gets it.
``create_worker``, ``on_step`` and the other hooks outside a step may wait. An algorithm that must
read device data in a step declares ``Capabilities(overlap=False)``: then no step is launched before
the last one is processed, and ``propose``, ``grow_draft``, ``plan_drafts``, ``verify``,
``build_draft_input`` and a worker's methods may wait too. Each wait still costs its time, and a
pass that is recorded as a CUDA graph must not wait in any case.

**Gradients.** The hooks of a step run in ``torch.inference_mode``. The others do not.

**Rows.** A tensor [bs, …] has the order of ``batch.requests``, which changes from step to step. A
tensor [T, …] or [R, …] has all rows of the first request, then all of the second, each in order of
position (or of nodes). ``batch.req_indices`` is a request's row in the request table: it stays the
same while the request runs, and goes to another request afterwards. Row 0 and slot 0 are padding.

**Lifetime.** Tensors are lent for the call: a hook may write to them, which changes no token, and
clones what it keeps. A recorded pass overwrites its outputs in the next step. An ``AttentionPlan``
is good for the step in which it was made. What a hook returns is copied before the next hook of the
step, so its buffers may be used again. Where a hook returns a subclass of ``Draft``, ``DraftInput``
or ``VerifyOutput``, the engine takes the values of its fields and calls no method of it.

**KV.** A draft model writes to caches of its own alone (``runtime.allocate_kv``), through an
``AttentionPlan``, never to the target's. Only the target's own layers write there for a draft
(``runtime.target_layers``), to slots from the committed length on, over which the verification
writes. A request's committed tokens fill its slots from 0 to ``seq_lens - 1``. While drafting, the
slots from ``seq_lens`` on may be written, as many as ``batch.max_draft_slots`` says, or where that
is (), as ``batch.max_draft_nodes`` says; what is written further on is lost.
``build_draft_input`` may write committed positions again, but those that a shared page of the
prefix cache holds are kept. On acceptance the engine moves the
**target's** KV to consecutive slots and compacts every tensor of ``per_node``. It moves **no draft
cache**: ``build_draft_input`` writes the accepted rows there. A draft of another vocabulary may
have several tokens of its own for one of the target's: ``allocate_kv(own_lengths=)`` gives each
slot room for them, and ``runtime.own_text`` says where they stand.

**max_draft_nodes binds.** A request's draft is cut to its ``batch.max_draft_nodes``, whatever was
proposed: of a tree with ``scores`` the nodes that survive least likely first, else the last nodes.
A node survives if the target takes it and all that it hangs from. Where a step has a budget of
nodes for its whole batch (``verify_budget``), those that survive least likely are cut from all
requests. Then ``verify`` gets a draft whose ``widths`` are None though not all nodes count: how
many count is known on the device alone. ``draft.counts``, ``offsets``, ``flatten``, ``select``,
``spread`` and ``pad`` are right in both cases.

**Scores.** ``Draft.scores`` [bs, N] float32 has for each node the logarithm of the probability that
the target takes it where it took its parent; 0 at the root. What the draft's softmax says will do:
a plugin need not calibrate. The core counts on the device how often nodes at such a depth, on paths
of such scores, were accepted, and calibrates. Scores decide which nodes a cut keeps, and change no
token.

**Forced text.** Under a grammar much of an output is forced: keys, braces, names of functions.
``runtime.forced_tokens`` gives the tokens, and an algorithm that drafts from text drafts them
first. Where drafts are made on the CPU, the core leaves out nodes that a grammar forbids, with all
that hangs from them, before it cuts.

**Parts.** An algorithm may hold others (``runtime.part``), and calls their hooks. Each has its own
configuration, worker, state and future map. A name like ``EAGLE3+NGRAM`` is an algorithm of the
core that does so: the first proposes, the others grow its drafts (``grow_draft``), and all hear of
every committed token. So is ``NGRAM,EAGLE3``: for each request one of them proposes, as
``plan_drafts`` chooses, with a batch of these requests alone. What a part's hook raises is an error
that names both.

**Errors.** What a hook raises is a ``PluginError`` that names the plugin, its version and the hook,
``sys.exit`` too; so is a result of another type, dtype, shape or device than is said here. The
embedded engine ends all requests with the error, those that wait too, drops its prefix cache, and
goes on. Only the hooks before the run or a training (``validate_config``, ``create_worker``,
``create_future_map``, ``create_trainer``) may refuse what the user gave, by ``UsageError`` or
``CheckpointError``. Torch's default device, where a hook has changed it, is put back, with a
warning that names the plugin. Values (tokens, parents, depths, accepted paths) are bounded on the
device. With ``SPECPLUG_DEBUG=1`` in the environment they are read on the host, and a wrong one is
an error: set it in tests of a plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import click
    from torch import Tensor

    from specplug.algorithm import AlgorithmInfo, SpecConfig
    from specplug.speculative.draft import Draft, DraftInput
    from specplug.speculative.draft_plan import DraftChoices, DraftPlan, ForeseenDrafts
    from specplug.speculative.future_map import FutureMap
    from specplug.speculative.hook_order import Batch, RequestView
    from specplug.speculative.report import RequestReport, StepReport
    from specplug.speculative.runtime import Runtime
    from specplug.speculative.trainer import Trainer, TrainingRuntime
    from specplug.speculative.verify import CommittedOutput, TargetOutput, VerifyOutput

PROJECT = "specplug"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

REQUIRED = ("describe", "create_worker", "build_draft_input", "propose")
"""Hooks without which a plugin is no algorithm."""


@hookspec(firstresult=True)
def describe() -> AlgorithmInfo:  # type: ignore[empty-body]
    """Say what the algorithm is. Required.

    Called for selection and by ``specplug list --check``, before anything is loaded; a listing
    reads the source alone. The module it stands in must not import torch, transformers or triton at
    its top.

    Returns:
        The declaration. Its ``name`` equals the entry point's name. None is refused.
    """


@hookspec(firstresult=True)
def validate_config(config: SpecConfig) -> SpecConfig | None:
    """Check the settings of a run, or change them.

    Called after selection and before any weight is loaded, once in each process that needs the
    settings. Of a part it is called several times, the last time when the target is loaded, maybe
    with what it has returned before: leave that as it is. A host may start its next process with
    the ``num_steps``, ``topk`` and ``num_draft_tokens`` that were returned in the first: leave
    these as they are then.

    Args:
        config: the algorithm's defaults with what the user typed over them.

    Returns:
        ``config.adjust("why", field=value)`` to change it; the user reads the reason. An algorithm
        whose draft KV at a position depends on more or fewer than the one token after it sets
        ``draft_lookahead``, here or in ``describe()``. None: ``config`` as it is.

    Raises:
        UsageError: the algorithm cannot run so.
    """


@hookspec(firstresult=True)
def create_worker(runtime: Runtime) -> object:
    """Load the draft weights, reserve the draft's KV cache, ask for hidden states. Required.

    Called once, when the target is loaded and before the KV pool is made. Caches, captures,
    recorded passes and per-token outputs (``runtime.add_output``) can be asked of ``runtime`` here
    alone. An extension adds an output in a wrapper around this hook.

    A worker whose ``DraftInput`` carries state declares it by a method ``state_spec()``, which
    returns a mapping of names to ``StateTensor``, the shape and type of one request's tensor::

        def state_spec(self):
            return {"hidden_states": StateTensor((self.width,), runtime.dtype)}

    All that make such a tensor take its form from here: idle ranks, received requests, the future
    map. A declared tensor is always there in ``propose``, as zeros if no step has left it, and one
    of another form is refused. What is not declared is absent until some request has left it, and
    zeros after that where one has not. Another width or type is filled up with zeros or cast. The
    core takes none of it from another instance. Other state an algorithm keeps by request row
    (``batch.req_indices``, below ``runtime.req_table_size``) or by ``request_id``.

    Args:
        runtime: the only door to the engine. ``runtime.worker`` is None until this returns.

    Returns:
        Any object. It is ``runtime.worker`` in every later hook. None is refused.

    Raises:
        UsageError: the settings do not fit the draft model.
        CheckpointError: the draft weights are missing, damaged or made for another target.
    """


@hookspec(firstresult=True)
def create_future_map(runtime: Runtime) -> FutureMap | None:
    """Make the future map, which carries state from one decode step to the next.

    Called once, after ``create_worker``, with overlap and without: both loops run the same step. A
    plugin returns a subclass to carry more than tensors by request row.

    Args:
        runtime: the engine's; ``runtime.worker`` is there.

    Returns:
        A ``FutureMap`` for ``runtime.req_table_size`` rows. The engine declares the worker's
        state to it. None: the core's map.
    """


@hookspec(firstresult=True)
def build_draft_input(  # type: ignore[empty-body]
    runtime: Runtime, batch: Batch, target_output: CommittedOutput, future_map: FutureMap
) -> DraftInput:
    """Feed the draft model what the target has computed, and say what the next step needs.

    Required. Called after every prefill chunk (``batch.is_prefill``), and after every verify, where
    it is the *draft extend*. A draft model with a cache writes its KV of the committed rows here,
    all of them: at the positions from ``batch.seq_lens`` on, through ``batch.attention`` on a
    prefill and a plan of its own after a verify.

    A request that was retracted is prefilled with its output so far, as if that were prompt. A
    request's first chunk (``batch.first_chunk``) may begin after position 0: the KV before it, the
    draft's too, was found in the prefix cache, and the tokens before it are
    ``request.token_ids[:start]``. What was kept by its row is another request's.

    A part of ``A,B`` with ``Capabilities(late_feed=True)`` is not called in steps in which it does
    not draft. It is called for them before it does: for the last one as after its verify, for
    several together as for a prefill chunk of running requests, each of whose ``last_chunk`` is
    True, without ``chunk_ends``. So it is where many rows wait, and where a device waits for the
    host anyway; then no draft follows (``batch.drafts_follow``), and the last step still waits.
    Where it has drafted for nobody for some steps, a short prompt waits so too; then that chunk is
    the first one of its request.

    Args:
        runtime: the engine's.
        batch: the requests; ``batch.seq_lens`` are their lengths **before** this step.
        target_output: the committed rows. R is the number of prefill tokens, or bs·C after a
            verify. C is one more than the verified draft is deep, which is less than what was
            proposed where the KV pool is short: take it from ``len(next_tokens) // batch.size``.
        future_map: the run's. It still holds what the step before left.

    Returns:
        The roots of the next step and its state, leading size bs. The state is stashed by request
        row and comes back in the next ``propose``; the roots that are verified are the engine's
        own. What the host is to read goes into ``DraftInput(host=…)``, and from there to
        ``on_host_tensors``. Of several steps that are fed together a drafter may tell how often it
        would have been right meanwhile, by ``DraftInput(hindsight=…)``: then it need not be tried
        to be known. ``FeatureDrafter`` does. None is refused.
    """


@hookspec(firstresult=True)
def build_disagg_draft_input(
    runtime: Runtime, batch: Batch, last_tokens: Tensor, future_map: FutureMap
) -> DraftInput | None:
    """Make the draft input of requests that another instance has prefilled.

    Called by a decode instance before the first step of received requests. Their KV, the draft's
    too, is in the pool. The batch may be empty. A request may have come without a state (its
    prefill ran under another algorithm, say) or without draft KV, which is zeros then: it drafts
    from its last token. The prefill may have had another ``topk`` or ``num_steps``: then a tensor
    has more or fewer entries (``StateTensor.kept`` says which of them count), and a draft's cache
    more or fewer layers, of which the first are taken. ``received_state`` stacks the states and
    says how much of each came.

    Args:
        runtime: the engine's.
        batch: the received requests; ``request.draft_state`` holds what ``export_draft_state``
            gave on the other side, ``batch.seq_lens`` the positions of the roots.
        last_tokens: [bs] int64, the roots of the first step.
        future_map: the run's.

    Returns:
        What ``build_draft_input`` would have. None: what was exported, as far as it is as
        ``state_spec()`` declares it, and zeros for the rest.
    """


@hookspec(firstresult=True)
def foresee_drafts(runtime: Runtime, requests: Sequence[RequestView]) -> ForeseenDrafts | None:
    """Say what would be drafted for each request, where that is known on the host at no cost.

    Called in a decode step that is planned, before ``plan_drafts``, if a plugin implements that,
    whoever drafts then; not in the warm-up, nor for an idle batch. It is for algorithms that draft
    from text, as NGRAM does. The choice of drafts compares what was foreseen with what the target
    took, whoever drafted, and so learns how often such scores come true. Where nothing that was
    committed is unknown to the algorithm, it goes by the scores of the very draft that it would
    get; else by those of the chain's nodes after the tokens that the running step is expected to
    commit. What is asked for then by ``propose`` is to be drafted as it was foreseen, or from what
    was read since. A plan may take what was foreseen as it is (``DraftPlan.as_foreseen``): then
    ``propose`` is not called for it, and the core goes on in the chain after the tokens that the
    algorithm has not read. So where it is asked a step too early chains are best twice as deep as
    drafts.

    What steps have left by ``DraftInput(host=…)`` and has come to the host is told by
    ``on_host_tensors`` before. Nothing waits for the device: so an algorithm may not have read yet
    what the last steps have committed, and says what it has read.

    Args:
        runtime: the engine's; of an algorithm that is one of several (``A,B``) the part's.
        requests: all bs requests of the step, in the batch's order.

    Returns:
        Chains and their scores, on the CPU. None: it does not say.
    """


@hookspec(firstresult=True)
def plan_drafts(runtime: Runtime, batch: Batch, choices: DraftChoices) -> DraftPlan | None:
    """Choose who drafts for each request of a decode step, and how much.

    Called in each decode step before ``propose``, unless only the core implements it; not in the
    warm-up, nor for an idle batch. The choice changes no token: it may depend on measured time.
    Extensions are asked before the algorithm. It runs on the host, and must read nothing of the
    device: what steps have accepted is told by ``on_step``.

    Args:
        runtime: the engine's.
        batch: the requests, as in ``propose``; ``max_draft_nodes`` is what there is room for.
        choices: what can be chosen: of a run with several algorithms (``A,B``) these, else the one
            or nobody. What a request asks for by ``SamplingParams`` is in it, and what algorithms
            tell of drafts that they did not make: ``foreseen`` and ``hindsight``.

    Returns:
        The plan. A request's ``max_draft_nodes`` is lowered to it before ``propose``, which is not
        called where nobody drafts. What a request does not allow is not drafted, whatever the plan
        says. After ``propose`` the batch is cut to the plan's ``verify_budget``: it is a number
        that the host chooses before it knows a draft, and which nodes are kept is found on the
        device, by their calibrated scores. Some hosts do not heed it. By ``as_foreseen`` drafts are
        taken as ``foresee_drafts`` told them, and no device waits for ``propose``. None: the first
        algorithm that a request allows drafts, as much as it can.
    """


@hookspec(firstresult=True)
def propose(runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:  # type: ignore[empty-body]
    """Draft the next tokens of every request of a decode batch. Required.

    Called in a decode step in which the algorithm drafts, before the target's pass. Not where
    nobody drafts, nor where the plan takes what was foreseen. The draft model may write its cache
    at the request's slots from ``batch.seq_lens`` on. Those keys are scratch: acceptance moves none
    of them.

    Args:
        runtime: the engine's.
        batch: the requests; ``batch.seq_lens`` are the positions of the roots, as
            ``future_map.resolve`` gave them. Of each request ``batch.max_draft_nodes`` nodes, known
            on the host, can be verified: N or more; fewer where the KV pool is short, or where the
            plan or the request asks for fewer. It binds, so a draft that costs something is best
            made no deeper and no wider than their maximum, with a tree's likeliest nodes first.
        draft_input: ``bonus_tokens`` [bs] are the roots: decided tokens whose KV is not written
            yet. ``draft_input["name"]`` is the state that the last step left.

    Returns:
        ``Draft.chain(tokens)`` or ``Draft.tree(tokens, parents, depth)``, [bs, N] with the root
        first, at most ``num_draft_tokens`` nodes and ``num_steps`` deep, and ``scores`` where the
        algorithm knows them. A request with nothing to
        propose has width 1. The engine puts in the root itself; a token outside the vocabulary
        becomes one inside; a node that is deeper than the declared depth, or has no parent before
        it, is never accepted. None is refused. What was drafted on the host goes to the device in
        one copy by ``upload_together``.
    """


@hookspec(firstresult=True)
def grow_draft(
    runtime: Runtime, batch: Batch, draft_input: DraftInput, draft: Draft
) -> Draft | None:
    """Add nodes to what another algorithm has proposed.

    Called after ``propose`` where the algorithm is a part of another one (``runtime.part``) that
    asks for it, as NGRAM is of ``EAGLE3+NGRAM``. Parts of ``A,B`` and the run's own algorithm are
    not asked.

    Args:
        runtime: the part's: ``runtime.config`` says how much may be added.
        batch: the requests, as in ``propose``. ``batch.max_draft_nodes`` binds the grown draft.
        draft_input: the roots, and the state that the part left in the last step.
        draft: the proposal, checked. Its tokens are known on the device alone.

    Returns:
        A draft of the same roots, by ``append_nodes``, ``merge_drafts`` and ``keep_likeliest`` for
        example: at most ``num_draft_tokens - 1`` nodes wider than ``draft`` and ``num_steps``
        deeper, as the part's settings say. It may leave out nodes of ``draft``. None: the draft as
        it is.

        A GPU records the passes over a draft for each width and depth. So there return one of few:
        the draft as it is, or as wide as with half of the nodes that may be added, rounded up, or
        with all of them, each of one depth. The warm-up has room for these in turn.
    """


@hookspec(firstresult=True)
def verify(  # type: ignore[empty-body]
    runtime: Runtime, batch: Batch, draft: Draft, target_output: TargetOutput
) -> VerifyOutput:
    """Accept the path of the draft that the target agrees with.

    Called in each decode step after the target's pass and the sampling, unless only the core
    implements it. An idle batch has no node and nothing in ``per_node``. A node may be accepted
    only if its token is what ``predict`` says at its parent. What a replacement returns is cut to
    such a path, and the tokens along it are those of the engine's own ``predict``, whatever the
    result's says: a wrong result makes steps shorter and no token wrong.

    Args:
        runtime: the engine's.
        batch: the requests, as in ``propose``.
        draft: what was verified, a copy: the proposal with the engine's roots, narrowed.
        target_output: ``predict`` [T] is the target's token after each node, with sampling,
            penalties and masks applied along the node's own path. A tensor of leading size T that
            is added to ``per_node`` here, under a new name, is compacted with all others and comes
            to ``build_draft_input``.

    Returns:
        The accepted path of each request. None: the core's tree verify, which is exact.
    """


@hookspec(firstresult=True)
def fixup_idle(runtime: Runtime, batch: Batch, draft_input: DraftInput) -> DraftInput:  # type: ignore[empty-body]
    """Make the draft input of a draft extend without a token.

    Called in the place of ``build_draft_input`` for an idle batch, and by a host for a batch all
    of whose requests have ended. The draft model may run collectives here, as it does elsewhere.

    Args:
        runtime: the engine's.
        batch: no request.
        draft_input: no root, and no hidden states: their width is not guessed at.

    Returns:
        A draft input of leading size 0, stashed for no row. None: the core's, with empty tensors
        as ``worker.state_spec()`` declares them.
    """


@hookspec(firstresult=True)
def supports_target_verify_for_draft() -> bool | None:
    """Say whether the draft model's passes can be recorded, as the target's verify is.

    Called once, before ``create_worker``, for the graph runner.

    Returns:
        True: what is given to ``runtime.record_draft`` has the same number of rows for every
        request and runs on the device alone, so that the host may record it. None: False; all of
        it runs as it is.
    """


@hookspec(firstresult=True)
def export_draft_state(
    runtime: Runtime, batch: Batch, future_map: FutureMap
) -> Mapping[str, Tensor | None] | None:
    """Give the draft state that travels with prefilled requests to a decode instance.

    Called by a prefill instance after ``build_draft_input`` and the stash, with a prefill batch in
    which some request is at its last chunk.

    Args:
        runtime: the engine's.
        batch: the chunks, as in ``build_draft_input``.
        future_map: the run's, with what this step has stashed.

    Returns:
        Named tensors of leading size bs, on the device. The core brings each request's row to the
        other side, where ``request.draft_state`` holds it. None: all that is stashed in
        ``future_map`` for these requests, which is all that ``build_draft_input`` returned.
    """


@hookspec(firstresult=True)
def create_trainer(runtime: TrainingRuntime) -> Trainer | None:
    """Make what trains the algorithm's draft network.

    Called once by ``specplug train``, outside a run of the engine, when the target and the rows to
    train on are there. Captures can be asked of ``runtime`` here alone. docs/training.md shows a
    trainer.

    Args:
        runtime: the frozen target, and the rows. ``runtime.config.draft_model_path`` is the folder
            of the network to go on from, or None: then the network is new.

    Returns:
        A ``Trainer``: the network, a batch's loss, and how the network is published. Where the
        network drafts from one position to the next, a ``FeatureTrainer``. None: the algorithm
        cannot be trained here.

    Raises:
        UsageError: the target or a setting does not fit.
        CheckpointError: the network to go on from is missing, damaged or made for another target.
    """


@hookspec
def on_host_tensors(
    runtime: Runtime, request_ids: Sequence[str], tensors: Mapping[str, Tensor]
) -> None:
    """Read on the host what a step has left there, by ``DraftInput(host=…)``.

    Called once for each such step, in the order of steps, all implementations: before the next
    ``propose`` or ``grow_draft`` of any request, or some steps later where none follows. With
    overlap the core waits there for the step before, which costs as much overlap. What a step
    leaves stays in its instance and its process.

    Args:
        runtime: the engine's.
        request_ids: the step's requests, some of which may have ended since.
        tensors: [bs, …] on the CPU, in the order of ``request_ids``, as they were when left.
    """


@hookspec
def on_step(runtime: Runtime, report: StepReport) -> None:
    """Look at a step that has been processed. For extensions.

    Called once per step, all implementations. With overlap the next step is on the device by then.
    A call that blocks holds up the launch of the step after that.

    Args:
        runtime: the engine's.
        report: what the step did, on the host: numbers and names, no tensor.
    """


@hookspec
def on_request_finished(runtime: Runtime, report: RequestReport) -> None:
    """Look at a request that has ended, for whatever reason.

    Called once per request, all implementations. An algorithm that keeps state by ``request_id``
    drops it here. With overlap a step that still
    contains the request may be on the device, and its row is not free before that is processed.

    Args:
        runtime: the engine's.
        report: what became of the request. A host that knows no more than that it has ended fills
            in ``request_id`` alone.
    """


@hookspec
def on_text_forgotten(runtime: Runtime, cache_salt: str | None) -> None:
    """Drop what is kept of the text of earlier requests.

    Called between two steps, all implementations, where the user asks for it
    (``LLM.flush_cache``). An algorithm that drafts from what earlier requests read or wrote drops
    that text. What belongs to a running request alone may stay: the request goes on.

    Args:
        runtime: the engine's.
        cache_salt: of the requests (``RequestView.cache_salt``) whose text is dropped; it may be
            of none. None: the text of all requests.
    """


@hookspec
def register_commands(cli: click.Group) -> None:
    """Add commands to the ``specplug`` command line.

    Called for extensions alone, outside a run: when help or a command that the core does not have
    is asked for. Every implementation is called.

    Args:
        cli: the command group, for ``cli.command()`` or ``cli.add_command()``.
    """


@hookspec
def register_options(command: click.Command) -> None:
    """Add options to a command, each of which brings an object into its run.

    Called for extensions alone, outside a run, before the arguments of ``specplug generate`` are
    read. Every implementation is called. An extension that ``--disable-extension`` names is not
    asked.

    The value of such an option, unless it is None, is a plugin object, which the option's
    ``callback`` makes of what was typed. It takes part in the run as those of
    ``LLM(extensions=[…])`` do. So what an extension wraps costs nothing in the runs that do not ask
    for it. A callback may refuse what was typed, by ``UsageError`` or click's errors. An option
    that the command has already is left out, with a warning.

    Args:
        command: of that name and without parameters, for ``click.option(…)(command)``.
    """
