"""The elastic KV cache over SGLang's own pool, slot allocator and prefix cache, without a model."""

from __future__ import annotations

import importlib.util
import random
import time
from array import array
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import Unavailable
from core.memory.share import Move

SLOTS = 63
ROW = 8  # tokens: 32 KiB a token and column, pages of 256 KiB
LAYERS = 2


@pytest.fixture(scope="module")
def elastic() -> ModuleType:
    if importlib.util.find_spec("sgl_kernel") is None:
        from core.serving import cpu_standin

        cpu_standin.install()
    from core.serving import elastic

    return elastic


class Engine:
    """What of SGLang's scheduler the elastic KV cache touches, and requests whose KV is a function of their tokens."""

    def __init__(self, elastic: ModuleType) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache

        from core.serving import elastic_pool

        self.pool = elastic_pool.ElasticMHATokenToKVPool(
            SLOTS, 1, torch.float32, head_num=1, head_dim=8192, layer_num=LAYERS, device="cpu",
            enable_memory_saver=False, enable_alt_stream=False,
        )  # fmt: skip
        self.slots = elastic_pool.ElasticTokenAllocator(SLOTS, torch.float32, "cpu", self.pool, need_sort=False)
        self.table = ReqToTokenPool(16, 128, "cpu", enable_memory_saver=False)
        self.tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.slots,
                page_size=1,
            )
        )
        holders = {name: SimpleNamespace(max_total_num_tokens=SLOTS) for name in HOLDERS}
        self.scheduler = SimpleNamespace(
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.slots,
            req_to_token_pool=self.table,
            running_batch=SimpleNamespace(reqs=[], batch_is_full=False),
            last_batch=None,
            chunked_req=None,
            waiting_queue=[],
            new_token_ratio_tracker=SimpleNamespace(current=0.5),
            **holders,
        )
        self.kv = elastic.ElasticKV(self.scheduler)

    @property
    def running(self) -> list[Any]:
        return self.scheduler.running_batch.reqs

    def request(self, tokens: list[int], ahead: int = 4) -> Any:
        return SimpleNamespace(
            rid=f"request {random.random()}",
            origin_input_ids=array("q", tokens),
            output_ids=array("q"),
            sampling_params=SimpleNamespace(max_new_tokens=ahead),
            req_pool_idx=None,
            prefix_indices=torch.empty(0, dtype=torch.int64),
            kv=None,
            extra_key=None,
            priority=None,
            cache_protected_len=0,
            last_node=None,
            session=None,
            session_id=None,
            time_stats=SimpleNamespace(wait_queue_entry_time=0.0),
        )

    def take(self, count: int) -> torch.Tensor | None:
        """Slots as SGLang gets them: evict first, then allocate."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(self.tree, count)
        return self.slots.alloc(count)

    def admit(self, request: Any) -> bool:
        """Prefill: the cached prefix and new slots for the rest, as far as the budget allows."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = request.origin_input_ids
        matched = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:-1], None)))
        prefix, node = matched.device_indices, matched.last_device_node
        self.tree.inc_lock_ref(node)
        fresh = len(tokens) - len(prefix)
        if fresh + 1 > self.slots.available_size() + self.tree.evictable_size() or not self.table.free_slots:
            self.tree.dec_lock_ref(node)
            return False
        slots = self.take(fresh)
        assert slots is not None, "the budget said that there are enough"
        self.table.alloc([request])
        request.last_node, request.cache_protected_len, request.prefix_indices = node, len(prefix), prefix
        request.kv = SimpleNamespace(kv_allocated_len=len(tokens))
        self.table.write((request.req_pool_idx, slice(0, len(tokens))), torch.cat((prefix, slots)).to(torch.int32))
        self.write(request, range(len(prefix), len(tokens)))
        self.running.append(request)
        return True

    def decode(self) -> None:
        """One token for each; without slots the last one is sent back, as SGLang does."""
        while self.running:
            slots = self.take(len(self.running))
            if slots is not None:
                break
            self.finish(self.running[-1], keep=False)
        for number, request in enumerate(list(self.running)):
            at = request.kv.kv_allocated_len
            request.output_ids.append(at % 5)
            self.table.write((request.req_pool_idx, slice(at, at + 1)), slots[number : number + 1].to(torch.int32))
            request.kv.kv_allocated_len = at + 1
            self.write(request, range(at, at + 1))
            if len(request.output_ids) == request.sampling_params.max_new_tokens:
                self.finish(request)

    def finish(self, request: Any, keep: bool = True) -> None:
        self.tree.cache_finished_req(request, is_insert=keep, kv_len_to_handle=request.kv.kv_allocated_len)
        self.table.free(request)
        request.kv = None
        self.running.remove(request)

    def expected(self, tokens: array[int]) -> torch.Tensor:
        return torch.tensor(tokens, dtype=torch.float32).cumsum(0)

    def write(self, request: Any, positions: range) -> None:
        content = self.expected(request.origin_input_ids + request.output_ids)
        slots = self.table.req_to_token[request.req_pool_idx, positions.start : positions.stop].long()
        for layer, buffer in enumerate((*self.pool.k_buffer, *self.pool.v_buffer)):
            buffer[slots] = (content[positions.start : positions.stop] + 1000 * layer)[:, None, None]

    def check(self) -> None:
        """Every token's KV is where its holder says; slots are held once and none is lost."""
        held: list[int] = []
        for request in self.running:
            length = request.kv.kv_allocated_len
            slots = self.table.req_to_token[request.req_pool_idx, :length].long()
            self.compare(slots, self.expected(request.origin_input_ids + request.output_ids)[:length])
            held += slots[request.cache_protected_len :].tolist()
        stack = [(self.tree.root_node, array("q"))]
        while stack:
            node, before = stack.pop()
            tokens = before + array("q", node.key.raw_token_ids()) if node is not self.tree.root_node else before
            if len(tokens) > len(before):
                self.compare(node.value, self.expected(tokens)[len(before) :])
                held += node.value.tolist()
            stack += [(child, tokens) for child in node.children.values()]
        free = torch.cat((self.slots.free_pages, self.slots.release_pages)).tolist()
        assert len({*held, *free}) == len(held) + len(free)
        assert max(free, default=0) <= self.kv.size
        assert sum(slot <= self.kv.size for slot in held) + len(free) == self.kv.size
        assert sum(slot > self.kv.size for slot in held) == self.slots.excess
        assert self.slots.available_size() + len(held) == self.kv.size
        assert max(held, default=0) < self.pool.rows.tokens_of(self.pool.rows.rows)
        assert {getattr(self.scheduler, name).max_total_num_tokens for name in HOLDERS} == {self.kv.size}

    def compare(self, slots: torch.Tensor, content: torch.Tensor) -> None:
        for layer, buffer in enumerate((*self.pool.k_buffer, *self.pool.v_buffer)):
            found = buffer[slots.long()].flatten(1)
            assert torch.equal(found.amin(1), content + 1000 * layer) and torch.equal(found.amin(1), found.amax(1))

    def settle(self, step: Callable[[], object] | None = None) -> Any:
        """Go on until the change is through."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if (resized := self.kv.advance()) is not None:
                return resized
            if step is not None:
                step()
            self.check()
        raise AssertionError("the change did not come to its end")


HOLDERS = ("invariant_checker", "pool_stats_observer", "kv_events_publisher", "load_inquirer")


@pytest.fixture
def engine(elastic: ModuleType) -> Engine:
    return Engine(elastic)


def test_shrinking_copies_down_what_runs_and_gives_the_pages_back(engine: Engine) -> None:
    for first in range(3):
        assert engine.admit(engine.request([first, *range(10)]))
    engine.finish(engine.running[0], keep=False)
    assert engine.admit(engine.request([9, *range(10)]))
    assert engine.kv.resize(39) == 5 * ROW - 1
    resized = engine.settle()
    assert (resized.before, resized.after, resized.failure) == (SLOTS, 39, "")
    said = engine.kv.arena.statistics()
    assert said.used == 5 * 2 * LAYERS and said.owners[0].name == "kv cache"
    assert len(engine.running) == 3


def test_slots_that_lie_high_are_moved_and_prefixes_stay_cached(engine: Engine) -> None:
    for first in range(3):
        engine.admit(engine.request([first, *range(10)], ahead=1))
        engine.decode()
    late = engine.request([7, *range(12)])
    assert engine.admit(late) and int(engine.table.req_to_token[late.req_pool_idx, :13].max()) > 31
    engine.kv.resize(31)
    assert engine.settle().moved > 0
    assert int(engine.table.req_to_token[late.req_pool_idx, :13].max()) <= 31
    engine.decode()
    engine.check()


def test_growing_hands_out_the_new_slots(engine: Engine) -> None:
    engine.kv.resize(15)
    engine.settle()
    assert engine.kv.free == 15
    assert not engine.admit(engine.request(list(range(20))))
    engine.kv.resize(SLOTS)
    resized = engine.settle()
    assert (resized.after, engine.kv.free, engine.kv.size) == (SLOTS, SLOTS, SLOTS)
    assert engine.admit(engine.request(list(range(50))))
    engine.check()


def test_it_grows_by_each_part_as_soon_as_there_are_pages_for_it(engine: Engine) -> None:
    """Nobody has to look again: the thread waits for what a job gives up."""
    engine.kv.resize(15)
    engine.settle()
    claim = engine.kv.arena.claim("job", 24)
    first, second = Move(), Move()
    assert engine.kv.resize(39, first) == 39 == engine.kv.goal and engine.kv.resize(SLOTS, second) == SLOTS
    for _ in range(3):
        assert engine.kv.advance() is None and engine.kv.size == 15
    claim.resize(12)
    first.end(1.0)
    deadline = time.monotonic() + 20
    while engine.kv.size < 39 and time.monotonic() < deadline:
        assert engine.kv.advance() is None
    assert engine.kv.size == 39 and engine.admit(engine.request(list(range(30)))), "while the rest is still to come"
    claim.resize(0)
    second.end(2.0)
    assert engine.settle().after == SLOTS


def test_a_growth_that_is_not_wanted_any_more_waits_for_nothing_after_it(engine: Engine) -> None:
    engine.kv.resize(31)
    engine.settle()
    move = Move()
    engine.kv.resize(SLOTS, move)
    assert engine.kv.resize(31) == 31 and engine.settle().after == 31
    engine.kv.resize(47)
    assert engine.settle().after == 47 and not move.query()


def test_rows_that_go_are_not_handed_out_again_while_they_go(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Move()
    monkeypatch.setattr(engine.kv, "_queued_work", lambda: [queued])
    engine.kv.resize(15)
    for _ in range(5):
        assert engine.kv.advance() is None
    assert engine.kv.resize(SLOTS) == SLOTS
    for _ in range(5):
        assert engine.kv.advance() is None and engine.kv.size == 15, "they are being unmapped"
    queued.end(1.0)
    assert engine.settle().after == SLOTS
    engine.check()


def test_pages_are_waited_for_also_where_rows_had_to_go_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    queued, given_up = Move(), Move()
    monkeypatch.setattr(engine.kv, "_queued_work", lambda: [queued])
    engine.kv.resize(15)
    engine.kv.advance()
    engine.kv.resize(39, given_up)
    assert engine.kv.resize(31) == 31, "less than that will do"
    queued.end(1.0)
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        assert engine.kv.advance() is None and engine.kv.size == 15
    given_up.end(2.0)
    assert engine.settle().after == 31


def test_a_growth_that_is_refused_leaves_the_order_to_shrink(engine: Engine) -> None:
    engine.kv.resize(31)
    engine.settle()
    claim, given_up = engine.kv.arena.claim("job", 14), Move()
    engine.kv.resize(SLOTS, given_up)
    assert engine.kv.advance() is None
    engine.kv.resize(15)
    given_up.end(1.0)
    assert engine.settle().after == 15 == engine.kv.goal
    assert claim.pages == 14


def test_it_grows_no_further_than_it_is_told(engine: Engine) -> None:
    """What requests need is more than there are pages for yet."""
    engine.kv.resize(15)
    engine.settle()
    engine.scheduler.waiting_queue.append(engine.request(list(range(30)), ahead=10))
    assert engine.kv.fewest() == 47 and engine.kv.resize(23) == 23
    assert engine.kv.resize(1) == 23, "and shrinks no more"


def test_a_prompt_that_is_prefilled_in_chunks_keeps_the_slots_for_its_rest(engine: Engine) -> None:
    """SGLang takes the next chunk's slots whether they are there or not, and ends without them."""
    first, second = engine.request(list(range(10))), engine.request([7, *range(19)])
    assert engine.admit(first) and engine.admit(second)
    second.origin_input_ids.extend(range(25))
    engine.scheduler.chunked_req = second
    assert engine.kv.asked() == 4 // 2 + 25 + 4
    assert engine.kv.resize(1) == SLOTS, "30 are held, and 25 will be taken"
    second.origin_input_ids = second.origin_input_ids[:25]
    assert engine.kv.resize(1) == 39


