"""Who is a member, and what their copies hold: by example, and against a model of the protocol."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexray.actors.membership import Membership, buddy_shift, newest_copies
from flexray.actors.seat import Copies, Holding


def membership(nodes, *, target=4, least=1, **keys):
    """Actors 0, 1, … that have started on `nodes`."""
    found = Membership(target, least, **keys)
    for actor, node in enumerate(nodes):
        found.started(actor, node, str(actor))
    return found


def test_ranks_are_numbered_node_by_node_and_gpu_by_gpu():
    found = Membership(4, 1)
    for actor, (node, gpu) in enumerate([("b", "0"), ("a", "10"), ("b", "1"), ("a", "2")]):
        found.started(actor, node, gpu)
    assert found.wanted() == (3, 1, 0, 2)


def test_too_few_are_no_world_and_none_is_due():
    found = membership("aa", least=3)
    assert found.wanted() == () and found.change is None
    found.started(2, "a", "2")
    assert found.wanted() == (0, 1, 2) and found.change == "scale"


def test_a_newcomer_and_a_smaller_target_are_reasons_to_change():
    found = membership("aab", target=3)
    found.formed((0, 1, 2))
    assert found.change is None
    found.target = 2
    # A node of its own is given up before one of a full node.
    assert found.wanted() == (0, 1) and found.change == "scale"
    found.target = 4
    assert found.change is None
    found.started(3, "b", "3")
    assert found.wanted() == (0, 1, 2, 3) and found.change == "scale"


def test_members_stay_before_spares_come_in():
    found = membership("aaaa", target=2)
    found.formed((2, 3))
    assert found.wanted() == (2, 3) and found.change is None


def test_a_draining_node_is_left_when_enough_are_left():
    found = membership("aabb", target=4, least=2)
    found.formed((0, 1, 2, 3))
    found.drain(["b"])
    assert found.wanted() == (0, 1) and found.change == "drain"
    found.least = 3  # rather go on there than wait
    assert found.wanted() == (0, 1, 2, 3) and found.change is None


def test_worlds_are_multiples_of_the_shard_size():
    found = membership("aaaaa", target=5, shard_size=2)
    assert len(found.wanted()) == 4
    for actor in (0, 1, 2, 3):
        found.lost(actor)
    assert found.wanted() == ()


def test_a_lost_member_is_none_any_more():
    found = membership("aaa", target=3)
    found.formed((0, 1, 2))
    found.lost(1)
    assert found.members == (0, 2) and found.alive == (0, 2) and found.change is None


@pytest.mark.parametrize(
    ("nodes", "shift"),
    [("a", 1), ("aaaa", 1), ("aabb", 2), ("abcd", 1), ("aaabbc", 3), ("aaab", 2), ("ab", 1)],
)
def test_a_buddy_is_on_another_node_where_that_can_be(nodes, shift):
    assert buddy_shift(nodes) == shift
    apart = [nodes[r] != nodes[(r + shift) % len(nodes)] for r in range(len(nodes))]
    best = max(
        sum(nodes[r] != nodes[(r + s) % len(nodes)] for r in range(len(nodes)))
        for s in range(1, max(2, len(nodes)))
    )
    assert sum(apart) == best


def test_the_newest_state_that_covers_every_owner():
    held = {
        7: [Holding(1, 5, 0, 5), Holding(1, 6, 0, 6), Holding(1, 5, 1, 5)],
        9: [Holding(1, 5, 1, 5), Holding(1, 6, 1, 6)],
    }
    assert newest_copies(held, {1: 2}, (9, 7)) == Copies(1, 6, 2, 6, ((1,), (0,)))
    held[9].pop()
    assert newest_copies(held, {1: 2}, (9, 7)) == Copies(1, 5, 2, 5, ((1,), (0, 1)))
    assert newest_copies(held, {1: 2}, (9,)) is None
    assert newest_copies({}, {1: 2}, ()) is None


def test_a_later_generation_is_newer_and_may_have_more_owners():
    held = {0: [Holding(1, 5, 0, 5), Holding(2, 5, 0, 5)], 1: [Holding(2, 5, 1, 5)]}
    owners = {1: 1, 2: 2}
    assert newest_copies(held, owners, (0, 1)) == Copies(2, 5, 2, 5, ((0,), (1,)))
    assert newest_copies(held, owners, (0,)) == Copies(1, 5, 1, 5, ((0,),))


class Rank:
    """One process of the model: what of the protocol of snapshots and commit it has done."""

    def __init__(self):
        self.hung = False
        self.kept = set()  # whole copies (generation, step, owner) of the generation before
        self.generation = self.rank = self.done = self.received = 0
        self.entered = False  # the collective of step done + 1
        self.copying = self.arriving = None  # the steps whose copies are being written
        self.own, self.ward = [None, None], [None, None]  # steps, by slot
        self.ward_of = 0

    def join(self, generation, rank, world, shift, step):
        self.generation, self.rank, self.done, self.received = generation, rank, step, step - 1
        self.ward_of = (rank - shift) % world
        self.entered, self.copying, self.arriving = False, None, None
        self.own, self.ward = [None, None], [None, None]
        self.own[step % 2] = step

    def replicated(self, step):
        """Its ward's copy of `step` is here."""
        self.ward[step % 2], self.received = step, step

    @property
    def holdings(self):
        mine = [(self.generation, step, self.rank) for step in self.own if step is not None]
        ward = [(self.generation, step, self.ward_of) for step in self.ward if step is not None]
        return [Holding(g, s, o, s) for g, s, o in {*self.kept, *mine, *ward}]


