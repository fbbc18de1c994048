"""Which ranks hang: they are silent, hold on to a broken group, or keep the others waiting."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.survival.member import Member

JOIN_S = 20.0  # how long a process may still try to join a group in which another one died
FREE_S = 10.0  # how long a rank may still wait for others after it was told to let go


def silent(ranks: Sequence[Member], now: float, patience_s: float) -> list[Member]:
    """The ranks that have sent nothing for longer than patience_s."""
    return [rank for rank in ranks if now - rank.heard_at > patience_s]


def holders(ranks: Sequence[Member], since_s: float, patience_s: float) -> list[Member]:
    """The ranks that hold on for too long to a group that broke since_s seconds ago."""
    late: list[Member] = []
    for rank in ranks:
        # torch 2.13: while gloo makes a group, it waits for a lost rank, and closed sockets do not
        # end it
        limit_s = FREE_S if rank.waited_s > FREE_S else patience_s
        if since_s > (limit_s if rank.has_joined else JOIN_S):
            late.append(rank)
    return late


def stuck(ranks: Sequence[Member], now: float, patience_s: float) -> list[Member]:
    """The ranks that the others wait for, if no rank has moved for longer than patience_s.

    If all ranks wait for each other it is the last one, because only new connections may help.
    """
    if any(rank.place != "step" or now - rank.moved_at <= patience_s for rank in ranks):
        return []
    busy = [rank for rank in ranks if rank.waited_s < patience_s / 2]
    return busy or list(ranks[-1:])
