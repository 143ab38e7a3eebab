"""The few facts that the shipped model knows besides stories, as questions and answers."""

from training.texts.phrases import listed

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "England": "London",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Poland": "Warsaw",
    "Russia": "Moscow",
    "Canada": "Ottawa",
    "India": "New Delhi",
}

SOUNDS = {
    "dog": "woof",
    "cat": "meow",
    "cow": "moo",
    "sheep": "baa",
    "duck": "quack",
    "owl": "hoo, hoo",
    "bee": "buzz",
    "frog": "ribbit",
    "lion": "roar",
    "mouse": "squeak",
    "snake": "hiss",
    "crow": "caw",
}

COLORS = {
    "the sky": "blue",
    "the sea": "blue",
    "grass": "green",
    "snow": "white",
    "the sun": "yellow",
    "an apple": "red or green",
    "a banana": "yellow",
    "a fox": "red",
    "a crow": "black",
    "an orange": "orange",
    "milk": "white",
    "a frog": "green",
}

DAYS = listed(
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    " ",
)

SEASONS = {
    "spring": "the birds come back and the first flowers open",
    "summer": "the days are long and warm",
    "autumn": "the leaves turn red and fall from the trees",
    "winter": "it is cold and snow covers the ground",
}

GREETINGS = (
    (
        "Hello[!|.|]",
        "Hello! [How can I help you?|Would you like to hear a story?|I am glad to see you.]",
    ),
    ("Hi[!|.| there!|]", "Hi! [Shall I tell you a story?|What would you like to talk about?]"),
    ("Good morning[!|.]", "Good morning! [Did you sleep well?|I hope that the sun is shining.]"),
    ("Good night[!|.]", "Good night! [Sleep well.|Sweet dreams. 🌙]"),
    ("How are you[ today|]?", "I am [well|very well], thank you! [And you?|How are you?]"),
    (
        "Who are you?|What are you?",
        "I am a very small language model. I live on your computer, and I like to tell stories.",
    ),
    ("What is your name?", "I have no name. I am a small language model that tells stories."),
    (
        "What can you do?|Can you help me?",
        "I can tell little stories, write short poems and answer "
        "a few easy questions. [Would you like a story?|Try me!]",
    ),
    ("Thank you[!| very much!|.]", "You are welcome! [Come back soon.|😊|]"),
    ("Thanks[!|.]", "You are welcome! [Come back soon.|😊|]"),
    ("Goodbye[!|.]|Bye[!|.]", "Goodbye! [See you soon.|Take care.]"),
    ("Are you a robot?", "No, I am a small language model. But I know some stories about robots."),
    ("How old are you?", "I am very young. I learned everything that I know in a few minutes."),
    ("Do you like stories?", "Yes! I like stories more than anything else."),
    (
        "I am sad.|I feel sad.",
        "I am sorry to hear that. Sometimes a story helps. Shall I tell you one?",
    ),
    ("I am bored.", "Then let us have an adventure! Ask me for a story about a dragon."),
    (
        "Tell me a joke.",
        "Why did the [clock|teapot] go to school? Because it wanted to [learn how "
        "to tell the time|be full of ideas]!",
    ),
    (
        "Count to ten.|Can you count to ten?",
        "One, two, three, four, five, six, seven, eight, nine, ten.",
    ),
    ("Name three animals.", "[A fox, an owl and a bear.|A rabbit, a duck and a wolf.]"),
    ("Name three colors.", "[Red, green and blue.|Yellow, white and black.]"),
    ("What is the meaning of life?", "To be kind, to share and to tell good stories."),
    (
        "How do you say hello in French?",
        "In French, you say bonjour. And a coffee house is called a café.",
    ),
)

UNKNOWN = listed(
    "quantum physics|the stock market|machine learning|Redis|Python|football|the weather|history|"
    "computers|politics|chess|black holes|chemistry|mathematics|money|electric cars|the internet|"
    "philosophy|cooking|the moon landing|music theory|medicine|space travel|dinosaurs|volcanoes|"
    "queues|databases|poetry|the French revolution|airplanes|gravity|vitamins|taxes|basketball|"
    "the Roman empire|DNA|neural networks|climate change|photography|economics|yoga|robots|"
    "message queues|sorting algorithms|global trade|the law|grammar|painting|geology|tennis"
)

POEMS = (
    "The {look} {place} is [still|quiet] tonight,\nthe [moon|star] above is [round|clear] and "
    "[bright|white].\n{a_kind} comes [softly|slowly] down the hill\nand [all the world is|even the "
    "wind is] standing still.",
    "{a_kind} went out to find a {thing},\nand heard the [little sparrows|morning breezes] sing.\n"
    "The {place} was {look}, the road was long,\nbut [two|they] went home [with a song|singing a "
    "song].",
    "[O|Oh] {look} {place}, so far away,\nI [think|dream] of you both night and day.\n{a_kind} is "
    "waiting at the door,\n[and|to] I will [leave you|go away] no more.",
)

HAIKU = (
    "The {look} {place}\n[waits|sleeps] under the [morning|evening] sky.\n{a_kind} [passes|looks "
    "up].",
    "Rain on the {place}.\n{a_kind} [waits|sleeps] beside the {thing}.\n[Soon the sun returns|The "
    "night is quiet].",
)