def test_an_eviction_makes_up_for_what_is_held_beyond_the_size(engine: Engine) -> None:
    """SGLang evicts as much as it wants to allocate. When it sends a request back, the prompt stays in the cache."""
    requests = [engine.request(tokens) for tokens in (list(range(30)), [7, *range(9)], [8, *range(9)])]
    assert all(engine.admit(request) for request in requests)
    assert engine.kv.resize(1) == 39 and engine.slots.available_size() == -11
    for request in requests[1:]:
        engine.finish(request)
    assert engine.slots.available_size() == -11
    slot = engine.take(1)
    assert slot is not None
    engine.slots.free(slot)
    engine.check()


def test_the_pool_stays_large_enough_for_every_request_at_hand(engine: Engine) -> None:
    engine.scheduler.waiting_queue.append(engine.request(list(range(30)), ahead=10))
    assert engine.kv.resize(1) == 47
    engine.scheduler.waiting_queue.clear()
    assert engine.kv.resize(1) == ROW - 1


def test_a_change_of_mind_needs_no_waiting(engine: Engine) -> None:
    for first in range(4):
        engine.admit(engine.request([first, *range(10)], ahead=9))
    engine.kv.resize(20)
    assert engine.kv.size == 23 and engine.slots.available_size() < 0
    engine.kv.resize(SLOTS)
    engine.settle()
    assert engine.slots.excess == 0 and engine.kv.size == SLOTS
    engine.check()


