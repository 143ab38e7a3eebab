"""The nouns of the stories: characters, things that they can own, and places."""

import random
from dataclasses import dataclass

from training.texts.phrases import an, choose, listed, one_of


@dataclass(frozen=True)
class Kind:
    """A kind of character: an animal or a trade."""

    name: str
    ages: tuple[str, ...]
    about: str
    """Ends the sentence "A fox is ..."."""
    she: bool | None = None
    """Whether a character of this kind is female; None if the kind does not decide this."""


@dataclass(frozen=True)
class Trait:
    """A trait of a character, and a habit that shows it."""

    name: str
    habit: str
    """Follows "he" or "she", in the past tense."""


@dataclass(frozen=True)
class Character:
    """A character of a story, with the fields that templates use."""

    kind: str
    age: str
    name: str
    she: bool
    trait: str
    habit: str

    @property
    def he(self) -> str:
        return "she" if self.she else "he"

    @property
    def him(self) -> str:
        return "her" if self.she else "him"

    @property
    def his(self) -> str:
        return "her" if self.she else "his"

    @property
    def himself(self) -> str:
        return "herself" if self.she else "himself"

    @property
    def the(self) -> str:
        return f"the {self.kind}"

    @property
    def the_old(self) -> str:
        return f"the {self.age} {self.kind}"

    @property
    def a(self) -> str:
        return an(self.kind)

    @property
    def an_old(self) -> str:
        return an(f"{self.age} {self.kind}")

    @property
    def a_kind(self) -> str:
        return an(f"{self.trait} {self.kind}")


@dataclass(frozen=True)
class Thing:
    """A thing that a character can own, lose, find, give and break."""

    name: str
    looks: tuple[str, ...]
    about: str
    """Ends the sentence "A lantern is ..."."""


@dataclass(frozen=True)
class Item:
    """A certain thing in a story. Its `look`, such as ``red``, is the same in the whole story."""

    name: str
    look: str

    @property
    def a(self) -> str:
        return an(self.name)

    @property
    def the(self) -> str:
        return f"the {self.name}"

    @property
    def a_red(self) -> str:
        return an(f"{self.look} {self.name}")

    @property
    def red(self) -> str:
        return f"{self.look} {self.name}"


@dataclass(frozen=True)
class Place:
    """A kind of place in which a story happens."""

    name: str
    preposition: str
    looks: tuple[str, ...]
    about: str
    """Ends the sentence "A harbor is ..."."""


@dataclass(frozen=True)
class Scene:
    """A certain place in a story. Its `look` (an adjective) is the same in the whole story."""

    name: str
    preposition: str
    look: str

    @property
    def in_a(self) -> str:
        return f"{self.preposition} {an(f'{self.look} {self.name}')}"

    @property
    def in_the(self) -> str:
        return f"{self.preposition} the {self.name}"

    @property
    def the(self) -> str:
        return f"the {self.name}"

    @property
    def a(self) -> str:
        return an(f"{self.look} {self.name}")


_YOUNG = ("little", "young", "small")
_ANY = ("little", "young", "old", "small")
_GROWN = ("old", "young", "busy", "tired")

