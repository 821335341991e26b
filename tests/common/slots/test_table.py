"""The slot table against a model of it: random operations, every invariant after each."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from titan.common.slots import POLICIES, SlotTable, make_policy

EXPERTS = st.integers(0, 15)


class TableMachine(RuleBasedStateMachine):
    """`mapped` and `reserved` are the model; the table must agree with them after every step."""

    @initialize(capacity=st.integers(1, 8), policy=st.sampled_from(sorted(POLICIES)))
    def start(self, capacity: int, policy: str) -> None:
        self.table = SlotTable(capacity, make_policy(policy, 16))
        self.mapped: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.uses: list[int] = []

    @rule(experts=st.lists(EXPERTS, unique=True, max_size=8))
    def look_up(self, experts: list[int]) -> None:
        hits, misses = self.table.counts.hits, self.table.counts.misses
        missing = self.table.look_up(experts)
        assert missing == [e for e in experts if e not in self.mapped]
        assert self.table.counts.hits - hits == len(experts) - len(missing)
        assert self.table.counts.misses - misses == len(missing)

    @rule(experts=st.lists(EXPERTS, unique=True, min_size=1, max_size=8), keep=st.frozensets(EXPERTS, max_size=6))
    def reserve(self, experts: list[int], keep: frozenset[int]) -> None:
        experts = [e for e in experts if e not in self.mapped and e not in self.reserved]
        free = self.table.capacity - len(self.mapped) - len(self.reserved)
        evictable = [e for e in self.mapped if e not in self.pinned and e not in keep]
        slots = self.table.reserve(experts, keep)
        gone = set(self.mapped) - set(self.table.slots)
        assert gone <= set(evictable)
        for expert in gone:
            del self.mapped[expert]
        if len(experts) > free + len(evictable):
            assert slots is None
        else:
            assert slots is not None
            assert len(gone) == max(0, len(experts) - free), "evicted more than it had to"
            assert not set(slots) & set(self.mapped.values()), "a mapped slot would be written"
            assert not set(slots) & set(self.reserved.values()), "a slot is written twice"
            self.reserved.update(zip(experts, slots, strict=True))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), pin=st.booleans(), prefetched=st.booleans())
    def map(self, data: st.DataObject, pin: bool, prefetched: bool) -> None:
        expert = data.draw(st.sampled_from(sorted(self.reserved)))
        self.table.map(expert, pin=pin, prefetched=prefetched)
        self.mapped[expert] = self.reserved.pop(expert)
        if pin:
            self.pinned.add(expert)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted(self.reserved)))
        self.table.release(expert)
        del self.reserved[expert]

    @precondition(lambda self: self.mapped)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted(self.mapped)))
        self.table.drop(expert)
        del self.mapped[expert]
        self.pinned.discard(expert)

    @precondition(lambda self: self.mapped or self.reserved)
    @rule(data=st.data())
    def reserve_twice(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted({**self.mapped, **self.reserved})))
        with pytest.raises(ValueError, match="slot already"):
            self.table.reserve([expert], ())

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        assert self.table.slots == self.mapped
        assert self.table.pinned == self.pinned
        taken = [*self.mapped.values(), *self.reserved.values()]
        assert len(set(taken)) == len(taken), "two experts in a slot"
        assert all(0 <= slot < self.table.capacity for slot in taken)
        assert set(self.table.reserved) == set(self.reserved)
        counts = self.table.counts
        assert counts.useful <= counts.prefetched <= counts.loads
        assert self.table.evictable_slots == self.table.capacity - len(self.pinned)


TableMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)
TestTable = TableMachine.TestCase


def test_a_table_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        SlotTable(0)
