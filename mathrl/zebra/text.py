"""Clues and reasons as sentences, with names instead of numbers and houses from 1."""

from mathrl.zebra.clues import Clue, Item, Kind, Puzzle
from mathrl.zebra.solver import Step, solve

NAMES = (
    ("red", "blue", "green", "white", "yellow", "black"),
    ("dog", "cat", "horse", "fish", "bird", "zebra"),
    ("tea", "milk", "water", "juice", "coffee", "cocoa"),
    ("chess", "tennis", "rowing", "judo", "golf", "polo"),
    ("piano", "violin", "flute", "drums", "harp", "organ"),
    ("rose", "tulip", "lily", "daisy", "iris", "poppy"),
)
"""`NAMES[attribute][value]`: colour, pet, drink, sport, instrument, flower."""

_SENTENCES: dict[Kind, str] = {
    "found_at": "{0} is in house {house}",
    "not_at": "{0} is not in house {house}",
    "same_house": "{0} and {1} are in the same house",
    "not_same_house": "{0} and {1} are in different houses",
    "neighbour": "{0} and {1} are next to each other",
    "ends": "{0} is in the first or the last house",
    "immediate_left": "{0} is just left of {1}",
    "left_of": "{0} is somewhere left of {1}",
    "in_between": "{0} is somewhere between {1} and {2}",
}


def name(item: Item) -> str:
    """The name of an item.

    >>> name((1, 5))
    'zebra'
    """
    attribute, value = item
    return NAMES[attribute][value]


def sentence(clue: Clue) -> str:
    """A clue as a sentence.

    >>> sentence(Clue("found_at", ((0, 2),), 0))
    'green is in house 1'
    """
    house = None if clue.house is None else clue.house + 1
    return _SENTENCES[clue.kind].format(*map(name, clue.items), house=house)


def trace_text(puzzle: Puzzle) -> str:
    """How a puzzle is solved: in each wave, what was excluded and why, and what became known.

    Args:
        puzzle: any, also one that deduction does not finish.

    Returns:
        Lines. Every reason that holds in a wave is shown, also where one would have been enough.

    Raises:
        TypeError: a clue is of another type.
        ValueError: a clue does not fit the size, or the clues contradict each other.

    >>> from mathrl.zebra.clues import Size
    >>> clues = (Clue("found_at", ((0, 1),), 0), Clue("same_house", ((0, 1), (1, 1))))
    >>> print(trace_text(Puzzle(Size(houses=2, attributes=2), clues, ((1, 0), (1, 0)))))
    wave 1
      blue not in 2: blue is in house 1
      known: blue in house 1
    wave 2
      red in 2: hidden single, no other of its kind can be there
      red not in 1: naked single, another of its kind is there
      cat not in 2: blue and cat are in the same house
      known: red in house 2, cat in house 1
    wave 3
      dog in 2: hidden single, no other of its kind can be there
      dog not in 1: naked single, another of its kind is there
      known: dog in house 2
    """
    solved = solve(puzzle.size, puzzle.clues)
    lines: list[str] = []
    for wave in sorted({step.wave for step in solved.steps}):
        lines.append(f"wave {wave}")
        lines += [f"  {_reason(step)}" for step in solved.steps if step.wave == wave]
        known = [
            f"{name((attribute, solved.solution[attribute][house]))} in house {house + 1}"
            for attribute, row in enumerate(solved.waves)
            for house, known_in in enumerate(row)
            if known_in == wave
        ]
        if known:
            lines.append(f"  known: {', '.join(known)}")
    if not solved.complete:
        lines.append("nothing more follows; some cells are unknown")
    return "\n".join(lines)


def _reason(step: Step) -> str:
    item = name(step.item)
    if step.rule == "hidden single":
        house = step.left[0] + 1
        return f"{item} in {house}: hidden single, no other of its kind can be there"
    houses = ", ".join(str(house + 1) for house in step.removed)
    if step.clue is None:
        return f"{item} not in {houses}: naked single, another of its kind is there"
    return f"{item} not in {houses}: {sentence(step.clue)}"
