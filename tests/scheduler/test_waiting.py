"""The waiting queue: who is next."""

from arbi_core.engine.messages import Priority, SubmitMsg
from arbi_core.sampler.params import SamplingParams
from arbi_core.scheduler import Request, Tenants
from arbi_core.scheduler.waiting import WaitingQueue


class Queue:
    def __init__(self):
        self.tenants = Tenants()
        self.queue = WaitingQueue(self.tenants)

    def add(self, name, tenant="", arrival=0.0, priority=None):
        msg = SubmitMsg(
            request_id=name,
            prompt_token_ids=(1,),
            sampling=SamplingParams(),
            tenant=tenant,
            arrival=arrival,
            priority=priority,
        )
        request = Request(msg, base_seed=0, limit=10)
        self.tenants.enter(tenant, arrival).waiting += 1
        self.queue.add(request)
        return request

    def names(self, rank=0, window=64):
        return [r.id for r in self.queue.candidates(rank, window)]


def test_order_is_arrival_then_name():
    q = Queue()
    for name, arrival in [("late", 3.0), ("b", 1.0), ("early", 0.5), ("a", 1.0)]:
        q.add(name, arrival=arrival)
    assert q.names() == ["early", "a", "b", "late"]


def test_one_that_comes_back_stands_where_it_stood():
    q = Queue()
    first = q.add("first", arrival=1.0)
    q.queue.remove(first)
    q.add("second", arrival=2.0)
    q.queue.add(first)
    assert q.names() == ["first", "second"]


def test_classes_are_apart():
    q = Queue()
    q.add("bulk", priority=Priority.BATCH)
    q.add("chat", priority=Priority.INTERACTIVE, arrival=9.0)
    q.add("plain", arrival=10.0)
    assert q.names(0) == ["chat", "plain"]
    assert q.names(1) == ["bulk"]
    assert [r.id for r in q.queue] == ["chat", "plain", "bulk"]


def test_least_served_tenant_is_next_and_each_admission_counts_at_once():
    q = Queue()
    for i in range(3):
        q.add(f"a{i}", "a", arrival=float(i))
        q.add(f"b{i}", "b", arrival=10.0 + i)
    q.tenants.charge(q.tenants.find("a"), 5)
    order = []
    for request in q.queue.candidates(0, 64):
        order.append(request.id)
        q.tenants.charge(q.tenants.find(request.msg.tenant), 4)
    assert order == ["b0", "b1", "a0", "b2", "a1", "a2"], "a 5, b 0: b 4, b 8, a 9, b 12, a 13"


def test_equal_counters_go_by_arrival():
    q = Queue()
    q.add("b", "b", arrival=1.0)
    q.add("a", "a", arrival=2.0)
    assert q.names() == ["b", "a"]


def test_window_bounds_how_many_are_looked_at():
    q = Queue()
    for i in range(5):
        q.add(f"a{i}", "a", arrival=float(i))
        q.add(f"b{i}", "b", arrival=float(i))
    assert q.names(window=3) == ["a0", "b0", "a1"]


def test_nobody_waits_behind_the_requests_of_a_blocked_tenant():
    q = Queue()
    for i in range(5):
        q.add(f"a{i}", "a", arrival=float(i))
    q.add("b", "b", arrival=9.0)
    seen = []
    for request in q.queue.candidates(0, 2):
        seen.append(request.id)
        if request.msg.tenant == "a":
            q.queue.blocked.add("a")
    assert seen == ["a0", "b"]


def test_empty_queues_of_tenants_are_forgotten():
    q = Queue()
    request = q.add("a", "a")
    assert len(q.queue) == 1
    q.queue.remove(request)
    assert len(q.queue) == 0
    assert q.names() == []
    assert q.queue._queues == ({}, {})