KINDS = (
    Kind("fox", _ANY, "a clever animal with red fur and a long, soft tail"),
    Kind("rabbit", _ANY, "a small animal with long ears that likes to eat carrots and clover"),
    Kind("bear", _ANY, "a big, strong animal that loves honey and sleeps all winter"),
    Kind("mouse", _YOUNG, "a tiny animal with round ears and a thin tail"),
    Kind("owl", _ANY, "a bird with large eyes that flies at night"),
    Kind("hedgehog", _ANY, "a small animal with hundreds of spines on its back"),
    Kind("squirrel", _ANY, "a quick animal that lives in trees and hides nuts for the winter"),
    Kind("otter", _ANY, "a playful animal that swims in rivers and catches fish"),
    Kind("badger", _ANY, "an animal with a striped face that digs long tunnels"),
    Kind("deer", _YOUNG, "a shy animal of the forest that runs very fast"),
    Kind("frog", _ANY, "a green animal that jumps, swims and sings in the evening"),
    Kind("turtle", _ANY, "a slow animal that carries its house on its back"),
    Kind("duck", _ANY, "a bird that swims on ponds and rivers"),
    Kind("cat", _ANY, "a soft animal that purrs when it is happy"),
    Kind("dog", _ANY, "a loyal animal that lives with people and wags its tail"),
    Kind("goat", _ANY, "an animal with horns that climbs on steep rocks"),
    Kind("wolf", _ANY, "a wild animal that looks like a large dog and lives in a pack"),
    Kind("crow", _ANY, "a clever black bird that likes shiny things"),
    Kind("sparrow", _YOUNG, "a small brown bird that sings in gardens"),
    Kind("elephant", _ANY, "a very large animal with a long trunk and big ears"),
    Kind("lion", _ANY, "a big cat that lives in warm countries and roars"),
    Kind("monkey", _ANY, "an animal that climbs trees and likes to eat fruit"),
    Kind("penguin", _ANY, "a black and white bird that cannot fly but swims very well"),
    Kind("snail", _YOUNG, "a slow animal with a round shell"),
    Kind("donkey", _ANY, "a patient animal with long ears that carries heavy things"),
    Kind("dragon", _ANY, "a creature from old stories that can fly and breathe fire"),
    Kind("robot", _ANY, "a machine that can move and work by itself"),
    Kind("girl", ("little", "young", "small"), "a child who will be a woman one day", True),
    Kind("boy", ("little", "young", "small"), "a child who will be a man one day", False),
    Kind("woman", ("old", "young"), "a grown-up girl", True),
    Kind("man", ("old", "young"), "a grown-up boy", False),
    Kind("baker", _GROWN, "a person who makes bread and cakes"),
    Kind("farmer", _GROWN, "a person who grows food and keeps animals"),
    Kind("lighthouse keeper", ("old", "old", "young"), "a person who lights the lamp for ships"),
    Kind("shepherd", _GROWN, "a person who looks after sheep"),
    Kind("tailor", _GROWN, "a person who makes clothes"),
    Kind("teacher", _GROWN, "a person who helps children to learn"),
    Kind("painter", _GROWN, "a person who paints pictures"),
    Kind("clockmaker", _GROWN, "a person who makes and mends clocks"),
    Kind("gardener", _GROWN, "a person who looks after plants"),
    Kind("miller", _GROWN, "a person who turns grain into flour"),
    Kind("king", ("old", "young"), "a man who rules a country", False),
    Kind("queen", ("old", "young"), "a woman who rules a country", True),
    Kind(
        "prince", ("young", "little", "gentle", "handsome"), "the son of a king or a queen", False
    ),
    Kind(
        "princess",
        ("young", "little", "gentle", "clever"),
        "the daughter of a king or a queen",
        True,
    ),
    Kind("knight", ("old", "young"), "a soldier from old times who rode a horse"),
    Kind("wizard", ("old", "young"), "a man from old stories who can do magic", False),
    Kind("witch", ("old", "young"), "a woman from old stories who can do magic", True),
    Kind("sailor", _GROWN, "a person who works on a ship"),
    Kind("librarian", _GROWN, "a person who looks after books and lends them to people"),
    Kind("blacksmith", _GROWN, "a person who makes things out of hot iron"),
    Kind("beekeeper", _GROWN, "a person who keeps bees for their honey"),
    Kind("carpenter", _GROWN, "a person who builds things out of wood"),
    Kind("fisherman", _GROWN, "a man who catches fish", False),
    Kind("musician", _GROWN, "a person who plays music"),
    Kind("doctor", _GROWN, "a person who helps sick people to get well"),
)

HER_NAMES = listed(
    "Mira Luna Ada Nora Tilly Rosa Wren Ivy Hazel Mina Elsa Clara Poppy Ruby Lily Nell Greta "
    "Daisy Anna Maya Lina Bella Olive Juno Fern Sophie Emma Lucy Alice Zoé",
    " ",
)
HIS_NAMES = listed(
    "Pip Otto Finn Leo Max Tom Ben Bruno Hugo Oscar Jack Sam Felix Milo Theo Anton Emil Jasper "
    "Toby Arlo Basil Barnaby Moss Rufus Henry Oliver Gus Walter Tim Bo René",
    " ",
)

