"""The KV cache that grows and shrinks beside running requests.

Shrinking: the allocator stops handing out high slots at once (`ElasticTokenAllocator.set_size`); unlocked prefixes are
evicted and, by SGLang itself, requests retracted until what is held fits; what still lies high is copied down, some
slots between two steps, and everything that names a slot is told; when nothing is left above, the rows are unmapped.
Growing: rows are mapped, then their slots are handed out. Mapping and unmapping run in a thread of their own.

Everything that holds a count of slots in SGLang (0.5.16) follows, but for the length that a single request may have:
that stays the one of the full pool, to which the pool grows for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.radix_cache import RadixCache

from core.errors import Unavailable
from core.memory.arena import Arena, ArenaError
from core.memory.moment import Moment
from core.memory.rows import Rows
from core.serving.elastic_pool import ElasticMHATokenToKVPool, ElasticTokenAllocator, refused

logger = logging.getLogger(__name__)

# Slots copied down between two steps: a few milliseconds on a CPU, well below one on a GPU.
_MOVED_AT_ONCE = 1024


def _ahead(request: Any) -> int:
    """Tokens that a request may yet get, counted as SGLang's admission does."""
    ahead = request.sampling_params.max_new_tokens - len(request.output_ids)
    return int(max(0, min(ahead, CLIP_MAX_NEW_TOKENS)))


def _prompt(request: Any) -> int:
    """Tokens that a request has, all of which are prefilled."""
    return len(request.origin_input_ids) + len(request.output_ids)


def _held(request: Any) -> int:
    """Slots that a request has; shared prefixes count."""
    return int(request.kv.kv_allocated_len) if request.kv is not None else 0


@dataclass(frozen=True, slots=True)
class Resized:
    """A change of the pool that is through: tokens before and after, seconds from the wish to its end, slots copied
    down, and the driver's words when it failed (`after` is then what was kept)."""

    before: int
    after: int
    seconds: float
    moved: int
    failure: str = ""


