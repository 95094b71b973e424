"""The built-in corpus: short plain English stories of a small grammar, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from .permutation import mix

_STORIES: Final = 96
_SEED: Final = 2024

_PEOPLE: Final = ("Mara", "Tom", "Lena", "Oskar", "Ida", "Ben", "Nora", "Paul", "Rosa", "Finn", "Hana", "Wei")
_PLACES: Final = {
    "the harbour": ("a rope", "a lantern", "a net full of fish", "a small blue boat"),
    "the forest": ("a pine cone", "a basket of mushrooms", "an owl feather", "a fallen branch"),
    "the market": ("a loaf of bread", "a bag of red apples", "a clay pot", "a piece of cheese"),
    "the mill": ("a sack of flour", "a wooden wheel", "a sleepy cat", "a broken ladder"),
    "the old bridge": ("a silver coin", "a flat stone", "a letter without a name", "a lost glove"),
    "the hill": ("a bunch of clover", "a kite", "a ram with one horn", "a ring of white stones"),
    "the library": ("a map of the valley", "a book about stars", "a brass key", "a pair of glasses"),
    "the garden": ("a row of beans", "a snail", "a watering can", "a ripe yellow pear"),
}
_WEATHER: Final = ("It was raining", "The sun was shining", "There was snow on the roofs", "A cold wind was blowing")
_TIMES: Final = ("One morning", "In the afternoon", "On the first day of spring", "Late in the evening", "After school")
_MOODS: Final = {
    "glad": ("smiled", "sang a song all the way", "thanked everyone twice"),
    "tired": ("sat down on a bench", "yawned", "wanted nothing but a bed"),
    "curious": ("asked one question after another", "looked closer", "drew a picture of it"),
    "worried": ("counted the coins again", "spoke in a low voice", "looked back many times"),
}
_WISHES: Final = ("keep it", "sell it", "give it away", "hide it under the stairs", "show it to the teacher")
_ANSWERS: Final = (
    "That is a good idea",
    "I would not do that",
    "Let us wait until tomorrow",
    "We should ask somebody who knows",
    "Only if you tell me why",
)
_ENDS: Final = (
    "They shared their supper and were friends from then on.",
    "Nobody spoke about it for a year.",
    "The next day everything was as it had been before.",
    "It is still there, if you know where to look.",
    "That night they both slept well.",
)


@dataclass(slots=True)
class _Dice:
    """Our own: the sequences of `random` are not promised between versions of Python."""

    state: int = field(default=_SEED)

    def pick(self, options: tuple[str, ...]) -> str:
        self.state += 1
        return options[mix(self.state) % len(options)]


def demo_documents() -> Iterator[str]:
    """Documents of the corpus, some 40 kB of ASCII in all."""
    dice = _Dice()
    for _ in range(_STORIES):
        yield _story(dice)


def _story(dice: _Dice) -> str:
    hero = dice.pick(_PEOPLE)
    friend = dice.pick(tuple(name for name in _PEOPLE if name != hero))
    place = dice.pick(tuple(_PLACES))
    thing = dice.pick(_PLACES[place])
    mood = dice.pick(tuple(_MOODS))
    wish, other = dice.pick(_WISHES), dice.pick(_WISHES)
    lines = [
        f"{dice.pick(_TIMES)} {hero} walked to {place}. {dice.pick(_WEATHER)}, and {hero} was {mood}.",
        f"At {place} there was {thing}. {hero} {dice.pick(_MOODS[mood])}.",
        f'Then {friend} came along. "What will you do with it?" asked {friend}. "I will {wish}," said {hero}.',
        f'"{dice.pick(_ANSWERS)}," said {friend}.',
    ]
    if other != wish:
        lines.append(f"In the end {hero} did not {wish}, for {friend} knew better: it is wiser to {other}.")
    return "\n".join([*lines, dice.pick(_ENDS)]) + "\n"
