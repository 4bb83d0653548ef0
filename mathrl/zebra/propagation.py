"""What one clue, or one rule of the game, leaves of the domains that it looks at.

A **domain** is the set of houses in which an item may still be, as the bits of an int: house `h`
is in the set when bit `h` is 1. Each function takes domains and returns the houses that some
assignment of these items supports, no more (it is sound) and no fewer (it is complete for this one
clue). Where nothing is left, every domain comes back as 0.
"""

from collections.abc import Callable
from functools import cache, lru_cache

from mathrl.zebra.clues import HOUSED, ITEMS, SIZES, Kind

Domains = tuple[int, ...]
"""One domain for each item that is looked at."""

_REMEMBERED = 1 << 16  # results kept for each function; at 4 houses there are no more


def narrow(kind: Kind, domains: Domains, houses: int, house: int | None = None) -> Domains:
    """What a clue leaves of the domains of its items.

    Args:
        kind: of the clue.
        domains: of its items, in the clue's order; each not empty.
        houses: how many there are.
        house: the clue's house, for the kinds that name one.

    Returns:
        For each item the houses in which it is in some assignment that makes the clue true and
        puts the others where they may be.

    Raises:
        ValueError: the number of domains is not that of the kind, a domain is empty or has houses
            that do not exist, or `house` is missing, out of range or not wanted.

    >>> [f"{domain:03b}" for domain in narrow("immediate_left", (0b111, 0b111), houses=3)]
    ['011', '110']
    """
    if houses not in SIZES:
        raise ValueError(f"`houses` must be 2 to 6, got {houses}")
    if len(domains) != ITEMS[kind] or not all(0 < domain < 1 << houses for domain in domains):
        raise ValueError(f"`domains` must be {ITEMS[kind]} sets of {houses} houses, got {domains}")
    if (house in range(houses)) if kind in HOUSED else (house is None):
        return narrowing(kind, houses, house)(domains)
    raise ValueError(f"`house` must fit {kind} and {houses} houses, got {house}")


@cache
def narrowing(kind: Kind, houses: int, house: int | None = None) -> Callable[[Domains], Domains]:
    """The function that `narrow` calls, for a solver that calls it many times; nothing is checked.

    >>> narrowing("ends", 4)((0b0111,))
    (1,)
    """
    everywhere = (1 << houses) - 1
    here = 0 if house is None else 1 << house
    rules: dict[Kind, Callable[[Domains], Domains]] = {
        "found_at": lambda d: (d[0] & here,),
        "not_at": lambda d: (d[0] & ~here,),
        "ends": lambda d: (d[0] & (1 | 1 << houses - 1),),
        "same_house": lambda d: (d[0] & d[1], d[0] & d[1]),
        "not_same_house": _different,
        "neighbour": lambda d: (d[0] & (d[1] << 1 | d[1] >> 1), d[1] & (d[0] << 1 | d[0] >> 1)),
        "immediate_left": lambda d: (d[0] & d[1] >> 1, d[1] & d[0] << 1),
        "left_of": lambda d: (d[0] & _below(d[1]), d[1] & everywhere & _above(d[0])),
        "in_between": _between,
    }
    return lru_cache(_REMEMBERED)(rules[kind])


@lru_cache(_REMEMBERED)
def naked(row: Domains) -> Domains:
    """A house that one item is known to be in is no other's of its attribute.

    Args:
        row: the domains of all items of one attribute.

    Returns:
        What is left of them.

    >>> [f"{domain:03b}" for domain in naked((0b001, 0b011, 0b111))]
    ['001', '010', '110']
    """
    taken = twice = 0
    for domain in row:
        if domain & (domain - 1) == 0:
            twice |= taken & domain
            taken |= domain
    if twice:
        return (0,) * len(row)
    return tuple(d if d & (d - 1) == 0 else d & ~taken for d in row)


@lru_cache(_REMEMBERED)
def hidden(row: Domains) -> Domains:
    """A house that only one item of an attribute may be in is where that item is.

    Args:
        row: the domains of all items of one attribute.

    Returns:
        What is left of them.

    >>> [f"{domain:03b}" for domain in hidden((0b011, 0b011, 0b111))]
    ['011', '011', '100']
    """
    once = twice = 0
    for domain in row:
        twice |= once & domain
        once |= domain
    alone = once & ~twice
    left = tuple(d & alone or d for d in row)
    nobody = once != (1 << len(row)) - 1
    if nobody or any(d & alone & (d & alone) - 1 for d in row):  # or one item alone in two houses
        return (0,) * len(row)
    return left


def _below(domain: int) -> int:
    """The houses left of the last one of a domain."""
    return (1 << domain.bit_length() - 1) - 1


def _above(domain: int) -> int:
    """The houses right of the first one of a domain, and all bits beyond the last house."""
    first = domain & -domain
    return ~(first | first - 1)


def _different(d: Domains) -> Domains:
    one, two = d
    left = one & ~two if two & (two - 1) == 0 else one
    return left, two & ~one if one & (one - 1) == 0 else two


def _between(d: Domains) -> Domains:
    middle, one, two = d
    left_to_right, right_to_left = _in_line(one, middle, two), _in_line(two, middle, one)
    return (
        left_to_right[1] | right_to_left[1],
        left_to_right[0] | right_to_left[2],
        left_to_right[2] | right_to_left[0],
    )


def _in_line(first: int, middle: int, last: int) -> Domains:
    """Domains of three items of which each is left of the next."""
    middle &= _above(first) & _below(last)
    if not middle:
        return 0, 0, 0
    return first & _below(middle), middle, last & _above(middle)