def test_an_arena_without_pages_leaves_the_pool_as_it_is(engine: Engine) -> None:
    engine.kv.resize(31)
    engine.settle()
    claim = engine.kv.arena.claim("job", 14)
    engine.kv.resize(SLOTS)
    resized = engine.settle()
    assert resized.after == 31 and "2 of 32 are free" in resized.failure
    del claim
    engine.kv.resize(SLOTS)
    assert engine.settle().after == SLOTS


def test_a_flush_in_the_middle_of_a_change_is_taken_up(engine: Engine) -> None:
    engine.admit(engine.request(list(range(40))))
    engine.kv.resize(47)
    engine.finish(engine.running[0])
    engine.tree.reset()
    engine.table.clear()
    engine.slots.clear()
    engine.settle()
    assert engine.kv.free == engine.kv.size == 47


@pytest.mark.parametrize("seed", range(6))
def test_under_random_load_and_random_sizes_no_token_is_lost(engine: Engine, seed: int) -> None:
    draw = random.Random(seed)
    served = retracted = 0
    for _ in range(250):
        kind = draw.random()
        if kind < 0.3:
            shared = list(range(draw.randrange(12)))
            tokens = [draw.randrange(3), *shared, *(draw.randrange(7) for _ in range(draw.randrange(1, 14)))]
            served += engine.admit(engine.request(tokens, ahead=draw.randrange(1, 9)))
        elif kind < 0.7:
            before = len(engine.running)
            engine.decode()
            retracted += before - len(engine.running)
        elif kind < 0.8:
            engine.kv.resize(draw.randrange(SLOTS + 1))
        engine.kv.advance()
        engine.check()
    assert served > 20
    engine.kv.resize(SLOTS)
    while engine.running or not engine.kv.settled:
        engine.kv.advance()
        engine.decode()
        engine.check()
    assert engine.kv.free == SLOTS


