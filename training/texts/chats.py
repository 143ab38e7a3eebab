"""Little conversations, so that the shipped model learns to answer."""

import random
from collections.abc import Callable
from typing import TypedDict

from training.texts import facts
from training.texts.phrases import an, choose, one_of, render
from training.texts.sketches import repetition
from training.texts.stories import Tale, tale
from training.texts.words import KINDS, PLACES, THINGS

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "You tell little stories.",
    "You are a small language model. Be kind and brief.",
)
SYSTEM_SHARE = 0.25
FOLLOW_UP_SHARE = 0.2
STORY_SHARE = 0.4
CARELESS_SHARE = 0.1


class Message(TypedDict):
    """One message of a conversation, in the form that chat templates expect."""

    role: str
    content: str


def chat(rng: random.Random) -> list[Message]:
    """Returns a conversation: perhaps a system prompt, then one to three questions with answers."""
    messages: list[Message] = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": one_of(rng, SYSTEM_PROMPTS)})
    while True:
        question, answer = exchange(rng)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
        if len(messages) > 5 or rng.random() >= FOLLOW_UP_SHARE:
            return messages


def exchange(rng: random.Random) -> tuple[str, str]:
    """Returns a question and its answer."""
    if rng.random() < STORY_SHARE:
        question, answer = story_exchange(rng)
    else:
        question, answer = short_exchange(rng)
    if rng.random() < CARELESS_SHARE:
        question = question[0].lower() + question[1:].rstrip(".?!")
    return question, answer


def short_exchange(rng: random.Random) -> tuple[str, str]:
    """Returns a question, and an answer of one or two sentences."""
    return TOPICS[rng.randrange(len(TOPICS))](rng)


def story_exchange(rng: random.Random) -> tuple[str, str]:
    """Returns a request for a story, and a story about the requested subject."""
    told = tale(rng)
    verb = choose(
        rng,
        "[Tell me|Tell me|Tell me|Can you tell me|Please tell me|Write|Write me|Please write|Could "
        "you write|I would like to hear|Make up|Give me]",
    )
    size = choose(rng, "[a|a|a|a short|a little|a bedtime|a nice]")
    end = "?" if verb.startswith(("Can", "Could")) else choose(rng, "[.|.|.|!||]")
    return f"{verb} {size} story{one_of(rng, _subjects(told))}{end}", told.text


def _subjects(told: Tale) -> tuple[str, ...]:
    hero, friend, thing, place = told.hero, told.friend, told.thing, told.place
    # The request names only things in the story. Otherwise the model would learn to ignore it.
    subjects = [
        "",
        f" about {hero.a}",
        f" about {hero.an_old}",
        f" about {hero.a} named {hero.name}",
    ]
    subjects += [f" about {told.plot.topic}", f" about {hero.a} and {told.plot.topic}"]
    subjects.append(f" about {hero.name} the {hero.kind}")
    if thing.name in told.text:
        subjects += 3 * [f" about {hero.a} and {thing.a}", f" with {hero.a} and {thing.a}"]
        subjects += [f" about {thing.a}", f" about {thing.a_red}"]
    if friend.kind in told.text:
        subjects += 2 * [f" about {hero.a} and {friend.a}", f" about {friend.a} and {hero.a}"]
    if place.look in told.text and place.name in told.text:
        subjects += [f" about {hero.a} {place.in_a}", f" that happens {place.in_a}"]
    return tuple(subjects)


def greeting(rng: random.Random) -> tuple[str, str]:
    """Returns a greeting, or a question about the model, with the answer."""
    question, answer = facts.GREETINGS[rng.randrange(len(facts.GREETINGS))]
    return choose(rng, f"[{question}]"), choose(rng, answer).strip()


def definition(rng: random.Random) -> tuple[str, str]:
    """Returns a question about a word, and a definition."""
    nouns = (KINDS, THINGS, PLACES)[rng.randrange(3)]
    noun = nouns[rng.randrange(len(nouns))]
    name = an(noun.name)
    question = choose(rng, f"[What is {name}?|What is {name}?|Do you know what {name} is?]")
    return question, f"{name[0].upper()}{name[1:]} is {noun.about}."


def small_fact(rng: random.Random) -> tuple[str, str]:
    """Returns a question with one right answer: capitals, sounds, colors, sums, days, seasons."""
    topic = rng.randrange(6)
    if topic == 0:
        country = one_of(rng, tuple(facts.CAPITALS))
        return f"What is the capital of {country}?", _capital(country)
    if topic == 1:
        animal = one_of(rng, tuple(facts.SOUNDS))
        return f"What sound does {an(animal)} make?", _sound(animal)
    if topic == 2:
        what = one_of(rng, tuple(facts.COLORS))
        return f"What color is {what}?", _color(what)
    if topic == 3:
        left, right = rng.randrange(10), rng.randrange(10)
        question = choose(rng, f"What is {left} [plus|+] {right}?")
        return question, f"{left} plus {right} is {left + right}."
    if topic == 4:
        day = rng.randrange(7)
        return f"What day comes after {facts.DAYS[day]}?", (
            f"The day after {facts.DAYS[day]} is {facts.DAYS[(day + 1) % 7]}."
        )
    season = one_of(rng, tuple(facts.SEASONS))
    return choose(rng, f"What [is|happens in] {season}?"), _season(season)