TRAITS = (
    Trait("curious", "[asked questions about everything|wanted to know how everything worked]"),
    Trait("brave", "[was not afraid of the dark|always went first when others were afraid]"),
    Trait("shy", "[spoke so softly that few people heard|liked to watch from behind a tree]"),
    Trait("kind", "[never passed anyone in need|always had a good word for everyone]"),
    Trait("patient", "[never hurried|could wait for hours without a word]"),
    Trait("proud", "[did not like to ask for help|thought that nobody could do things better]"),
    Trait("lazy", "[liked nothing better than a long nap|put off all work until tomorrow]"),
    Trait("cheerful", "[sang from morning to evening|laughed at even the smallest joke]"),
    Trait("clever", "[could solve any riddle|had a new idea every day]"),
    Trait("lonely", "[had nobody to talk to|ate supper alone every evening]"),
    Trait("careful", "[looked twice before every step|counted everything three times]"),
    Trait("forgetful", "[lost something every day|tied knots in string to remember things]"),
    Trait("stubborn", "[never gave up|never changed plans for anyone]"),
    Trait("gentle", "[stepped around every beetle on the path|never raised a loud voice]"),
    Trait("restless", "[could not sit still|dreamed of far places]"),
)

_METAL = ("silver", "golden", "copper", "tiny", "old")
_CLOTH = ("red", "blue", "warm", "green", "striped")
_WOOD = ("wooden", "old", "little", "painted", "blue")

THINGS = (
    Thing("lantern", ("old", "small", "red", "brass"), "a lamp that you can carry in the dark"),
    Thing("kite", _CLOTH, "a toy that flies in the wind at the end of a string"),
    Thing("key", _METAL, "a small piece of metal that opens a lock"),
    Thing("drum", _WOOD, "something you hit with your hands or with sticks to make music"),
    Thing("map", ("old", "strange", "paper", "torn"), "a picture that shows where places are"),
    Thing("bell", _METAL, "a piece of metal that rings when you hit it"),
    Thing("boat", _WOOD, "something that carries you over the water"),
    Thing("book", ("thick", "old", "blue", "heavy"), "many pages of words and pictures"),
    Thing("basket", ("round", "big", "brown", "little"), "something to carry apples or bread in"),
    Thing("scarf", _CLOTH, "a long piece of cloth that keeps your neck warm"),
    Thing("hat", _CLOTH, "something that you wear on your head"),
    Thing("button", _METAL, "a small round thing that keeps a coat closed"),
    Thing("coin", _METAL, "a round piece of metal that is used as money"),
    Thing("ring", _METAL, "a small circle of metal that you wear on a finger"),
    Thing("feather", ("white", "blue", "long", "golden"), "what birds have instead of hair"),
    Thing("shell", ("white", "pink", "shiny", "round"), "the hard house of a sea animal"),
    Thing("stone", ("smooth", "white", "strange", "shiny"), "a small piece of rock"),
    Thing("violin", ("old", "brown", "little", "fine"), "a music box of wood with four strings"),
    Thing("flute", ("silver", "wooden", "little", "old"), "a pipe that you blow to make music"),
    Thing("whistle", _METAL, "a small thing that makes a loud sound when you blow it"),
    Thing("umbrella", _CLOTH, "a roof that you carry over your head in the rain"),
    Thing("ladder", _WOOD, "two long poles with steps between them, for climbing"),
    Thing("rope", ("long", "strong", "thick", "old"), "a thick, strong string"),
    Thing("teapot", ("blue", "round", "white", "old"), "a pot with a spout for making tea"),
    Thing("cup", ("blue", "white", "old", "little"), "something to drink from"),
    Thing("spoon", ("silver", "wooden", "old", "long"), "something to eat soup with"),
    Thing("cake", ("sweet", "little", "round", "big"), "a sweet thing to eat at a party"),
    Thing("apple", ("red", "green", "golden", "sweet"), "a round fruit that grows on trees"),
    Thing("pear", ("yellow", "sweet", "green", "golden"), "a sweet fruit that grows on trees"),
    Thing("blanket", _CLOTH, "a large piece of cloth that keeps you warm in bed"),
    Thing("candle", ("white", "tall", "yellow", "small"), "a stick of wax that gives light"),
    Thing("mirror", ("round", "old", "silver", "little"), "a glass in which you see yourself"),
    Thing("clock", ("old", "round", "wooden", "loud"), "a machine that shows the time"),
    Thing("compass", _METAL, "a tool with a needle that always points north"),
    Thing("telescope", ("long", "old", "brass", "fine"), "a tube that makes far things look near"),
    Thing("letter", ("long", "yellow", "secret", "old"), "a message on paper for somebody"),
    Thing("paintbrush", ("fine", "long", "old", "soft"), "a small brush for painting pictures"),
    Thing("wagon", _WOOD, "a cart with four wheels"),
    Thing("bucket", ("blue", "old", "wooden", "heavy"), "something to carry water in"),
    Thing("sled", _WOOD, "something to ride down a snowy hill on"),
    Thing("ball", ("red", "round", "blue", "yellow"), "a round toy that you throw and catch"),
    Thing("doll", ("little", "wooden", "old", "pretty"), "a toy that looks like a small person"),
    Thing("balloon", ("red", "blue", "yellow", "big"), "a thin bag full of air that floats"),
    Thing("crown", ("golden", "silver", "heavy", "paper"), "what a king or a queen wears"),
    Thing("star", ("golden", "paper", "silver", "bright"), "a far sun that shines at night"),
    Thing("box", ("wooden", "small", "strange", "blue"), "something to keep other things in"),
    Thing("chair", ("wooden", "old", "little", "green"), "something to sit on"),
    Thing("pumpkin", ("big", "orange", "round", "heavy"), "a large round orange vegetable"),
)

