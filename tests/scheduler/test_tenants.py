"""Tenants: who has been served what, who may start, and what the limits say."""

import numpy as np
import pytest

from arbi_core.engine.messages import Priority
from arbi_core.errors import ConfigError
from arbi_core.scheduler.tenants import OUTPUT_COST, TenantLimits, Tenants, parse_tenant_limits


def active(tenants, name, now=0.0):
    tenant = tenants.enter(name, now)
    tenant.waiting += 1
    return tenant


def test_weight_divides_what_is_charged():
    tenants = Tenants({"big": TenantLimits(weight=4.0)})
    big, small = active(tenants, "big"), active(tenants, "small")
    tenants.charge(big, 100)
    tenants.charge(small, 100)
    assert (big.counter, small.counter) == (25.0, 100.0)


def test_generated_tokens_cost_twice_a_prompt_token():
    tenants = Tenants()
    a, b = active(tenants, "a"), active(tenants, "b")
    tenants.charge_decode(np.array([a.index, b.index, b.index]))
    assert OUTPUT_COST == 2.0
    assert (a.counter, b.counter) == (2.0, 4.0)
    assert (a.level, b.level) == (-1.0, -2.0), "a rate counts tokens, not their cost"


def test_lone_tenant_is_charged_for_every_row():
    tenants = Tenants()
    a = active(tenants, "a")
    tenants.charge_decode(np.array([0, 0, 0]))
    assert a.counter == 6.0


def test_newcomer_starts_level_with_the_least_served():
    tenants = Tenants()
    a, b = active(tenants, "a"), active(tenants, "b")
    tenants.charge(a, 70)
    tenants.charge(b, 40)
    assert tenants.enter("new", 0.0).counter == 40.0


def test_silence_saves_up_no_credit():
    tenants = Tenants()
    quiet, busy = active(tenants, "quiet"), active(tenants, "busy")
    quiet.waiting = 0
    tenants.charge(busy, 500)
    assert tenants.enter("quiet", 1.0).counter == 500.0


def test_leaving_and_coming_back_forgives_nothing():
    tenants = Tenants()
    greedy, modest = active(tenants, "greedy"), active(tenants, "modest")
    tenants.charge(greedy, 500)
    tenants.charge(modest, 10)
    greedy.waiting = 0
    tenants.leave(greedy)
    assert tenants.enter("greedy", 1.0).counter == 500.0


def test_tenant_is_forgotten_once_nobody_was_served_less():
    tenants = Tenants()
    greedy, modest = active(tenants, "greedy"), active(tenants, "modest")
    tenants.charge(greedy, 500)
    greedy.waiting = modest.waiting = 0
    tenants.leave(greedy)
    assert tenants.find("greedy") is None
    tenants.leave(modest)
    assert list(tenants) == []


def test_index_of_a_forgotten_tenant_is_used_again():
    tenants = Tenants()
    first = active(tenants, "first")
    first.waiting = 0
    tenants.leave(first)
    second, third = active(tenants, "second"), active(tenants, "third")
    assert (second.index, third.index) == (0, 1)
    tenants.charge_decode(np.array([0, 1, 1]))
    assert (second.counter, third.counter) == (2.0, 4.0)


def test_busy_tenant_is_never_forgotten():
    tenants = Tenants()
    tenant = active(tenants, "a")
    tenants.leave(tenant)
    tenants.sweep(5.0)
    assert tenants.find("a") is tenant


def test_rate_allows_one_second_at_once_and_then_waits_for_its_average():
    tenants = Tenants({"a": TenantLimits(tokens_per_second=10.0)})
    a = active(tenants, "a", now=100.0)
    assert a.may_start(100.0)
    tenants.charge(a, 25)
    assert not a.may_start(100.0)
    assert a.next_start(100.0) == pytest.approx(101.501)
    assert not a.may_start(101.5)
    assert a.may_start(101.501)
    a.refill(1000.0)
    assert a.level == 10.0, "the bucket holds one second's worth"
    assert a.next_start(1000.0) is None


def test_debt_outlives_the_last_request():
    tenants = Tenants({"a": TenantLimits(tokens_per_second=10.0)})
    a = active(tenants, "a")
    tenants.charge(a, 30)
    a.waiting = 0
    tenants.leave(a)
    assert tenants.enter("a", 1.0).level == -20.0
    tenants.sweep(1.0)
    assert tenants.find("a") is a
    tenants.sweep(3.5)
    assert tenants.find("a") is None


def test_max_running_bounds_what_runs():
    tenants = Tenants({"*": TenantLimits(max_running=2)})
    a = active(tenants, "a")
    a.running = 1
    assert a.may_start(0.0)
    a.running = 2
    assert not a.may_start(0.0)
    assert a.next_start(0.0) is None, "time alone changes nothing"


def test_star_is_for_tenants_that_are_not_named():
    tenants = Tenants({"*": TenantLimits(max_running=1), "a": TenantLimits(weight=2.0)})
    assert tenants.limits("other").max_running == 1
    assert tenants.limits("a").max_running is None
    assert tenants.find("*") is None


def test_limits_are_read_from_text():
    parsed = parse_tenant_limits(["a:weight=2:max_running=8", "http://b:tokens_per_second=1.5:priority=batch"])
    assert parsed == {
        "a": TenantLimits(weight=2.0, max_running=8),
        "http://b": TenantLimits(tokens_per_second=1.5, priority=Priority.BATCH),
    }


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("a", "is no NAME:key=value"),
        (":weight=2", "is no NAME:key=value"),
        ("a:weight", "is no NAME:key=value"),
        ("a:weight=2:extra", "'extra' of .* is no limit"),
        ("a:colour=2", "'colour=2' of .* is no limit"),
        ("a:weight=x", "'x' is no value for weight"),
        ("a:max_running=1.5", "'1.5' is no value for max_running"),
        ("a:priority=high", "'high' is no value for priority"),
        ("a:weight=0", "weight must be greater than 0"),
        ("a:max_waiting=-1", "max_waiting must be greater than 0"),
        ("a:tokens_per_second=inf", "tokens_per_second must be greater than 0"),
        ("a:weight=nan", "weight must be greater than 0"),
    ],
)
def test_bad_limits_are_refused_by_name(entry, says):
    with pytest.raises(ConfigError, match=says):
        parse_tenant_limits([entry])


@pytest.mark.parametrize("entries", [["a:weight=1:weight=2"], ["a:weight=1", "a:max_running=2"]])
def test_a_limit_or_a_tenant_that_is_named_twice_is_refused(entries):
    with pytest.raises(ConfigError, match="twice"):
        parse_tenant_limits(entries)
