"""SGLang's overlap loop over its own slot allocator, request table, prefix cache and checks, without a model: requests
are admitted, prefilled in chunks, decoded, sent back and ended as its scheduler (0.5.16) does it, and each token's KV
is a function of the tokens up to it."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

LAYERS = 2
CHUNK = 48  # tokens that are prefilled at once
RATIO = 0.5  # of what running requests may yet get, that is held back for them
LINES = 12  # requests that have slots at a time


@dataclass(eq=False)
class Request:
    """What of SGLang's `Req` its pools and the elastic KV cache read."""

    rid: str
    origin_input_ids: array[int]
    most_new: int
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    req_pool_idx: int | None = None
    kv: Any = None
    prefix_indices: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    last_node: Any = None
    cache_protected_len: int = 0
    filled: int = 0  # tokens that are prefilled, or about to be
    aborted: bool = False
    ended: bool = False
    extra_key = priority = session = session_id = None
    inflight_middle_chunks = 1

    def __post_init__(self) -> None:
        self.sampling_params = SimpleNamespace(max_new_tokens=self.most_new)
        self.time_stats = SimpleNamespace(wait_queue_entry_time=0.0)

    @property
    def kv_committed_len(self) -> int:
        return int(self.kv.kv_allocated_len)

    def tokens(self, count: int) -> array[int]:
        """The first of its tokens; what is generated depends on the place alone."""
        prompt = self.origin_input_ids
        return prompt[:count] + array("q", (at % 5 for at in range(len(prompt), count)))

    def get_fill_ids(self) -> array[int]:
        return self.tokens(self.filled)

    @property
    def length(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def ahead(self) -> int:
        return max(0, self.most_new - len(self.output_ids))


class OutOfSlots(AssertionError):
    """SGLang would end: it has planned with slots that are not there."""


class Loop:
    """slots: of the full pool, 8 to a row, with pages of 4 KiB."""

    def __init__(self, elastic: ModuleType, slots: int) -> None:
        from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
        from sglang.srt.managers.scheduler_components.pool_stats_observer import SchedulerPoolStatsObserver
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache

        from core.serving import elastic_pool

        self.pool = elastic_pool.ElasticMHATokenToKVPool(
            slots, 1, torch.float32, head_num=1, head_dim=128, layer_num=LAYERS, device="cpu",
            enable_memory_saver=False, enable_alt_stream=False,
        )  # fmt: skip
        self.slots = elastic_pool.ElasticTokenAllocator(slots, torch.float32, "cpu", self.pool, need_sort=False)
        self.table = ReqToTokenPool(LINES, slots + 1, "cpu", enable_memory_saver=False)
        self.tree = RadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=self.table, token_to_kv_pool_allocator=self.slots, page_size=1
            )
        )
        pools = {
            "tree_cache": self.tree, "token_to_kv_pool_allocator": self.slots, "req_to_token_pool": self.table,
            "is_hybrid_swa": False, "is_hybrid_ssm": False, "full_tokens_per_layer": None,
            "swa_tokens_per_layer": None, "max_total_num_tokens": slots, "get_last_batch": lambda: None,
            "get_running_batch": lambda: None,
        }  # fmt: skip
        self.observer = SchedulerPoolStatsObserver(
            session_controller=None, hisparse_coordinator=None, enable_hisparse=False, **pools
        )
        self.checker = SchedulerInvariantChecker(
            disaggregation_mode=None, page_size=1, server_args=SimpleNamespace(), pool_stats_observer=self.observer,
            **pools,
        )  # fmt: skip
        self.scheduler = SimpleNamespace(
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.slots,
            req_to_token_pool=self.table,
            running_batch=SimpleNamespace(reqs=[], batch_is_full=False),
            last_batch=None,
            chunked_req=None,
            waiting_queue=[],
            new_token_ratio_tracker=SimpleNamespace(current=RATIO),
            invariant_checker=self.checker,
            pool_stats_observer=self.observer,
            kv_events_publisher=SimpleNamespace(max_total_num_tokens=slots),
            load_inquirer=SimpleNamespace(max_total_num_tokens=slots),
        )
        self.kv = elastic.ElasticKV(self.scheduler)
        self.results: deque[tuple[str, list[Request]]] = deque()
        self.ended: list[Request] = []

    # ---- requests ----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        found: list[Request] = self.scheduler.running_batch.reqs
        return found

    @property
    def waiting(self) -> list[Request]:
        found: list[Request] = self.scheduler.waiting_queue
        return found

    def holders(self) -> list[Request]:
        """Requests that have slots."""
        last = self.scheduler.last_batch.reqs if self.scheduler.last_batch is not None else []
        chunked = [self.scheduler.chunked_req] if self.scheduler.chunked_req is not None else []
        return list({one.rid: one for one in (*self.running, *last, *chunked) if one.kv is not None}.values())

    @property
    def idle(self) -> bool:
        return not (self.holders() or self.waiting or self.results)

    def abort(self, request: Request) -> None:
        """Its client has gone."""
        if request in self.waiting:
            self.waiting.remove(request)
            self._end(request)
        request.aborted = True

    def flush(self) -> None:
        """SGLang's flush of the cache, which it does while nothing runs."""
        if self.idle:
            self.tree.reset()
            self.table.clear()
            self.slots.clear()

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """`event_loop_overlap` from `get_next_batch_to_run` on; whether a batch was launched."""
        scheduler = self.scheduler
        chunked, last = scheduler.chunked_req, scheduler.last_batch
        if chunked is not None and chunked.filled > len(chunked.prefix_indices):
            self.tree.cache_unfinished_req(chunked, chunked=True)
        if last is not None:
            self.running.extend(one for one in last.reqs if one is not chunked and not one.ended)
        scheduler.last_batch = None
        self.running[:] = [one for one in self.running if not one.ended]
        batch = self._prefill() or self._decode()
        if self.results and (len(self.results) > 1 or not batch):
            self._process()
        return batch

    def _prefill(self) -> bool:
        """`PrefillAdder` and `prepare_for_extend`."""
        scheduler, batch, chunk = self.scheduler, [], CHUNK
        taken = RATIO * sum(one.ahead for one in self.running)  # of what is available, and of what could be evicted

        def left() -> float:
            return self.slots.available_size() + self.tree.evictable_size() - taken

        chunked = scheduler.chunked_req
        if chunked is not None:
            most = min(chunk, int(left()))
            extend = min(chunked.length - len(chunked.prefix_indices), most if most > 0 else chunk)
            chunked.filled = len(chunked.prefix_indices) + extend
            if chunked.filled == chunked.length:
                scheduler.chunked_req = None
            batch.append((chunked, extend))
            taken += extend + 1 + (chunked.ahead if scheduler.chunked_req is None else 0)
            chunk -= extend
        for one in list(self.waiting):
            if len(self.running) + len(batch) >= LINES or left() <= 0 or chunk <= 0:
                break
            prefix, node = self._matched(one)
            extend = one.length - len(prefix)
            self.tree.inc_lock_ref(node)
            if extend + one.ahead + 1 >= left():
                self.tree.dec_lock_ref(node)
                break
            if extend > chunk:
                extend = chunk
                scheduler.chunked_req = one
            one.last_node, one.cache_protected_len, one.prefix_indices = node, len(prefix), prefix
            one.filled = len(prefix) + extend
            batch.append((one, extend))
            taken += extend + 1 + (one.ahead if scheduler.chunked_req is not one else 0)
            chunk -= extend
            self.waiting.remove(one)
        if batch:
            self._extend(batch)
        return bool(batch)

    def _matched(self, request: Request) -> tuple[torch.Tensor, Any]:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(request.tokens(request.length - 1), None)
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        return found.device_indices, found.last_device_node

    def _extend(self, batch: list[tuple[Request, int]]) -> None:
        slots = self._taken(sum(extend for _, extend in batch))
        if slots is None:
            raise OutOfSlots("Prefill out of memory. Try to lower your batch size.")
        assert self.table.alloc([one for one, _ in batch]) is not None
        for (one, extend), own in zip(batch, torch.split(slots, [extend for _, extend in batch]), strict=True):
            places = torch.cat((one.prefix_indices[: one.filled - extend], own))
            self.table.write((one.req_pool_idx, slice(0, one.filled)), places.to(torch.int32))
            one.kv = SimpleNamespace(kv_allocated_len=one.filled)
            self._write(one, one.filled - extend, own)
        self.scheduler.last_batch = SimpleNamespace(reqs=[one for one, _ in batch])
        self.results.append(("prefill", [one for one, _ in batch if one.filled == one.length]))

    def _decode(self) -> bool:
        """`retract_decode` and `prepare_for_decode`."""
        while self.running:
            slots = self._taken(len(self.running))
            if slots is not None:
                break
            if len(self.running) == 1:
                raise OutOfSlots("Out of memory even after retracting all other requests in the decode batch.")
            self._retract(self.running[-1])
        for number, one in enumerate(self.running):
            at = one.kv.kv_allocated_len
            self.table.write((one.req_pool_idx, slice(at, at + 1)), slots[number : number + 1].to(torch.int32))
            one.kv.kv_allocated_len = at + 1
            self._write(one, at, slots[number : number + 1])
        if self.running:
            self.results.append(("decode", list(self.running)))
        return bool(self.running)

    def _taken(self, count: int) -> torch.Tensor | None:
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(self.tree, count)
        slots: torch.Tensor | None = self.slots.alloc(count)
        return slots

    def _retract(self, request: Request) -> None:
        self._release(request, keep=False)
        self.running.remove(request)
        request.prefix_indices = request.prefix_indices[:0]
        request.filled = 0
        if request.aborted:
            self._end(request)
        else:
            self.waiting.append(request)

    def _process(self) -> None:
        kind, batch = self.results.popleft()
        if kind == "decode":
            self.slots.free_group_begin()
        for one in batch:
            # One that was sent back, or ended, meanwhile has no use for what came of the step.
            if one.ended or one in self.waiting:
                continue
            one.output_ids.append(one.length % 5)
            if one.ahead == 0 or one.aborted:
                self._release(one, keep=True)
                self._end(one)
            elif kind == "prefill":
                self.tree.cache_unfinished_req(one)
        if kind == "decode":
            self.slots.free_group_end()

    def _release(self, request: Request, keep: bool) -> None:
        self.tree.cache_finished_req(request, is_insert=keep, kv_len_to_handle=request.kv.kv_allocated_len)
        self.table.free(request)
        request.kv = None

    def _end(self, request: Request) -> None:
        request.ended = True
        self.ended.append(request)

    # ---- content -----------------------------------------------------------------------------------------------------

    @staticmethod
    def content(tokens: array[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.float32).cumsum(0)

    def _write(self, request: Request, first: int, slots: torch.Tensor) -> None:
        content = self.content(request.tokens(first + len(slots)))[first:]
        for layer, buffer in enumerate((*self.pool.k_buffer, *self.pool.v_buffer)):
            buffer[slots] = (content + 1000 * layer)[:, None, None]

    def _paths(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(slots, content) of each node of the prefix cache."""
        stack = [(self.tree.root_node, array("q"))]
        while stack:
            node, before = stack.pop()
            tokens = before
            if node is not self.tree.root_node:
                tokens = before + array("q", node.key.raw_token_ids())
                yield node.value, self.content(tokens)[len(before) :]
            stack += [(child, tokens) for child in node.children.values()]

    def check(self) -> None:
        """What can be handed out is mapped; every token's KV is where its holder says; slots are held once, none is
        lost, and SGLang's own checks find nothing."""
        kv, rows = self.kv, self.pool.rows
        pages = rows._column_pages(kv.rows_of(max(kv.size, self._highest())))
        assert all(region.is_mapped(0, count) for region, count in zip(rows._regions, pages, strict=True))
        held: list[int] = []
        places, content = [], []
        for one in self.holders():
            length = one.kv.kv_allocated_len
            slots = self.table.req_to_token[one.req_pool_idx, :length].long()
            places.append(slots)
            content.append(self.content(one.tokens(length)))
            held += slots[one.cache_protected_len :].tolist()
        own = len(held)
        for slots, expected in self._paths():
            places.append(slots)
            content.append(expected)
            held += slots.tolist()
        if places:
            found, expected = torch.cat(places), torch.cat(content)
            for layer, buffer in enumerate((*self.pool.k_buffer, *self.pool.v_buffer)):
                some = buffer[found, 0, ::127]  # the first and the last
                assert torch.equal(some, (expected + 1000 * layer)[:, None].expand_as(some))
        free = torch.cat((self.slots.free_pages, self.slots.release_pages)).tolist()
        twice = [slot for slot, count in Counter([*held, *free]).items() if count > 1]
        assert not twice
        assert max(free, default=0) <= kv.size
        assert sum(slot <= kv.size for slot in held) + len(free) == kv.size
        assert sum(slot > kv.size for slot in held) == self.slots.excess
        leak, words = self.checker._check_all_pools(self.observer.get_pool_stats(), uncached=own)
        assert not leak, words
        if not self.holders():
            assert len(self.table.free_slots) == LINES

    def _highest(self) -> int:
        lines = [self.table.req_to_token[one.req_pool_idx, : one.kv.kv_allocated_len].long() for one in self.holders()]
        return int(
            max((int(slots.max()) for slots in (*lines, *(at for at, _ in self._paths())) if len(slots)), default=0)
        )
