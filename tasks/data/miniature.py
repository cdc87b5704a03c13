"""The miniature: a deterministic HotpotQA-shaped world small enough to learn on two cores.

Invented people, films and places, each with one passage; questions that need two of them:

    bridge      film -> director -> birthplace or birth year;  person -> birthplace -> country
    comparison  which of two people was born first, which of two films came out first
    yes/no      were two people born in the same town, are two films by the same director

Names are two words out of small pools, so surnames, title words and town words are shared by many
entities and a search can return the wrong ones; films also name an actor, so a person's name leads
to films that person did not direct. Comparison and yes/no questions, which a coin answers half of
the time, are 24 % of all.

Train and held-out worlds share words but no entity: each name pair belongs to one split.
Rows have the field layout of `hotpotqa/hotpot_qa` (distractor), so everything downstream is the
same code as for the real data. Everything is a pure function of the split and `SEED`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from tasks.errors import DataError

Split = Literal["train", "held_out"]
SEED = 20_240_917
CONTEXT_PASSAGES = 10

FIRST_NAMES = (
    "Ada Boris Carla Dario Elsa Fedor Greta Hugo Irma Jonas Karin Lars Mara Nils Olga Pavel Rosa "
    "Sven Tilda Ugo Vera Wim Xenia Yann Zora Anton Bella Cyril Doris Emil Frida Gustav"
).split()
SURNAMES = (
    "Abel Brandt Corvin Dahl Ekman Falk Gruber Holm Iversen Jansen Keller Lund Moreau Novak Orlov "
    "Pratt Quill Rossi Sauer Thorne Ulmer Vance Weiss Yorke Zeller Alder Birch Crane Dorn Egger "
    "Frost Grimm"
).split()
ADJECTIVES = (
    "Amber Broken Crimson Distant Empty Frozen Golden Hidden Iron Lonely Midnight Northern Open "
    "Pale Quiet Restless Silent Twisted Velvet Wild Burning Cold Dark Eternal Fallen Gentle Hollow "
    "Last Lucky Painted Red Sacred Second Strange Tender"
).split()
NOUNS = (
    "Anchor Bridge Castle Dream Engine Forest Garden Harbor Island Journey Kingdom Lantern Mirror "
    "Night Ocean Palace River Shadow Tower Valley Winter Bell Circus Desert Echo Fire Gate Hotel "
    "Letter Market Orchard Promise Road Station Theatre"
).split()
TOWN_PREFIXES = "Upper Lower East West Old New Port Fort Mount Saint Great Little".split()
TOWN_STEMS = (
    "Velmora Ardin Besk Calder Drovia Elmar Farrow Gorst Hallen Istra Jorvik Kestrel Lomond Marsk "
    "Norrin Ostrava"
).split()
COUNTRIES = "Estoria Valdonia Merania Karsia Tolland Brescia Ordania Lutania".split()
GENRES = "drama comedy thriller western mystery romance".split()
TRADES = "painter singer sailor teacher".split()
BIRTH_YEARS = tuple(range(1930, 1960))
RELEASE_YEARS = tuple(range(1970, 2000))

QUESTIONS: dict[Split, int] = {"train": 2400, "held_out": 500}
# Entities of a world as a share of all name pairs; the rest stays unused.
SHARE: dict[Split, tuple[float, float]] = {"train": (0.0, 0.7), "held_out": (0.7, 1.0)}


@dataclass(frozen=True, slots=True)
class Town:
    name: str
    country: str


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    town: Town
    year: int
    trade: str


@dataclass(frozen=True, slots=True)
class Film:
    name: str
    director: Person
    actor: Person
    year: int
    genre: str


Entity = Town | Person | Film


def sentences(entity: Entity) -> list[str]:
    """The entity's passage, one string a sentence, spaces kept as HotpotQA keeps them."""
    match entity:
        case Town():
            return [f"{entity.name} is a town in {entity.country}."]
        case Person():
            return [
                f"{entity.name} was born in {entity.town.name} in {entity.year}.",
                f" Before the films came work as a {entity.trade}.",
            ]
        case Film():
            return [
                f"{entity.name} is a {entity.genre} film directed by {entity.director.name}.",
                f" It stars {entity.actor.name} and came out in {entity.year}.",
            ]