def poem(rng: random.Random) -> tuple[str, str]:
    """Returns a request for a poem, and a short poem about an animal, a thing or a place."""
    kind, thing = KINDS[rng.randrange(27)].name, THINGS[rng.randrange(len(THINGS))].name
    place = PLACES[rng.randrange(len(PLACES))]
    fields = {
        "a_kind": an(kind),
        "thing": thing,
        "place": place.name,
        "look": one_of(rng, place.looks),
    }
    is_haiku = rng.random() < 0.35
    template = one_of(rng, facts.HAIKU if is_haiku else facts.POEMS)
    form = "haiku" if is_haiku else choose(rng, "[poem|short poem]")
    # A poem whose lines name no thing cannot be about a thing.
    subjects = [an(kind), f"the {place.name}"] + [an(thing)] * ("{thing}" in template)
    verb = choose(rng, "[Write|Write me|Tell me|Can you write]")
    end = "?" if verb.startswith("Can") else "."
    return f"{verb} a {form} about {one_of(rng, subjects)}{end}", render(rng, template, fields)


def unknown(rng: random.Random) -> tuple[str, str]:
    """Returns a question that is too hard, and a modest answer."""
    topic = one_of(rng, facts.UNKNOWN)
    question = choose(
        rng,
        f"[Explain {topic}.|Can you explain {topic}?|What do you know about {topic}?|Tell me about "
        f"{topic}.|Explain {topic} in simple words.|How does {topic} work?|What is {topic}?|Write "
        f"an essay about {topic}.|Why is {topic} important?]",
    )
    return question, choose(
        rng,
        f"I am a very small model, and I do not know much about {topic}. [Would you like to hear a "
        "story instead?|But I can tell you a story!|Shall I tell you a story?]",
    )


def suggestion(rng: random.Random) -> tuple[str, str]:
    """Returns a request for ideas, and an answer that suggests a story."""
    kind, thing = KINDS[rng.randrange(len(KINDS))].name, THINGS[rng.randrange(len(THINGS))].name
    question = choose(
        rng, "[What should I ask you?|Any ideas?|What story do you know?|What shall we talk about?]"
    )
    return question, choose(
        rng, f"[Ask me for|How about|Let us try] a story about {an(kind)} and {an(thing)}."
    )


TOPICS = (
    greeting,
    definition,
    definition,
    small_fact,
    small_fact,
    poem,
    unknown,
    suggestion,
    repetition,
)


def statements(rng: random.Random) -> str:
    """Returns plain text: some facts one after the other, or a character's introduction."""
    if rng.random() < 0.5:
        return _introduction(rng)
    make = STATEMENTS[rng.randrange(len(STATEMENTS))]
    return " ".join(dict.fromkeys(make(rng) for _ in range(rng.randrange(2, 6))))


def _introduction(rng: random.Random) -> str:
    hero = tale(rng)
    trait, thing, place = hero.hero.trait, hero.thing, hero.place
    return render(
        rng,
        f"[Hello, my|Hello! My|My] name is {hero.hero.name}, and I am {hero.hero.an_old}. I live "
        f"{place.in_a}. [People say that I am {trait}.|I am very {trait}.|] [I have {thing.a_red}, "
        f"and I take it everywhere.|My favorite thing is my {thing.red}.] [My best friend is "
        f"{hero.friend.name}, {hero.friend.an_old}.|] [In the [morning|evening], I like to look "
        f"[at the sky|out of the window].|One day I will see the sea.] [I am happy here.|Come and "
        f"visit me!|What is your name?]",
        {},
    )


def _capital(country: str) -> str:
    return f"The capital of {country} is {facts.CAPITALS[country]}."


def _sound(animal: str) -> str:
    name = an(animal)
    return f"{name[0].upper()}{name[1:]} says {facts.SOUNDS[animal]}."


def _color(what: str) -> str:
    return f"{what[0].upper()}{what[1:]} is {facts.COLORS[what]}."


def _season(season: str) -> str:
    return f"In {season}, {facts.SEASONS[season]}."


STATEMENTS: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: _capital(one_of(rng, tuple(facts.CAPITALS))),
    lambda rng: _color(one_of(rng, tuple(facts.COLORS))),
    lambda rng: _season(one_of(rng, tuple(facts.SEASONS))),
    lambda rng: definition(rng)[1],
)