def elastic_kv(scheduler: Any) -> ElasticKV | None:
    """The scheduler's elastic KV cache, None when its pool is not one."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    return ElasticKV(scheduler) if isinstance(pool, ElasticMHATokenToKVPool) else None


class ElasticKV:
    """The pool of one scheduler. All methods belong to the scheduler's thread; none waits for mapping.

    Raises `Unavailable` when the scheduler's prefix cache is of a kind whose slots cannot be followed.
    """

    def __init__(self, scheduler: Any, *, clock: Callable[[], float] = time.perf_counter) -> None:
        tree = scheduler.tree_cache
        if type(tree) not in (RadixCache, ChunkCache):
            raise refused(f"the prefix cache {type(tree).__name__}")
        tree.evict = self._evicting(tree.evict)
        self._scheduler = scheduler
        self._allocator: ElasticTokenAllocator = scheduler.token_to_kv_pool_allocator
        self._pool: ElasticMHATokenToKVPool = self._allocator.get_kvcache()
        self._rows: Rows = self._pool.rows
        self._padding: int = self._pool.page_size
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="harli-memory")
        self._mapping: Future[None] | None = None
        self._unmaps = False  # what the thread does now; the rows that go count as there until it is through
        self._rows_wanted = self._rows.rows
        self._growth: list[tuple[int, Moment | None]] = []  # rows to come, and when there are pages for them
        self._before, self._since, self._moved = self.size, clock(), 0
        self._settled = True
        self._known: Collection[str] = ()  # requests that were there at the last look

    # ---- figures -----------------------------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena:
        return self._rows.arena

    @property
    def size(self) -> int:
        """Slots that requests may hold now, tokens."""
        return int(self._allocator.size)

    @property
    def most(self) -> int:
        """Slots of the full pool."""
        return int(self._pool.size)

    @property
    def row_tokens(self) -> int:
        return self._rows.row_tokens

    @property
    def free(self) -> int:
        """Slots that a request could get now: those that nobody holds and those of evictable prefixes."""
        return int(self._allocator.available_size() + self._scheduler.tree_cache.evictable_size())

    @property
    def settled(self) -> bool:
        """Nothing is on its way."""
        return self._settled

    @property
    def goal(self) -> int:
        """Slots that the pool has, or is about to have."""
        return self.slots_of(self._rows_wanted)

    def rows_of(self, tokens: int) -> int:
        """Rows of a pool of at least `tokens` slots."""
        return min(self._rows.rows_of(tokens + self._padding), self._rows.most)

    def slots_of(self, rows: int) -> int:
        """Slots of a pool of `rows` rows; the padding is no slot."""
        return self._rows.tokens_of(rows) - self._padding

    def pages_of(self, tokens: int) -> int:
        """Arena pages of a pool of `tokens` slots."""
        return self._rows.pages_of(self.rows_of(tokens))

    def fewest(self) -> int:
        """Slots that SGLang cannot do without. The request at hand with the most of them needs so many, with at most
        `CLIP_MAX_NEW_TOKENS` for what is yet to come, as SGLang counts: with fewer it would not be taken up, or be
        aborted. And a prompt that is prefilled in chunks takes the rest of its slots whether they are there or not."""
        most = max((self._need(request) for request in self._requests(True)), default=0)
        chunked = self._scheduler.chunked_req
        if chunked is not None:
            most = max(most, self.size - self.free + _prompt(chunked) - _held(chunked))
        return self.slots_of(self.rows_of(most + self._padding + 1))

    def asked(self) -> int:
        """Slots that must be free before SGLang takes up all requests that wait, one whose prompt is not all prefilled
        among them: what they need, and what it holds back for those that run."""
        scheduler = self._scheduler
        waiting = [*scheduler.waiting_queue, *([scheduler.chunked_req] if scheduler.chunked_req is not None else ())]
        if not waiting:
            return 0
        return self._held_back() + sum(self._need(request) - _held(request) for request in waiting)

    def _held_back(self) -> int:
        """Slots that SGLang keeps for those that run when it takes up others."""
        ratio: float = self._scheduler.new_token_ratio_tracker.current
        return ceil(ratio * sum(_ahead(request) for request in self._decoding()))

    def _decoding(self) -> Iterable[Any]:
        """Requests whose prompt is prefilled, or is as far as SGLang has launched it."""
        chunked = self._scheduler.chunked_req
        return {id(one): one for one in self._requests(False) if one is not chunked}.values()

    @property
    def waiting(self) -> int:
        """Requests that are queued."""
        return len(self._scheduler.waiting_queue)

    def short(self) -> tuple[Hashable, float] | None:
        """The id of the first of the requests that wait which what is free does not do for, with those before it, and
        when it was queued, on the clock of `time.perf_counter`."""
        left = self.free - self._held_back()
        if (chunked := self._scheduler.chunked_req) is not None:
            left -= self._need(chunked) - _held(chunked)
        for request in self._scheduler.waiting_queue:
            left -= self._need(request)
            if left < 0:
                return request.rid, request.time_stats.wait_queue_entry_time
        return None

    def waits(self, request: Hashable) -> bool:
        """Whether the request of that id is still queued."""
        return any(one.rid == request for one in self._scheduler.waiting_queue)

    def growth(self, steps: float) -> int:
        """Slots that running requests take in so many decode steps."""
        return ceil(sum(min(steps, _ahead(request)) for request in self._decoding()))

    def arrived(self) -> Sequence[tuple[int, int]]:
        """(prompt, most that may follow) in tokens of each request that came since the last call."""
        present = {request.rid: request for request in self._requests(True)}
        fresh = [request for rid, request in present.items() if rid not in self._known]
        self._known = set(present)
        return [(len(request.origin_input_ids), _ahead(request)) for request in fresh]

    @staticmethod
    def _need(request: Any) -> int:
        return _prompt(request) + _ahead(request)

    # ---- orders ------------------------------------------------------------------------------------------------------

    def resize(self, tokens: int, after: Moment | None = None) -> int:
        """Make for a pool of `tokens` slots, rounded up to whole rows, that does not shrink below what requests at hand
        need; answers what it will be. after: when there are pages for it, if it grows; the thread waits."""
        wanted = self.rows_of(min(tokens, self.most))
        if wanted < self._rows_wanted:
            wanted = min(self._rows_wanted, max(wanted, self.rows_of(self.fewest())))
        if wanted != self._rows_wanted:
            if self._settled:
                self._before, self._since, self._moved = self.size, self._clock(), 0
                self._settled = False
            if wanted > self._rows_wanted:
                self._growth.append((wanted, after))
            else:
                self._growth = [(min(rows, wanted), moment) for rows, moment in self._growth]
            self._rows_wanted = wanted
            if self.slots_of(wanted) < self.size:
                self._set_size(self.slots_of(wanted))
        return self.slots_of(wanted)

    def advance(self) -> Resized | None:
        """Go on with what is on its way; to be called between two batches. Answers a change that is through."""
        self._evict()
        if self._settled:
            return None
        failure = ""
        if self._mapping is not None:
            if not self._mapping.done():
                if not self._unmaps:
                    self._hand_out()
                return None
            mapping, self._mapping = self._mapping, None
            try:
                mapping.result()
            except ArenaError as error:
                failure, self._growth = str(error), []
                self._rows_wanted = min(self._rows_wanted, self._rows.rows)
                logger.warning("the KV cache stays at %d tokens: %s", self.size, failure)
        wanted = self._rows_wanted
        if wanted > self._rows.rows:
            self._hand_out()
            growth = [(rows, moment) for rows, moment in self._growth if rows > self._rows.rows]
            self._growth = []
            self._map(growth or [(wanted, None)])
            return None
        if self.size != self.slots_of(wanted):
            self._set_size(self.slots_of(wanted))
        if self._allocator.excess:
            self._move_down()
        if self._allocator.excess:
            return None
        if wanted < self._rows.rows:
            self._map([(wanted, None)])
            return None
        self._settled = True
        return Resized(self._before, self.size, self._clock() - self._since, self._moved, failure)

    def make_room(self, pages: int) -> None:
        """Give up rows until `pages` of the arena are free, and wait for it: for the start, while nothing is held.
        Raises `Unavailable` when the pool is too small for that."""
        said = self.arena.statistics()
        spare = said.capacity - said.lost - said.used
        has = rows = self._rows.rows
        while rows > 1 and spare + self._rows.pages_of(has) - self._rows.pages_of(rows) < pages:
            rows -= 1
        if spare + self._rows.pages_of(has) - self._rows.pages_of(rows) < pages:
            raise Unavailable(
                "elastic_kv",
                f"finetuning takes {pages} pages of {self.arena.page_bytes} bytes, the KV cache has "
                f"{self._rows.pages_of(has)}; lower finetune.micro_batch_tokens or raise engine.max_total_tokens",
                "finetune.micro_batch_tokens",
            )
        self._resize_now(rows)

    def take_room_back(self) -> None:
        """Grow as far as pages are free, and wait for it: for the start, after what `make_room` was for."""
        said = self.arena.statistics()
        spare = said.capacity - said.lost - said.used
        has = rows = self._rows.rows
        while rows < self._rows.most and self._rows.pages_of(rows + 1) - self._rows.pages_of(has) <= spare:
            rows += 1
        self._resize_now(rows)

    def _resize_now(self, rows: int) -> None:
        self.resize(self.slots_of(rows))
        while not self._settled:
            self.advance()
            time.sleep(0.001)

    def close(self) -> None:
        """Wait for the thread."""
        self._thread.shutdown()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _set_size(self, size: int) -> None:
        self._allocator.set_size(size)
        scheduler = self._scheduler
        for holder in (
            scheduler.invariant_checker,
            scheduler.pool_stats_observer,
            scheduler.kv_events_publisher,
            scheduler.load_inquirer,
        ):
            object.__setattr__(holder, "max_total_num_tokens", size)  # some of them are frozen
        # A batch that was full may not be so any more, and the other way round.
        scheduler.running_batch.batch_is_full = False
        self._evict()

    def _evict(self) -> None:
        """Evict what is held beyond the size, as far as it can be."""
        if self._allocator.available_size() < 0 and self._scheduler.tree_cache.evictable_size() > 0:
            self._scheduler.tree_cache.evict(EvictParams(num_tokens=0))

    def _evicting(self, evict: Callable[[EvictParams], EvictResult]) -> Callable[[EvictParams], EvictResult]:
        """Whoever evicts wants to have so many slots: what is held beyond the size comes on top. Without that SGLang,
        whose retraction leaves prefixes in the cache, would retract all requests and abort the last of them."""

        def more(params: EvictParams) -> EvictResult:
            lacking = max(0, -self._allocator.available_size())
            return evict(replace(params, num_tokens=params.num_tokens + lacking))

        return more

    def _hand_out(self) -> None:
        """Rows that are there while others are still to come."""
        there = self.slots_of(min(self._rows.rows, self._rows_wanted))
        if there > self.size:
            self._set_size(there)

    def _map(self, sizes: Sequence[tuple[int, Moment | None]]) -> None:
        """Map or unmap to one number of rows after another in the thread, each when its moment has come. Rows that go
        are out of use once the work is done that is queued by now."""
        self._unmaps = sizes[0][0] < self._rows.rows
        queued = self._queued_work() if self._unmaps else []

        def run() -> None:
            for event in queued:
                event.synchronize()
            for rows, moment in sizes:
                if moment is not None:
                    moment.synchronize()
                self._rows.resize(rows)

        self._mapping = self._thread.submit(run)

    def _queued_work(self) -> list[torch.cuda.Event]:
        device = self._pool.k_buffer[0].device
        if device.type != "cuda":
            return []
        streams = {torch.cuda.current_stream(device), self._scheduler.forward_stream}
        return [stream.record_event() for stream in streams]

    def _requests(self, waiting: bool) -> Iterator[Any]:
        """Requests that may hold slots; with `waiting` those in the queue too."""
        scheduler = self._scheduler
        yield from scheduler.running_batch.reqs
        if scheduler.last_batch is not None:
            yield from scheduler.last_batch.reqs
        if scheduler.chunked_req is not None:
            yield scheduler.chunked_req
        if waiting:
            yield from scheduler.waiting_queue

    @torch.inference_mode()
    def _move_down(self) -> None:
        """Copy held slots above the size to free ones below it, and tell everything that names them: the requests'
        table, prefixes that requests go on from, the nodes of the prefix cache."""
        device = self._pool.k_buffer[0].device
        if device.type == "cuda":
            # Steps that are queued read and write the slots under their old numbers.
            torch.cuda.current_stream(device).wait_stream(self._scheduler.forward_stream)
        source, target = self._allocator.relocate(_MOVED_AT_ONCE)
        if not len(source):
            return
        for buffer in (*self._pool.k_buffer, *self._pool.v_buffer):
            buffer[target] = buffer[source]
        now_at = torch.arange(self.most + 1, dtype=torch.int64, device=device)
        now_at[source] = target
        holders = {id(request): request for request in self._requests(False) if request.req_pool_idx is not None}
        table = self._scheduler.req_to_token_pool.req_to_token
        if holders:
            lines = torch.tensor([r.req_pool_idx for r in holders.values()], dtype=torch.int64, device=device)
            width = max(request.kv.kv_allocated_len for request in holders.values())
            table[lines, :width] = now_at[table[lines, :width].long()].to(table.dtype)
        for request in holders.values():
            if len(request.prefix_indices):
                request.prefix_indices = now_at[request.prefix_indices.long()]
        nodes = [node for node in self._nodes() if len(node.value)]
        if nodes:
            values = now_at[torch.cat([node.value for node in nodes])]
            parts = torch.split(values, [len(node.value) for node in nodes])
            for node, value in zip(nodes, parts, strict=True):
                node.value = value
        self._moved += len(source)

    def _nodes(self) -> Iterator[Any]:
        tree = self._scheduler.tree_cache
        stack = list(tree.root_node.children.values()) if isinstance(tree, RadixCache) else []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node