def _names(first: Sequence[str], second: Sequence[str], split: Split, salt: str) -> list[str]:
    """This split's share of all pairs, shuffled by the world's seed alone."""
    pairs = [f"{a} {b}" for a in first for b in second]
    random.Random(f"{SEED}-{salt}").shuffle(pairs)
    low, high = SHARE[split]
    return pairs[int(low * len(pairs)) : int(high * len(pairs))]


@dataclass(frozen=True)
class Example:
    """A question with the entities it needs, in the order a searcher meets them.

    rationale: what is to be compared, side by side, and what of it comes first; None where the
        answer stands in a passage.
    """

    question: str
    answer: str
    kind: Literal["bridge", "comparison"]
    gold: tuple[Entity, ...]
    sentence: tuple[int, ...]
    rationale: str | None = None


class World:
    """All entities of one split.

    number: 0 is the world of runs. Others have the same names and other facts: a policy that is
    to learn how to find facts, and not the facts, is shown many of them (the warm start). Two
    thirds of their questions compare, which takes the most demonstrations by far.
    """

    def __init__(self, split: Split, number: int = 0) -> None:
        self.split: Split = split
        self.number = number
        self.seed = f"{SEED}-{split}-{number}"
        rng = random.Random(f"{self.seed}-facts")
        self.towns = [
            Town(name, rng.choice(COUNTRIES))
            for name in _names(TOWN_PREFIXES, TOWN_STEMS, split, "towns")
        ]
        self.people = [
            Person(name, rng.choice(self.towns), rng.choice(BIRTH_YEARS), rng.choice(TRADES))
            for name in _names(FIRST_NAMES, SURNAMES, split, "people")
        ]
        self.films = [self._film(name, rng) for name in _names(ADJECTIVES, NOUNS, split, "films")]

    def _film(self, name: str, rng: random.Random) -> Film:
        director, actor = rng.sample(self.people, 2)
        return Film(name, director, actor, rng.choice(RELEASE_YEARS), rng.choice(GENRES))

    @cached_property
    def by_word(self) -> dict[str, list[Entity]]:
        """Entities by each word of their name: where distractors that look alike come from."""
        found: dict[str, list[Entity]] = {}
        for entity in (*self.towns, *self.people, *self.films):
            for word in entity.name.split():
                found.setdefault(word, []).append(entity)
        return found

    @cached_property
    def neighbours(self) -> dict[str, list[Person]]:
        """People by birthplace, towns with at least two of them."""
        found: dict[str, list[Person]] = {}
        for person in self.people:
            found.setdefault(person.town.name, []).append(person)
        return {town: people for town, people in found.items() if len(people) > 1}

    @cached_property
    def works(self) -> dict[str, list[Film]]:
        """Films by director, directors with at least two of them."""
        found: dict[str, list[Film]] = {}
        for film in self.films:
            found.setdefault(film.director.name, []).append(film)
        return {name: films for name, films in found.items() if len(films) > 1}

    def examples(self) -> Iterator[Example]:
        """Endless distinct examples; the mix of kinds is fixed by position, never by chance."""
        rng = random.Random(f"{self.seed}-questions")
        seen: set[str] = set()
        for kind in itertools.cycle(_MIX if self.number == 0 else _MIX_TO_LEARN_FROM):
            example = _MAKERS[kind](self, rng)
            while example.question in seen:
                example = _MAKERS[kind](self, rng)
            seen.add(example.question)
            yield example


_BRIDGES = ("place", "year", "country")
_EVEN_ODDS = ("born_first", "released_first", "same_town", "same_director")
# 6 of the 25 examples of a round have even odds: 24 %.
_MIX = (*_BRIDGES * 6, "place", *_EVEN_ODDS, *_EVEN_ODDS[:2])
_MIX_TO_LEARN_FROM = (*_BRIDGES * 2, *_EVEN_ODDS * 3)


def _director_place(world: World, rng: random.Random) -> Example:
    film = rng.choice(world.films)
    person = film.director
    question = f"Where was the director of {film.name} born?"
    return Example(question, person.town.name, "bridge", (film, person), (0, 0))


def _director_year(world: World, rng: random.Random) -> Example:
    film = rng.choice(world.films)
    person = film.director
    question = f"In which year was the director of {film.name} born?"
    return Example(question, str(person.year), "bridge", (film, person), (0, 0))