def test_what_is_not_covered_is_refused_by_its_name(elastic: ModuleType) -> None:
    from core.serving import elastic_pool

    class MLATokenToKVPool:
        pass

    class SWATokenToKVPoolAllocator:
        page_size = 64

    with pytest.raises(Unavailable, match=r"MLATokenToKVPool.*ELASTIC_KV=false"):
        elastic_pool.require(MLATokenToKVPool())
    with pytest.raises(Unavailable, match=r"SWATokenToKVPoolAllocator \(pages of 64 tokens\)"):
        elastic_pool.allocator(SWATokenToKVPoolAllocator())
    arguments = SimpleNamespace(
        kv_cache_dtype="auto", prefill_only_disable_kv_cache=False, enable_memory_saver=False,
        speculative_algorithm="EAGLE", disaggregation_mode="null", enable_hierarchical_cache=False,
    )  # fmt: skip
    configurator = SimpleNamespace(server_args=arguments, kv_cache_dtype=torch.bfloat16, post_capture_kv_active=False)
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, PageMajorMHATokenToKVPool

    with pytest.raises(Unavailable, match=r"speculative decoding.*EAGLE"):
        elastic_pool.pool(configurator, MHATokenToKVPool, None)
    with pytest.raises(Unavailable, match="PageMajorMHATokenToKVPool"):
        elastic_pool.pool(configurator, PageMajorMHATokenToKVPool, None)
    arguments.speculative_algorithm = None
    assert elastic_pool.pool(configurator, MHATokenToKVPool, None) is elastic_pool.ElasticMHATokenToKVPool


