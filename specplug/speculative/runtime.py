"""``Runtime``: all that a plugin can reach of the engine that hosts it.

The embedded engine implements it, and so does every other host. Nothing is here that only one of
them could give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch
from torch import Tensor

from specplug.algorithm import SpecConfig
from specplug.host import HostCapabilities
from specplug.speculative.output_kind import PerTokenOutput

if TYPE_CHECKING:
    from specplug.speculative.draft_plan import ForcedTokens
    from specplug.speculative.hook_order import Batch, RequestView
    from specplug.speculative.part import Part


class KVCache:
    """The KV cache of a draft model: a handle that its host makes, and subclasses.

    A plugin gives it to the ``AttentionPlan`` and reads nothing of it. How keys and values lie in
    memory, and what allocates them, is the host's own.
    """


class AttentionPlan(Protocol):
    """Where the tokens of one pass stand, and what each of them sees.

    It is good for the step in which it was made.
    """

    @property
    def positions(self) -> Tensor:
        """[R] int64 absolute position of each row."""

    def attend(
        self,
        cache: KVCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the rows' keys and values to their slots, then attend.

        Args:
            q: [R, H, D], rotary embedding applied.
            k, v: [R, Hkv, D].
            scale: of the scores; ``D ** -0.5`` if None.
            window: positions that a row looks back, its own included (a sliding window); None:
                all. With a mask the plan's ``offset`` must be 0.
            sinks: [H], a score of each head that takes part in the softmax without a value
                (gpt-oss); None: there is none.

        Returns:
            [R, H * D].
        """

    def write(self, cache: KVCache, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the rows' keys and values, [R, Hkv, D], to their slots without attending: a
        context that a later pass looks at."""


class OwnText(Protocol):
    """The text of a draft whose tokens are not the target's, in a cache that it has for itself.

    For each token of the target stand one or more own ones. Where requests share the slots of a
    prefix they share the keys of its own tokens, so these must follow from the text alone.
    """

    def place(self, batch: Batch, starts: Tensor, counts: Tensor) -> None:
        """Say how many own tokens stand for each of some tokens of the target.

        What stood there before is forgotten, and all after it. Who got its row in this step
        (``Batch.first_chunk``, ``build_disagg_draft_input``) begins at position 0, with the tokens
        of its ``token_ids`` that were found in the prefix cache, too.

        Args:
            starts: [bs] int64 position of the first of the tokens, in the target's text.
            counts: [bs, w] int64 of each token, 1 to M; 0 after the request's last one.
        """

    def length(self, batch: Batch, positions: Tensor) -> Tensor:
        """Return how many own tokens stand before each request's position [bs] in the target's
        text: [bs] int64."""

    def plan_attention(
        self,
        batch: Batch,
        starts: Tensor,
        width: int | Sequence[int],
        *,
        offset: int = 0,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> AttentionPlan:
        """Plan a pass over own tokens, as ``Runtime.plan_attention`` does over the target's:
        ``starts``, ``offset`` and ``positions`` count own tokens. After those that were placed
        last stand the drafted ones, M in each slot."""


class TargetPlan(AttentionPlan, Protocol):
    """A plan of ``Runtime.plan_target``, for the target's own layers."""

    def next(self) -> TargetPlan:
        """Return the plan of as many rows after these, which see these rows too.

        Raises:
            PluginError: ``config.num_lookahead_slots`` end before, or the rows are a tree's.
        """

    def rows(
        self,
        width: int,
        *,
        offset: int,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> TargetPlan:
        """Return the plan of other rows of the same requests, which see the same part of what is
        committed: ``width`` of each request, with ``offset``, ``positions`` and ``mask`` as in
        ``Runtime.plan_attention``. So a tree is drafted level by level.

        A layer of a sliding window looks back along each row's own path.

        Raises:
            PluginError: ``config.num_lookahead_slots`` end before.
        """


@attrs.frozen(kw_only=True)
class RankInfo:
    """Where this process stands among its peers."""

    rank: int = 0
    world_size: int = 1


class Runtime(Protocol):
    """What a plugin may use of the engine.

    It is lent for the whole run, to read and to call: hooks get it as a ``LentRuntime``, of which
    nothing can be set.

    Every method runs on the current stream and reads no device data on the host. Those that are to
    be called in ``create_worker`` raise a ``PluginError`` later.

    Attributes:
        host: what the engine gives, and its name.
        device, dtype: of the target's weights and of all activations.
        config: the run's settings, after ``validate_config``.
        worker: what ``create_worker`` returned; None until then.
        rank: facts about this process's place.
        vocab_size, hidden_size, num_layers, context_len: of the target.
        model_path: the target's folder or hub id; None where the host does not say.
        max_running_requests: the greatest bs of a decode step.
        page_size: tokens per page of the KV pool.
        chunked_prefill_size: the most prompt tokens of a step; None: no limit.
        overlap: whether a step is launched before the host knows what the last one accepted.
        req_table_size: request rows, row 0 (padding) included.
    """

    host: HostCapabilities
    device: torch.device
    dtype: torch.dtype
    config: SpecConfig
    worker: Any
    rank: RankInfo
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_len: int
    model_path: str | None
    max_running_requests: int
    page_size: int
    chunked_prefill_size: int | None
    overlap: bool
    req_table_size: int

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, of transformers; None where it has none."""

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """Apply the target's input embedding: [R] int64 -> [R, hidden_size]."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Apply the target's output head to what leaves the final norm: [R, hidden_size] ->
        [R, vocab_size]."""

    def capture_layer_inputs(self, layer_ids: tuple[int, ...]) -> str:
        """Ask for the hidden states **before** these decoder layers, concatenated.

        Call it in ``create_worker``. Returns the name under which ``TargetOutput.per_node`` will
        hold them: [R, len(layer_ids) * hidden_size].

        ``num_layers`` itself stands for what leaves the last layer, before the final norm.

        Raises:
            UsageError: the target has no such layer, or the host captures none.
        """

    def capture_lm_head_input(self) -> str:
        """Ask for what the target's LM head reads: hidden states after the final norm.

        Call it in ``create_worker``. Returns the name under which ``TargetOutput.per_node`` will
        hold them: [R, hidden_size].

        Raises:
            UsageError: the host does not capture them.
        """

    def add_output(self, output: PerTokenOutput) -> None:
        """Add a value that requests can ask for and get for each of their tokens.

        Call it in ``create_worker``; an extension does so in a wrapper around that hook. The host
        keeps the values over chunks, over a retraction and between instances, computes nothing
        for requests that do not ask, and hands them out as ``RequestOutput.token_outputs[name]``.

        Raises:
            PluginError: there is an output of that name already.
        """

    def part(self, algorithm: str | object, **settings: Any) -> Part:
        """Make another algorithm a part of this one, which calls its hooks.

        Call it in ``create_worker``. The part has a configuration, a worker, a state and a future
        map of its own; everything else is the run's. The holder calls its ``build_draft_input`` for
        all that is committed, ``propose`` or ``grow_draft`` in a decode step, ``fixup_idle`` and
        ``build_disagg_draft_input`` where these are called of itself, and returns the states that
        they give, joined. The core tells it of ended requests, and exports its state.

        Args:
            algorithm: a name as users type it, or a plugin object.
            settings: ``num_steps``, ``topk``, ``num_draft_tokens`` and ``draft_model_path``, over
                the part's defaults.

        Raises:
            UsageError: the host runs no parts (``host.parts``), or the part cannot run so.
            PluginError: it writes more slots than the holder's configuration reserves, or there is
                a part of that name.
        """

    def allocate_kv(
        self, num_layers: int, num_kv_heads: int, head_dim: int, *, own_lengths: int = 1
    ) -> KVCache:
        """Reserve a cache for a draft model, with the target's slots. Call it in
        ``create_worker``; its tensors are there from the first ``build_draft_input`` on.

        Args:
            own_lengths: the most tokens of the draft's own text that stand for one token of the
                target. With more than one the passes over the cache are those of ``own_text``.
                A host without ``host.own_lengths`` takes 1 alone.
        """

    def own_text(self, cache: KVCache) -> OwnText:
        """Return where own tokens stand in a cache of ``allocate_kv(own_lengths=)``, 2 or more.

        Raises:
            UsageError: the host keeps one token of a draft for one of the target's.
        """

    def plan_attention(
        self,
        batch: Batch,
        starts: Tensor,
        width: int | Sequence[int],
        *,
        offset: int = 0,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> AttentionPlan:
        """Plan a pass of the draft model over ``width`` rows per request.

        Keys and values go to the slots ``starts + offset ... + width - 1`` of each request. Every
        row sees what is committed (before ``starts``) and, of the slots from ``starts`` on, those
        up to itself, or what ``mask`` says.

        Args:
            starts: [bs] int64 committed length of each request.
            width: rows per request, R = bs * width; or one number for each request, R their sum.
            offset: the first slot, counted from ``starts``; ``offset + width`` is at most
                ``config.num_lookahead_slots``. A negative offset writes committed positions again;
                each row then sees those up to itself. A row before position 0, or in the part of
                the prompt that was found in the prefix cache, is padding: it writes nothing, and
                its result means nothing.
            positions: [bs, width] int64 absolute positions, with the greatest width where they
                differ; ``starts + offset + i`` if None.
            mask: [bs or 1, width, offset + width] bool over the slots from ``starts`` on; only
                with ``offset`` >= 0. All true: the rows see one another, as in block diffusion.
        """

    def target_layers(self, first: int, last: int) -> Callable[[Tensor, TargetPlan], Tensor]:
        """Return the target's own decoder layers ``first`` to ``last - 1``, for drafts.

        Call it in ``create_worker``, of an algorithm that declares
        ``Capabilities(target_drafts=True)``. What it returns takes hidden states [R, hidden_size]
        and the plan of these R rows, and gives what leaves the last of the layers. Before layer 0
        stands ``embed_tokens``; after the last one ``final_norm`` and ``lm_head``.

        The layers write their keys and values to the rows' slots of the target's own cache, where
        the verification writes over them; rows at committed positions write nothing.

        Raises:
            UsageError: the target has no such layers, its layers do not run by themselves, or the
                host runs the target for its own passes alone.
        """

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm after the target's last layer: [R, hidden_size] -> [R, hidden_size]."""

    def plan_target(
        self,
        batch: Batch,
        starts: Tensor,
        width: int,
        *,
        offset: int = 0,
        sinks: int = 0,
        window: int | None = None,
        pages: Tensor | None = None,
        page_size: int | None = None,
    ) -> TargetPlan:
        """Plan rows of the target's drafts, ``width`` of each request in a chain.

        Each row sees the rows up to itself, from ``starts`` on, and of the committed tokens before
        ``starts`` all, or with a ``window`` the first and the last ones and the chosen pages. Where
        these meet, a token counts once. Positions stay what they are: nothing moves together.

        A layer of a sliding window looks back over the tokens of the part, as if there were no
        others.

        Args:
            starts: [bs] int64 committed length of each request.
            width: rows per request, R = bs * width.
            offset: the first slot, counted from ``starts``; ``offset + width`` is at most
                ``config.num_lookahead_slots``.
            sinks: first tokens that are seen.
            window: last committed tokens that are seen; None: all are.
            pages: [bs, P] int64, numbers of pages that are seen too: page p has the tokens from
                ``p * page_size`` on. Below 0: none. Distinct and in ascending order.
            page_size: of ``pages``; the KV pool's if None. It need not be a multiple of that.
        """

    def target_attention(
        self, layer: int, page_size: int
    ) -> Callable[[Batch, Tensor, Tensor], Tensor]:
        """Return what tells how much attention a layer of the target pays to each page.

        Call it in ``create_worker``. What it returns takes the batch, the hidden states before that
        layer [bs, hidden_size] of one committed row of each request, as ``capture_layer_inputs``
        has them, and the rows' positions [bs] int64. It computes the row's queries again, reads all
        keys of that layer up to the row, and gives [bs, pages] float32: the share of each page of
        ``page_size`` tokens, the mean over the heads. The number of pages is the host's: it covers
        all requests. Not for ``record_draft``.

        Raises:
            UsageError: as ``target_layers``.
        """

    def record_draft(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward``, recorded and replayed where the host can, as a CUDA graph say.

        Call it in ``create_worker`` and use what it returns. The host records it if
        ``supports_target_verify_for_draft`` says that it can be; otherwise it runs as it is. It
        may be one pass or many, a whole chain of them with what chooses the tokens.

        Args:
            forward: takes tensors, an ``AttentionPlan``, the decode ``Batch``, the
                ``DraftInput``, the ``CommittedOutput`` and plain values, all by position, and
                returns tensors (in tuples or mappings), by operations of the device alone, the
                same ones for all arguments of the same shapes and plain values. Of a batch it
                reads ``size``, ``mode``, ``greedy`` and the tensors. The host may add padding
                requests after the last one: a tensor whose leading size is a multiple of
                bs has rows of each request, in their order, and so has all that is returned. What
                it returns is overwritten by its next call.
        """

    def temperatures(self, batch: Batch) -> Tensor:
        """Return the requests' temperatures: [bs, 1] float32, 1 for greedy requests."""

    def gumbel_noise(self, batch: Batch, positions: Tensor, token_ids: Tensor) -> Tensor:
        """Return the noise with which the target will choose, for a draft that chooses alike. Not
        called where ``host.foreseeable_noise`` is False: every batch is greedy there.

        Args:
            positions: [bs, w] int64 absolute position of the tokens being chosen.
            token_ids: [V] int64 vocabulary of the draft, in the target's ids.

        Returns:
            [bs, w, V] float32, zero for greedy requests.
        """

    def forced_tokens(
        self, requests: Sequence[RequestView], *, wait: bool = False
    ) -> Sequence[ForcedTokens | None]:
        """Return the tokens that the grammars of requests force, to draft them.

        Args:
            requests: of the decode step that is drafted for.
            wait: whether the host waits for the step before, if it does not know yet what that has
                accepted: then the tokens follow the roots. An algorithm that leaves something for
                the host (``DraftInput(host=…)``) has waited for it before ``propose`` and
                ``grow_draft``, and asks so there. Otherwise ``known`` says what they follow.

        Returns:
            One for each request, None for one without a grammar. () if no request of the step has
            one, or the host does not say.
        """
