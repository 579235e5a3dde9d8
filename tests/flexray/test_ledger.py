"""Every batch is committed once and in order, whatever is undone in between."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from flexray.batches import Batch
from flexray.ledger import Done, Ledger


def batch(step, held_out=False):
    return Batch(step, (step,), (5,), 4, held_out=held_out)


def done(given):
    return Done(SimpleNamespace(batch=given), (), SimpleNamespace(step=given.step))


def test_what_is_not_committed_is_dealt_again():
    ledger = Ledger(iter([batch(1), batch(2), batch(3), batch(4)]))
    first, second, _ = (next(ledger) for _ in range(3))
    ledger.done(done(first))
    ledger.done(done(second))
    assert [d.batch.step for d in ledger.commit(1)] == [1]
    assert (ledger.committed.step, ledger.newest_done, ledger.is_settled) == (1, 2, False)
    assert [b.step for b in ledger.rewind()] == [2, 3, 4]
    assert ledger.newest_done == 1 and ledger.is_settled


def test_a_validation_that_is_written_down_is_not_made_again():
    dealt = [batch(1), batch(1, held_out=True), batch(1, held_out=True), batch(2)]
    ledger = Ledger(iter(dealt))
    for _ in range(4):
        next(ledger)
    ledger.done(done(dealt[0]))
    list(ledger.commit(1))
    assert list(Ledger(iter(())).rewind()) == []
    again = Ledger(iter(dealt))
    for _ in range(4):
        next(again)
    again.done(done(dealt[0]))
    list(again.commit(1))
    assert list(again.rewind()) == dealt[1:]  # it was under way
    ledger.looked_at(dealt[2])
    assert list(ledger.rewind()) == dealt[3:]


def test_a_validation_without_a_label_token_commits_nothing():
    dealt = [batch(1), batch(1, held_out=True), batch(2)]
    ledger = Ledger(iter(dealt))
    for _ in range(3):
        next(ledger)
    ledger.done(done(dealt[0]))
    ledger.looked_at(dealt[1])  # step 1 may still be undone
    assert list(ledger.rewind()) == dealt


@given(
    st.lists(st.tuples(st.sampled_from(["deal", "done", "commit", "rewind"]), st.integers(0, 3)))
)
def test_any_order_of_things(moves):
    """As the driver may do them: ahead of what is done, done before committed, undone at times."""
    steps = [batch(step) for step in range(1, 200)]
    ledger, under_way, committed = Ledger(iter(steps)), [], []
    for move, number in moves:
        if move == "deal":
            under_way.append(next(ledger))
        elif move == "done" and under_way:
            ledger.done(done(under_way.pop(0)))
        elif move == "commit":
            upto = (committed[-1].step if committed else 0) + number
            committed += [d.batch for d in ledger.commit(upto)]
        elif move == "rewind":
            ledger.rewind()
            under_way = []
    assert committed == steps[: len(committed)]
    assert ledger.committed == (committed[-1] if committed else None)
    ledger.rewind()
    assert [next(ledger).step for _ in range(3)] == [
        s.step for s in steps[len(committed) : len(committed) + 3]
    ]