def _birth_country(world: World, rng: random.Random) -> Example:
    person = rng.choice(world.people)
    question = f"In which country was {person.name} born?"
    return Example(question, person.town.country, "bridge", (person, person.town), (0, 0))


def _born_first(world: World, rng: random.Random) -> Example:
    a, b = rng.sample(world.people, 2)
    while a.year == b.year:
        a, b = rng.sample(world.people, 2)
    first = min(a, b, key=lambda person: person.year)
    question = f"Who was born first, {a.name} or {b.name}?"
    return Example(question, first.name, "comparison", (a, b), (0, 0), _years(a, b, first))


def _released_first(world: World, rng: random.Random) -> Example:
    a, b = rng.sample(world.films, 2)
    while a.year == b.year:
        a, b = rng.sample(world.films, 2)
    first = min(a, b, key=lambda film: film.year)
    question = f"Which film came out first, {a.name} or {b.name}?"
    return Example(question, first.name, "comparison", (a, b), (1, 1), _years(a, b, first))


def _years(a: Person | Film, b: Person | Film, first: Person | Film) -> str:
    return f"{a.year} {a.name}, {b.year} {b.name}: {first.year} {first.name}"


def _same_town(world: World, rng: random.Random) -> Example:
    if same := rng.random() < 0.5:
        a, b = rng.sample(world.neighbours[rng.choice(sorted(world.neighbours))], 2)
    else:
        a, b = rng.sample(world.people, 2)
        while a.town == b.town:
            a, b = rng.sample(world.people, 2)
    question = f"Were {a.name} and {b.name} born in the same town?"
    places = f"{a.town.name}, {b.town.name}"
    return Example(question, "yes" if same else "no", "comparison", (a, b), (0, 0), places)


def _same_director(world: World, rng: random.Random) -> Example:
    if same := rng.random() < 0.5:
        a, b = rng.sample(world.works[rng.choice(sorted(world.works))], 2)
    else:
        a, b = rng.sample(world.films, 2)
        while a.director == b.director:
            a, b = rng.sample(world.films, 2)
    question = f"Are {a.name} and {b.name} by the same director?"
    directors = f"{a.director.name}, {b.director.name}"
    return Example(question, "yes" if same else "no", "comparison", (a, b), (0, 0), directors)


_MAKERS = {
    "place": _director_place,
    "year": _director_year,
    "country": _birth_country,
    "born_first": _born_first,
    "released_first": _released_first,
    "same_town": _same_town,
    "same_director": _same_director,
}


def _context(example: Example, world: World, rng: random.Random) -> list[Entity]:
    """Gold passages among look-alikes: entities that share a word with a gold one's name."""
    alike = {
        entity.name: entity
        for gold in example.gold
        for word in gold.name.split()
        for entity in world.by_word[word]
    }
    for gold in example.gold:
        alike.pop(gold.name, None)
    gold = list({entity.name: entity for entity in example.gold}.values())
    wanted = CONTEXT_PASSAGES - len(gold)
    chosen = rng.sample(sorted(alike), min(wanted, len(alike)))
    context = gold + [alike[name] for name in chosen]
    rng.shuffle(context)
    return context


def generate(split: str, number: int = 0) -> list[dict[str, Any]]:
    """The split's questions as HotpotQA rows, distinct questions, always the same.

    Args:
        number: which world of the split, see `World`.

    Raises:
        DataError: there is no such split.
    """
    if split != "train" and split != "held_out":
        raise DataError(f"miniature:{split}: the splits are {', '.join(get_args(Split))}")
    world = World(split, number)
    rng = random.Random(f"{world.seed}-context")
    examples = itertools.islice(world.examples(), QUESTIONS[world.split])
    return [
        _row(f"mini-{split}-{i:05d}", example, _context(example, world, rng))
        for i, example in enumerate(examples)
    ]


def _row(row_id: str, example: Example, context: list[Entity]) -> dict[str, Any]:
    return {
        "id": row_id,
        "question": example.question,
        "answer": example.answer,
        "rationale": example.rationale,
        "type": example.kind,
        "level": "hard",
        "supporting_facts": {
            "title": [entity.name for entity in example.gold],
            "sent_id": list(example.sentence),
        },
        "context": {
            "title": [entity.name for entity in context],
            "sentences": [sentences(entity) for entity in context],
        },
    }