def test_what_requests_ask_for_is_counted_as_sglangs_admission_counts_it(elastic: ModuleType) -> None:
    engine = Engine(elastic)
    kv, waiting = engine.kv, engine.scheduler.waiting_queue
    assert engine.admit(engine.request(list(range(10)), ahead=20))
    assert (kv.asked(), kv.growth(5.5), kv.growth(50.0)) == (0, 6, 20)
    assert kv.arrived() == [(10, 20)] and kv.arrived() == []
    waiting.append(engine.request(list(range(8)), ahead=100_000))
    waiting.append(engine.request(list(range(7)), ahead=3))
    assert kv.asked() == 20 // 2 + (8 + elastic.CLIP_MAX_NEW_TOKENS) + (7 + 3)
    assert kv.arrived() == [(8, elastic.CLIP_MAX_NEW_TOKENS), (7, 3)]
    first, second = waiting
    first.time_stats.wait_queue_entry_time, second.time_stats.wait_queue_entry_time = 3.0, 4.0
    assert kv.short() == (first.rid, 3.0) and kv.waits(first.rid)
    first.sampling_params.max_new_tokens = kv.free - 20 // 2 - 8  # all that is not held back
    assert kv.short() == (second.rid, 4.0), "the one before it waits for a prefill, and not for memory"
    waiting.pop(0)
    assert kv.arrived() == [] and kv.short() is None and not kv.waits(first.rid) and kv.waits(second.rid)


def test_room_is_made_at_the_start_by_whole_rows(elastic: ModuleType) -> None:
    kv = Engine(elastic).kv
    kv.make_room(0)
    assert kv.size == SLOTS
    kv.make_room(9)  # a row has four pages, one for each column
    assert (kv.size, kv.settled) == (5 * ROW - 1, True)
    assert kv.arena.statistics().capacity - kv.arena.statistics().used == 12
    with pytest.raises(Unavailable, match=r"takes 29 pages .*raise engine\.max_total_tokens"):
        kv.make_room(29)
    held = kv.arena.claim("job slot", 9)
    kv.take_room_back()
    assert kv.size == 5 * ROW - 1, "no whole row is free"
    held.resize(4)
    kv.take_room_back()
    assert (kv.size, kv.settled) == (7 * ROW - 1, True)
    held.resize(0)
    kv.take_room_back()
    assert kv.size == SLOTS
    kv.close()