PLACES = (
    Place("village", "in", ("quiet", "small", "sleepy", "pretty"), "a place with a few houses"),
    Place("forest", "in", ("dark", "deep", "green", "quiet"), "a place full of trees"),
    Place("town", "in", ("busy", "small", "little", "noisy"), "a place with streets and shops"),
    Place("valley", "in", ("green", "wide", "hidden", "quiet"), "the low land between two hills"),
    Place("meadow", "in", ("sunny", "wide", "green", "quiet"), "a field of grass and flowers"),
    Place("garden", "in", ("secret", "small", "sunny", "wild"), "a place where plants are grown"),
    Place("harbor", "in", ("busy", "small", "old", "windy"), "a safe place for ships"),
    Place("mountain", "on", ("high", "snowy", "tall", "lonely"), "a very high hill"),
    Place("hill", "on", ("green", "high", "round", "windy"), "land that is higher than the rest"),
    Place("island", "on", ("small", "lonely", "green", "far"), "land with water all around it"),
    Place("farm", "on", ("small", "old", "busy", "quiet"), "a place where food is grown"),
    Place("castle", "in", ("great", "old", "cold", "golden"), "a big house with thick walls"),
    Place("city", "in", ("great", "noisy", "busy", "old"), "a very big town"),
    Place("lake", "beside", ("blue", "quiet", "deep", "wide"), "a lot of water with land around"),
    Place("river", "beside", ("wide", "slow", "cold", "quick"), "water that runs to the sea"),
    Place("sea", "beside", ("blue", "cold", "wild", "great"), "salt water, wider than you can see"),
    Place("lighthouse", "in", ("old", "white", "tall", "lonely"), "a tower with a light for ships"),
    Place("mill", "in", ("old", "little", "noisy", "stone"), "a house where flour is made"),
    Place("cave", "in", ("dark", "deep", "warm", "hidden"), "a hole in the side of a hill"),
    Place("bridge", "under", ("stone", "wooden", "old", "long"), "a road over the water"),
    Place("desert", "in", ("hot", "wide", "golden", "silent"), "a dry land with very little rain"),
    Place("library", "in", ("great", "quiet", "old", "dusty"), "a house full of books"),
    Place("market", "near", ("busy", "noisy", "small", "old"), "a place where people buy things"),
    Place("cottage", "in", ("small", "stone", "warm", "little"), "a small house in the country"),
)


def character(rng: random.Random, kind: Kind, taken: tuple[str, ...] = ()) -> Character:
    """Returns a character of this kind, with a name that is not in ``taken``, the names already
    used."""
    she = rng.random() < 0.5 if kind.she is None else kind.she
    names = tuple(name for name in (HER_NAMES if she else HIS_NAMES) if name not in taken)
    trait = TRAITS[rng.randrange(len(TRAITS))]
    habit = choose(rng, trait.habit)
    return Character(kind.name, one_of(rng, kind.ages), one_of(rng, names), she, trait.name, habit)


def item(rng: random.Random, thing: Thing) -> Item:
    """Returns an item of this kind of thing. One of the adjectives in ``thing.looks`` describes the
    item."""
    return Item(thing.name, one_of(rng, thing.looks))


def scene(rng: random.Random, place: Place) -> Scene:
    """Returns a scene at this kind of place. One of the adjectives in ``place.looks`` describes the
    scene."""
    return Scene(place.name, place.preposition, one_of(rng, place.looks))
