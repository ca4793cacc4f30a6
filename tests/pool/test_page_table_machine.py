"""Random lives of requests on small pools, against a plain model that also remembers what every slot of memory holds."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from arbi_core.pool import Namespace, PagePool, PageTable, PoolExhausted

NAMESPACES = [Namespace(), Namespace("x"), Namespace("x", "adapter")]
TEXTS = [[0] * 12, [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0], [-1, 0] * 6]
PROMPTS = st.builds(lambda text, n: TEXTS[text][:n], st.integers(0, 2), st.integers(1, 12))


class Node:
    """A cached page of the model: the tokens of the whole prefix that ends with it."""

    def __init__(self, namespace, prefix, used):
        self.namespace, self.prefix, self.used, self.refs = namespace, prefix, used, 1


class Req:
    """A request of the model. `shared` is its path; `private` counts the pages that are only its own."""

    def __init__(self, tokens, namespace, cache, shared):
        self.tokens, self.namespace, self.cache, self.shared = tokens, namespace, cache, shared
        self.length = self.private = 0


class PageTableMachine(RuleBasedStateMachine):
    @initialize(usable=st.sampled_from([9, 6, 4, 2, 1]), size=st.integers(1, 3))
    def begin(self, usable, size):
        self.table = PageTable(PagePool(usable + 1, size))
        self.usable, self.size = usable, size
        self.live, self.cached, self.seen, self.memory = {}, {}, set(), {}
        self.evictions = self.queries = self.hits = self.clock = 0
        self.names = (f"r{i}" for i in itertools.count())

    # -- the model --------------------------------------------------------------------------------------------------

    def match(self, tokens, namespace, limit):
        path = []
        for end in range(self.size, min(len(tokens), limit) + 1, self.size):
            node = self.cached.get((namespace, tuple(tokens[:end])))
            if node is None:
                break
            path.append(node)
        return path

    @property
    def idle(self):
        return [n for n in self.cached.values() if n.refs == 0]

    @property
    def free(self):
        held = {n for r in self.live.values() for n in r.shared}
        return self.usable - len(held | set(self.cached.values())) - sum(r.private for r in self.live.values())

    def evict(self):
        parents = {(n.namespace, n.prefix[: -self.size]) for n in self.cached.values()}
        leaves = [n for n in self.idle if (n.namespace, n.prefix) not in parents]
        victim = min(leaves, key=lambda n: n.used)
        del self.cached[victim.namespace, victim.prefix]
        self.evictions += 1

    def publish(self, request):
        """What a commit does: full written pages become nodes; equal ones that exist are referenced, not taken."""
        if not request.cache:
            return
        for end in range((len(request.shared) + 1) * self.size, request.length + 1, self.size):
            key = (request.namespace, tuple(request.tokens[:end]))
            self.seen.add(key)
            if key in self.cached:
                self.cached[key].refs += 1
            else:
                self.cached[key] = Node(*key, self.clock)
                request.private -= 1
            request.shared.append(self.cached[key])

    # -- rules --------------------------------------------------------------------------------------------------------

    @rule(tokens=PROMPTS, namespace=st.sampled_from(NAMESPACES), cache=st.booleans(), spare=st.integers(0, 2))
    def add(self, tokens, namespace, cache, spare):
        self.admit(tokens, namespace, cache, spare)

    def admit(self, tokens, namespace, cache, spare):
        name, limit = next(self.names), len(tokens) - spare
        path = self.match(tokens, namespace, limit) if cache else []
        for node in path:
            node.refs += 1
        matched = self.table.add(name, tokens, namespace=namespace, cache_enabled=cache, max_match=limit)
        assert matched == len(path) * self.size
        self.live[name] = request = Req(list(tokens), namespace, cache, path)
        request.length = matched
        self.queries += cache
        self.hits += bool(path)
        return name

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n=st.integers(0, 5))
    def decode(self, data, n):
        """Extend by a few tokens: a chunk of the prompt, or generated ones."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        tokens = self.live[name].tokens
        while len(tokens) < self.live[name].length + n:
            tokens.append(data.draw(st.sampled_from([0, 1])))
        self.extend(name, n)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def prefill(self, data):
        """Extend to the end of the prompt and publish."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live[name]
        self.extend(name, max(0, len(request.tokens) - request.length))
        self.publish(request)
        self.table.commit(name, request.tokens)

    @rule(tokens=PROMPTS, namespace=st.sampled_from(NAMESPACES))
    def whole_life(self, tokens, namespace):
        """A short request from admission to its end; leaves pages behind or fails for lack of them."""
        name = self.admit(tokens, namespace, cache=True, spare=1)
        request = self.live[name]
        self.extend(name, len(tokens) - request.length)
        self.end(name, keep=True)

    def extend(self, name, n):
        request = self.live[name]
        held = len(self.table.pages(name))
        need = max(0, -(-(request.length + n) // self.size) - held)
        assert self.table.pages_needed(name, n) == need
        if need > self.free + len(self.idle):
            with pytest.raises(PoolExhausted):
                self.table.extend(name, n)
            return
        while self.free < need:
            self.evict()
        new = self.table.extend(name, n)
        request.private += need
        assert len(new) == need
        assert list(self.table.pages(name))[held:] == list(new)
        for at in range(request.length, request.length + n):
            slot = (self.table.pages(name)[at // self.size], at % self.size)
            self.memory[slot] = (request.namespace, tuple(request.tokens[: at + 1]))
        request.length += n

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.publish(self.live[name])
        self.table.commit(name, self.live[name].tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data, keep):
        self.end(data.draw(st.sampled_from(sorted(self.live))), keep)

    def end(self, name, keep):
        request = self.live[name]
        if keep:
            self.publish(request)
        self.table.release(name, request.tokens if keep else None)
        del self.live[name]
        self.clock += 1
        for node in request.shared:
            node.refs -= 1
            node.used = self.clock

    @rule(tenant=st.sampled_from(["", "x", None]))
    def flush(self, tenant):
        gone = [n for n in self.cached.values() if tenant in (None, n.namespace.tenant)]
        assert self.table.flush(tenant) == sum(n.refs == 0 for n in gone)
        for node in gone:
            del self.cached[node.namespace, node.prefix]
        for request in self.live.values():
            request.cache &= tenant not in (None, request.namespace.tenant)

    @rule(tokens=PROMPTS, namespace=st.sampled_from(NAMESPACES))
    def peek(self, tokens, namespace):
        limit = len(tokens) - 1
        assert self.table.peek(tokens, namespace, limit) == len(self.match(tokens, namespace, limit)) * self.size

    # -- invariants -----------------------------------------------------------------------------------------------------

    @invariant()
    def table_is_sound(self):
        self.table.check()

    @invariant()
    def counts_are_the_models(self):
        table = self.table
        assert (table.pool.available, table.cached_pages) == (self.free, len(self.idle))
        assert table.available == self.free + len(self.idle)
        assert (table.queries, table.hits, table.evictions) == (self.queries, self.hits, self.evictions)

    @invariant()
    def exactly_the_models_prefixes_are_cached(self):
        for namespace, prefix in self.seen:
            found = len(self.match(prefix, namespace, len(prefix))) * self.size
            assert self.table.peek(prefix, namespace) == found

    @invariant()
    def every_request_reads_what_was_computed_for_its_own_prefix(self):
        for name, request in self.live.items():
            assert self.table.length(name) == request.length
            assert self.table.namespace(name) == request.namespace
            for at in range(request.length):
                slot = (self.table.pages(name)[at // self.size], at % self.size)
                assert self.memory[slot] == (request.namespace, tuple(request.tokens[: at + 1]))

    @invariant()
    def no_page_that_may_be_written_is_anybody_elses(self):
        owners = {}
        for name in self.live:
            for page in self.table.pages(name):
                owners.setdefault(page, set()).add(name)
        for name, request in self.live.items():
            for page in self.table.pages(name)[request.length // self.size :]:
                assert owners[page] == {name}

    def teardown(self):
        if hasattr(self, "live"):
            for name in self.live:
                self.table.release(name)
            self.table.flush()
            self.table.check()
            assert self.table.pool.available == self.usable


PageTableMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPageTableMachine = PageTableMachine.TestCase