class Protocol(RuleBasedStateMachine):
    """Ranks that step, copy and die in any order, and a driver that hears of it late."""

    @initialize(world=st.integers(2, 4))
    def begin(self, world):
        self.ids, self.ranks = count(), {}
        self.membership = Membership(world, 1)
        self.generation, self.owners = 0, {}
        self.random = Random(world)
        self.heard = self.committed = 0
        for number in range(world):
            self.start("ab"[number % 2])
        self.form(Copies(0, 0, 0, 0, ()), ())

    def form(self, copies, participants):
        """A new generation. Its forming may break off anywhere; then the next one must come."""
        random = self.random
        self.sources = [[participants[n] for n in holders] for holders in copies.holders]
        members = self.membership.wanted()
        nodes = [self.membership._places[actor][0] for actor in members]
        self.generation += 1
        self.owners[self.generation] = len(members)
        self.is_formed = random.random() < 0.7
        for number, actor in enumerate(members):
            rank = self.ranks[actor]
            if self.is_formed or random.random() < 0.7:
                agreed = (copies.generation, copies.step)
                rank.kept = {
                    (h.generation, h.step, h.owner)
                    for h in rank.holdings
                    if (h.generation, h.step) == agreed
                }
                rank.join(self.generation, number, len(members), buddy_shift(nodes), copies.step)
                if self.is_formed or random.random() < 0.5:
                    rank.replicated(copies.step)
        self.members, self.heard = members, copies.step
        if self.is_formed:
            self.membership.formed(members)
            for actor in set(participants) - set(members):
                self.forget(actor)

    def forget(self, actor):
        self.membership.lost(actor)
        self.ranks.pop(actor, None)

    def alive(self, actor):
        return actor in self.ranks and not self.ranks[actor].hung

    @rule(node=st.sampled_from("abc"))
    def start(self, node):
        actor = next(self.ids)
        self.ranks[actor] = Rank()
        self.membership.started(actor, node, str(actor))

    @rule(size=st.integers(1, 5))
    def scale(self, size):
        self.membership.target = size

    @rule(nodes=st.sets(st.sampled_from("abc"), max_size=2))
    def drain(self, nodes):
        self.membership.drain(nodes)

    def peer(self, number):
        return self.ranks.get(self.members[number])

    @precondition(lambda self: self.is_formed)
    @rule(seed=st.integers(0, 2**32), turns=st.integers(0, 300))
    def advance(self, seed, turns):
        """Ranks do what they can, in any order; some are slower than others."""
        random = self.random = Random(seed)
        moves = (self.receive, self.send, self.enter, self.step, self.copy)
        weights = [random.choice((1, 1, 5)) for _ in self.members]
        for _ in range(turns):
            (actor,) = random.choices(self.members, weights)
            if self.alive(actor):
                random.choice(moves)(self.ranks[actor])

    def receive(self, rank):
        """The ward's next copy begins to arrive: the slot has no tag while it is written."""
        ward, step = self.peer(rank.ward_of), rank.received + 1
        if ward is not None and rank.arriving is None and ward.own[step % 2] == step:
            rank.ward[step % 2], rank.arriving = None, step

    def send(self, rank):
        """And is whole, if its owner still has it."""
        ward, step = self.peer(rank.ward_of), rank.arriving
        if step is not None and ward is not None and ward.own[step % 2] == step:
            rank.ward[step % 2], rank.received, rank.arriving = step, step, None

    def enter(self, rank):
        """Rule 1: its copy is with its buddy, and its ward's with it."""
        buddies = [p for p in map(self.ranks.get, self.members) if p and p.ward_of == rank.rank]
        there = all(p.received >= rank.done for p in buddies) and rank.received >= rank.done
        if not rank.entered and rank.copying is None and (there or len(self.members) == 1):
            rank.entered = True

    def step(self, rank):
        """The collective returns when all have entered; the optimizer steps; rule 2."""
        peers = [self.ranks.get(a) for a in self.members]
        if (
            rank.entered
            and rank.copying is None
            and all(p is not None and (p.entered or p.done > rank.done) for p in peers)
        ):
            rank.kept = set()
            rank.copying = rank.done + 1
            rank.own[rank.copying % 2] = None

    def copy(self, rank):
        """Its own copy is whole."""
        if (step := rank.copying) is not None:
            rank.own[step % 2], rank.done, rank.entered, rank.copying = step, step, False, None

    @precondition(lambda self: self.is_formed)
    @rule()
    def hear(self):
        """All reports of the next step are there: it is done, and the one before committed."""
        peers = [self.ranks.get(a) for a in self.members]
        while all(p is not None and p.done > self.heard for p in peers):
            self.commit(self.heard)
            self.heard += 1

    def commit(self, step):
        if step > self.committed:
            assert step == self.committed + 1  # none is skipped, none counted twice
            self.committed = step

    @rule(data=st.data(), hang=st.booleans())
    def die(self, data, hang):
        if self.ranks:
            actor = data.draw(st.sampled_from(sorted(self.ranks)))
            if hang:
                self.ranks[actor].hung = True
            else:
                del self.ranks[actor]

    @precondition(lambda self: not (self.is_formed and all(map(self.alive, self.members))))
    @rule()
    def recover(self):
        living = [self.ranks[a] for a in self.members if self.alive(a)]
        dead = {n for n, a in enumerate(self.members) if not self.alive(a)}
        if self.is_formed:  # then no rank may have died together with its buddy
            covered = dead <= {rank.ward_of for rank in living}
        else:  # the older generation's copies
            covered = all(any(map(self.alive, holders)) for holders in self.sources)
        begun = max((rank.done + 1 for rank in living), default=0)
        self.go_on(covered, begun)

    @precondition(
        lambda self: (
            self.is_formed
            and self.membership.change is not None
            and all(map(self.alive, self.members))
        )
    )
    @rule()
    def change(self):
        """Planned: everyone settles first."""
        step = max(self.ranks[a].copying or self.ranks[a].done for a in self.members)
        for actor in self.members:
            rank = self.ranks[actor]
            rank.copying = rank.arriving = None
            rank.own[step % 2], rank.done = step, step
            rank.replicated(step)
        for missing in range(self.committed + 1, step + 1):
            self.commit(missing)
        self.go_on(True, step)

    def go_on(self, covered, begun):
        for actor in [a for a in self.membership.alive if not self.alive(a)]:
            self.forget(actor)
        while not self.membership.wanted():
            self.start("c")
        members = self.membership.wanted()
        holdings = {actor: rank.holdings for actor, rank in self.ranks.items()}
        leavers = [a for a, held in holdings.items() if held and a not in members]
        copies = newest_copies(holdings, self.owners, (*members, *leavers))
        if copies is None:
            # No shard is lost while one of each pair lives; before the first commit there is the
            # state that the run began with.
            assert not covered or self.committed == 0
            self.committed = 0  # back to the checkpoint, said aloud
            for rank in self.ranks.values():
                rank.kept, rank.own, rank.ward = set(), [None, None], [None, None]
            copies = Copies(0, 0, 0, 0, ())
        assert copies.step >= self.committed  # committed steps are never lost
        assert not covered or begun - copies.step <= 2  # at most two steps run again
        for step in range(self.committed + 1, copies.step + 1):
            self.commit(step)
        self.form(copies, (*members, *leavers))

    @invariant()
    def one_generation_at_a_time(self):
        if hasattr(self, "members") and self.is_formed:
            living = [self.ranks[a] for a in self.members if a in self.ranks]
            assert {rank.generation for rank in living} <= {self.generation}


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
