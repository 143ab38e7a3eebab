"""The plots of stories: events (beats) one after the other, each in several wordings.

A beat is a tuple of templates (see ``phrases``), of which a story uses one. With an empty template,
a story may leave the beat out. The wordings of a beat can be exchanged freely, so none may rely on
how another beat was worded. Fields: ``hero``, ``friend``, ``elder`` (characters), ``thing``,
``gift`` (items), ``place`` (a scene), and ``spot``, ``spot2``, ``spot3`` ("by the well").
"""

from dataclasses import dataclass
from typing import TypeAlias

from training.texts.phrases import listed

Beat: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Plot:
    """One plot: its topic, its beats, and lessons for the end."""

    topic: str
    beats: tuple[Beat, ...]
    lessons: tuple[str, ...]


SPOTS = listed(
    "by the well|under the old oak|behind the mill|near the bridge|at the crossroads|in the barn|"
    "beside the pond|on the stairs|under the bed|in the tall grass|behind the bakery|at the gate|"
    "between the roots of a tree|on the windowsill|beside the garden wall|in the hay|"
    "at the edge of the woods|on the sand|among the flowers|next to the stove"
)

OPENINGS: Beat = (
    "Once upon a time, {place.in_a}, there lived {hero.an_old} named {hero.name}.",
    "Once upon a time, there lived {hero.an_old} [named|called] {hero.name}.",
    "Once upon a time, there was {hero.a_kind} named {hero.name} who lived {place.in_a}.",
    "Once upon a time there was {hero.an_old}. {hero.his} name was {hero.name}, and {hero.he} "
    "lived {place.in_a}.",
    "{place.in_a}, there lived {hero.an_old} [named|called] {hero.name}.",
    "{place.in_a} lived {hero.an_old} whose name was {hero.name}.",
    "{place.in_a}, where the [wind always blew|days were long|nights were full of stars], lived "
    "{hero.an_old} named {hero.name}.",
    "Long ago, {place.in_a}, {hero.an_old} named {hero.name} [lived all alone|had a small house].",
    "A [long, long|very long] time ago, there was {hero.an_old} called {hero.name}.",
    "There once was {hero.an_old} named {hero.name}, who lived {place.in_a}.",
    "{hero.an_old} named {hero.name} lived {place.in_a}.",
    "{hero.the_old} lived {place.in_a}. {hero.his} name was {hero.name}.",
    "{hero.the_old} [sat|stood] at the window and looked out. {hero.his} name was {hero.name}, "
    "and {hero.he} lived {place.in_a}.",
    "{hero.the_old} {place.in_the} was called {hero.name}.",
    "{hero.name} was {hero.an_old} who lived {place.in_a}.",
    "{hero.name}, {hero.an_old}, lived {place.in_a}.",
    "{hero.name} the {hero.kind} lived {place.in_a}.",
    "It was raining when {hero.name}, {hero.an_old}, [woke up|came home|opened the door] "
    "{place.in_a}.",
    "It was a [cold winter|warm summer|quiet autumn|bright spring] [morning|evening] when "
    "{hero.name}, {hero.an_old}, looked out over {place.the}.",
    "The [sun|moon] was [rising|shining] over {place.the} when {hero.name} the {hero.kind} "
    "[woke up|opened the window].",
    "The [rain|wind|snow] had stopped at last, and {hero.name} the {hero.kind} came out of "
    "{hero.his} house {place.in_a}.",
    "Every morning, {hero.an_old} named {hero.name} walked [along the path|to the well|up the "
    "hill] and [sang a song|counted the clouds|greeted the sun].",
    "Every morning, {hero.name} the {hero.kind} [woke before the sun|opened the window|swept the "
    "floor] and [looked out over {place.the}|made a pot of tea|sang a little song].",
    "Every evening, when the lamps were lit, {hero.an_old} named {hero.name} [walked home|sat by "
    "the fire] {place.in_a}.",
    "Nobody {place.in_the} knew [how old {hero.name} the {hero.kind} was|where {hero.name} the "
    "{hero.kind} had come from].",
    "Everyone {place.in_the} knew {hero.name}, {hero.the_old}.",
    "Far away, {place.in_a}, there was {hero.an_old} [named|called] {hero.name}.",
    "Deep in the forest, in a [small|little] house, lived {hero.an_old} named {hero.name}.",
    "High on a hill stood a small house, and in it lived {hero.name}, {hero.an_old}.",
    "On the first day of [spring|summer|autumn|winter], {hero.an_old} named {hero.name} sat "
    "{place.in_a}.",
    "One day, {hero.an_old} named {hero.name} was walking {place.in_a}.",
    "One [morning|evening], {hero.name} the {hero.kind} sat {place.in_a} and thought.",
    "When {hero.name} was [born|very young], nobody thought that {hero.a} from {place.a} could "
    "ever have an adventure.",
    "This is the story of {hero.name}, {hero.an_old} who lived {place.in_a}.",
    "Have you ever heard of {hero.name}, {hero.the_old} who lived {place.in_a}?",
    "My grandmother used to tell me about {hero.an_old} named {hero.name} who lived {place.in_a}.",
    "In the middle of {place.a} stood a [small|crooked|yellow] house. There lived {hero.an_old} "
    "named {hero.name}.",
    "In a land far away, {hero.an_old} named {hero.name} lived {place.in_a}.",
    "At the end of a long road lived {hero.an_old}. Everyone called {hero.him} {hero.name}.",
    "There was once {hero.a_kind} who lived {place.in_a}. {hero.his} name was {hero.name}.",
    '"Good morning, world!" said {hero.name}. {hero.he} was {hero.an_old}, and {hero.he} lived '
    "{place.in_a}.",
    "Late one night, {hero.name} the {hero.kind} could not sleep. The moon shone over {place.the}.",
    "Last [summer|winter|spring], {hero.an_old} named {hero.name} came to live {place.in_a}.",
)

HABITS: Beat = (
    "",
    "{hero.he} was very {hero.trait} and {hero.habit}.",
    "{hero.he} {hero.habit}, for {hero.he} was [a very|quite a] {hero.trait} {hero.kind}.",
    "{hero.he} was [so {hero.trait} that everyone talked about it|known to be {hero.trait}]. "
    "{hero.he} {hero.habit}.",
    "Nobody was quite as {hero.trait} as {hero.name}.",
    "People said that {hero.he} was {hero.trait}, because {hero.he} {hero.habit}.",
)

MEETINGS: Beat = (
    "[On the way|Before long|A little later], {hero.he} met {friend.an_old} named {friend.name}.",
    "Just then, {friend.an_old} came [down the path|around the corner]. It was {friend.name}.",
    "{spot2}, {hero.he} saw {friend.an_old}. {friend.his} name was {friend.name}.",
    "That was when {friend.name}, {friend.the_old}, [came by|looked up from {friend.his} work].",
    "So {hero.he} went to see {friend.name}, {friend.an_old} who lived {spot2}.",
)

ENDINGS: Beat = (
    "",
    "",
    "From that day on, {hero.name} and {friend.name} were the best of friends.",
    "And they lived happily ever after.",
    "That night, {hero.name} [slept better than ever|fell asleep with a smile].",
    "And if you go {place.in_the} today, you may still [hear about it|meet them there].",
    "The stars came out one by one, and everything was [quiet|well] {place.in_the}.",
    "{hero.name} was still {hero.trait}, but {hero.he} was never sad again.",
    "They talked about it for many years — and they always laughed at the end.",
    "And that is the end of the story.",
    "The people {place.in_the} still tell this story when the nights are long.",
)

PLOTS = (
    Plot(
        "something that was lost",
        (
            (
                "More than anything else, {hero.he} loved {hero.his} {thing.red}.",
                "{hero.he} had {thing.a_red} that had once belonged to {hero.his} [mother|father|"
                "grandmother].",
                "{hero.he} owned only one thing: {thing.a_red}. {hero.he} took it everywhere.",
            ),
            (
                "But one [windy|rainy|cold] [day|morning], {thing.the} was gone.",
                "One morning, {hero.name} reached for {thing.the}, and it was not there.",
                "Then, one [day|evening], {hero.he} came home and saw that {thing.the} was gone.",
            ),
            (
                '"Where is my {thing.name}?" {hero.he} cried.',
                '"Oh no!" said {hero.name}. "I have lost my {thing.name}!"',
                "{hero.name} felt [cold with worry|like crying].",
            ),
            (
                "{hero.he} looked {spot}, but there was nothing. {hero.he} looked {spot2}, but "
                "there were only [leaves|stones|spiders].",
                "First {hero.he} searched {spot}. Then {hero.he} searched {spot2}. {thing.the} was "
                "nowhere to be found.",
                "{hero.he} searched all day, {spot} and {spot2}, until [the sun went down|"
                "{hero.his} feet hurt].",
            ),
            MEETINGS,
            (
                '"Why do you look so sad?" asked {friend.name}. "I have lost my {thing.name}," '
                "said {hero.name}.",
                '"What are you looking for?" {friend.he} asked. {hero.name} told {friend.him} '
                "everything.",
            ),
            (
                '"Let us look together," said {friend.name}. "Four eyes see more than two."',
                '"Think," said {friend.name}. "Where were you yesterday?" {hero.name} thought for '
                'a while. "I was {spot3}," {hero.he} said.',
                '"I saw something {spot3} this morning," {friend.name} said. "Come with me!"',
            ),
            (
                "So they went there together, and [indeed|sure enough], {spot3} lay {thing.the}.",
                "They found {thing.the} {spot3}. A [baby bird|tiny mouse|family of beetles] had "
                "been using it as a bed.",
                "And there it was! {thing.the} was {spot3}, a little dusty, but not broken.",
                "They walked and walked. At last, {spot3}, {hero.name} saw {thing.a_red}.",
            ),
            (
                '"Thank you!" said {hero.name}. "I would never have found it alone."',
                "{hero.name} was so happy that {hero.he} [danced|laughed|hugged {friend.name}].",
                '"You can use it whenever you like," {hero.name} told {friend.name}.',
            ),
        ),
        ("What is lost can be found with the help of a friend.", "Two can see more than one."),
    ),
    Plot(
        "honesty",
        (
            (
                "One [morning|day|afternoon], {hero.he} found {thing.a_red} {spot}.",
                "Walking home one evening, {hero.he} saw something shine {spot}. It was "
                "{thing.a_red}.",
                "One day, {spot}, {hero.his} foot touched something. It was {thing.a_red}.",
            ),
            (
                '"How beautiful!" {hero.he} said. "I wonder whose it is."',
                "{hero.he} had always wanted {thing.a}. But it was not {hero.his} to keep.",
                '"Somebody must be missing this," thought {hero.name}.',
            ),
            (
                "",
                "[For a moment|That night], {hero.he} wanted to hide it under {hero.his} pillow. "
                "Nobody would ever know.",
            ),
            (
                "{hero.he} asked {elder.name} the {elder.kind}, but {elder.he} shook {elder.his} "
                'head. "It is not mine," {elder.he} said.',
                '"Is this yours?" {hero.he} asked {elder.name}, {elder.the_old}. "No," said '
                '{elder.name}, "but ask {spot2}."',
                "First {hero.he} went to {elder.name} the {elder.kind}. {elder.name} had never "
                "seen {thing.the} before.",
            ),
            (
                "Then, {spot2}, {hero.he} heard somebody crying. It was {friend.name}, "
                "{friend.an_old}.",
                "At last {hero.he} came to {friend.name}, {friend.an_old} who lived {spot2}.",
            ),
            (
                '"My {thing.name}!" cried {friend.name}. "I looked for it everywhere!"',
                'When {friend.name} saw {thing.the}, {friend.his} eyes grew wide. "You found it!" '
                "{friend.he} said.",
                '"That is mine," {friend.name} said softly. "My mother gave it to me."',
            ),
            (
                "{hero.name} gave it back, and {hero.his} heart felt light.",
                "Without a word, {hero.name} put {thing.the} into {friend.his} hands.",
            ),
            (
                "To say thank you, {friend.name} gave {hero.him} {gift.a_red}.",
                '"You are honest," said {friend.name}. "Please stay for supper." So {hero.he} did.',
                "{friend.name} baked a cake, and they shared it {spot}.",
                '"I have nothing to give you," said {friend.name}, "but I can be your friend."',
            ),
        ),
        ("An honest heart is never poor.", "Giving back is better than keeping."),
    ),
    Plot(
        "a storm",
        (
            (
                "In {hero.his} house hung {thing.a_red} that nobody ever used.",
                "{hero.he} kept {thing.a_red} [by the door|under the bed|on a high shelf].",
                "Everyone laughed at {hero.him}, because {hero.he} carried {thing.a_red} wherever "
                "{hero.he} went.",
            ),
            (
                "One night, a great storm came. The wind howled, and the rain beat on the roofs.",
                "One evening, black clouds covered the sky. Thunder rolled over {place.the}.",
                "Then came the worst storm that anyone could remember. Trees fell, and all the "
                "lights went out.",
            ),
            (
                'In the dark, a voice called out, "Help! Help me!"',
                "Through the noise of the wind, {hero.name} heard somebody cry for help.",
                '"Where is {friend.name}?" people asked. Nobody had seen {friend.him} since noon.',
            ),
            (
                "It was {friend.name}, {friend.the_old}, who had lost the way {spot}.",
                "{friend.name}, {friend.the_old}, was out there, alone, {spot}.",
            ),
            (
                "{hero.name} was afraid, but {hero.he} took {thing.the} and ran into the rain.",
                "{hero.name} did not wait. {hero.he} grabbed {thing.the} and went out.",
                "{elder.name} the {elder.kind} told {hero.him} to wait for the morning, but "
                "{hero.he} took {thing.the} and went.",
            ),
            (
                "The wind pushed {hero.him} back. {hero.he} fell, got up, and went on, step by "
                "step.",
                "Twice {hero.he} nearly turned back. Twice {hero.he} heard the voice again and "
                "went on.",
                "The path was gone, and the water was rising. Still {hero.he} held {thing.the} "
                "high above {hero.his} head.",
            ),
            (
                '"I am here!" {hero.he} shouted. {friend.name} saw {thing.the} and came closer.',
                "At last {hero.he} found {friend.name}, wet and cold, {spot}.",
            ),
            (
                '"Hold on to {thing.the}," said {hero.name}, "and do not let go."',
                '"You came for me," whispered {friend.name}. "Of course," said {hero.name}.',
            ),
            (
                "Together they walked home through the storm. In the morning, the sky was blue.",
                "Hand in hand they came home, and {elder.name} the {elder.kind} made hot soup for "
                "both of them.",
                "When the sun rose, they were safe, and {thing.the} hung over the fire to dry.",
            ),
            (
                "Nobody ever laughed at {hero.his} {thing.name} again.",
                "After that night, {thing.the} was the most famous {thing.name} of all.",
            ),
        ),
        ("Being brave means to be afraid and to go all the same.", "After rain comes sunshine."),
    ),
    Plot(
        "being afraid",
        (
            (
                "But {hero.name} had a secret: {hero.he} was afraid of [the dark|deep water|high "
                "places|thunder].",
                "There was only one problem. {hero.name} was afraid of [the dark|deep water|high "
                "places|loud noises].",
            ),
            (
                "When the others played {spot}, {hero.he} always said that {hero.he} was tired.",
                "{hero.he} never told anyone, not even {elder.name} the {elder.kind}.",
                '"I will be brave tomorrow," {hero.he} said every day, but tomorrow never came.',
            ),
            MEETINGS,
            (
                '"Are you afraid?" asked {friend.name}. {hero.name} looked at {hero.his} feet. '
                '"Yes," {hero.he} said at last.',
                '"I am afraid too, sometimes," {friend.name} said. "Shall I tell you what I do?"',
            ),
            (
                '"I take one small step," said {friend.name}. "And then I take one more."',
                '"I count to ten and I sing," said {friend.name}. "It is hard to sing and be '
                'afraid."',
                '{friend.name} gave {hero.him} {thing.a_red}. "Hold this," {friend.he} said, '
                '"and you will not be alone."',
            ),
            (
                "The next [day|night], {hero.name} tried it. The first time, {hero.he} ran away.",
                "At first it did not work. {hero.his} knees shook, and {hero.he} turned back.",
                "{hero.name} took one small step, then another. {hero.his} heart beat like a drum.",
            ),
            (
                "But {hero.he} tried again, and this time {hero.he} stayed.",
                "{hero.he} closed {hero.his} eyes, took a deep breath, and went on.",
                "{friend.name} waited and did not laugh. So {hero.name} tried once more.",
            ),
            (
                "And then, suddenly, it was not so bad. {hero.he} could see [the stars|the whole "
                "world|{place.the}] as never before.",
                '"I did it!" {hero.name} shouted. "I really did it!"',
                "Nothing terrible happened. It was even [beautiful|a little bit fun].",
            ),
            (
                '"I knew that you could," said {friend.name}.',
                "{friend.name} clapped, and {hero.name} [laughed|bowed|blushed].",
            ),
        ),
        ("Small steps take you far.", "Everyone is afraid sometimes."),
    ),
    Plot(
        "sharing",
        (
            (
                "{hero.he} had a neighbor, {friend.an_old} named {friend.name}.",
                "Next door lived {friend.name}, {friend.an_old}.",
            ),
            (
                "One day, they found {thing.a_red} {spot}, both at the same time.",
                "One morning, {thing.a_red} lay {spot}, right between their two houses.",
            ),
            (
                '"It is mine!" said {hero.name}. "I saw it first!" said {friend.name}.',
                '"Give it to me!" shouted {friend.name}. "Never!" answered {hero.name}.',
            ),
            (
                "They pulled and pulled. {thing.the} fell to the ground and rolled away.",
                "They [argued until the sun went down|did not speak for three days].",
                "{hero.name} hid {thing.the} {spot2}, but {friend.name} found it and hid it "
                "{spot3}.",
            ),
            (
                "In the end, they went to {elder.name}, {elder.an_old} who was known to be wise.",
                "{elder.name}, {elder.the_old}, heard the noise and came out.",
            ),
            (
                '"What good is {thing.a} to someone who is alone?" asked {elder.name}.',
                '{elder.name} listened to both of them. "Each of you shall have it for one day," '
                '{elder.he} said, "and then give it to the other."',
                '"I shall keep it," said {elder.name}, "until you can ask for it together."',
            ),
            (
                "{hero.name} and {friend.name} looked at each other. They felt [silly|ashamed].",
                '"I am sorry," said {hero.name}. "So am I," said {friend.name}.',
            ),
            (
                "From then on they shared {thing.the}, and they found that it was more fun.",
                "So they took turns. And on Sundays they used {thing.the} together.",
                "They carried {thing.the} home between them and put it where both could see it.",
            ),
        ),
        ("Joy grows when you share it.", "A thing can be shared; a quarrel helps nobody."),
    ),
    Plot(
        "a birthday present",
        (
            (
                "{hero.his} best friend was {friend.name}, {friend.an_old}, and tomorrow was "
                "{friend.his} birthday.",
                "It was nearly the birthday of {friend.name}, {friend.the_old}, and {hero.name} "
                "had no present.",
            ),
            (
                '"I will make {thing.a_red} for {friend.him}," {hero.he} decided.',
                "{hero.he} had no money, so {hero.he} decided to make {thing.a} with {hero.his} "
                "own hands.",
                '"What would {friend.he} like?" thought {hero.name}. "I know! {thing.a_red}!"',
            ),
            (
                "The first one fell apart. The second one was much too small.",
                "{hero.he} worked all morning, but it came out crooked.",
                "{hero.he} tried once, and it broke. {hero.he} tried twice, and it broke again.",
            ),
            (
                '"I cannot do it," sighed {hero.name}, and sat down {spot}.',
                "{hero.he} threw everything into a corner and went outside.",
            ),
            (
                '{elder.name} the {elder.kind} saw {hero.him} there. "Do not hurry," {elder.he} '
                'said. "Good things take time."',
                '"May I help you?" asked {elder.name}, {elder.an_old}. "You hold it, and I will '
                'show you how."',
            ),
            (
                "So {hero.name} began again, slowly this time, and worked [all night|until the "
                "candle burned out].",
                "They worked side by side until the moon was high.",
            ),
            (
                "In the morning, {thing.the} was ready. It was not perfect, but it was finished.",
                "When the sun came up, there it stood: {thing.a_red}, a little bit crooked.",
            ),
            (
                '{friend.name} opened the box and was silent for a moment. "It is the best '
                'present of all," {friend.he} said.',
                '"You made this for me?" asked {friend.name}. {hero.name} nodded.',
                "{friend.name} laughed out loud and would not let go of {thing.the} all day.",
            ),
        ),
        ("The best presents are made with love.", "Good things take time."),
    ),
    Plot(
        "a long journey",
        (
            (
                "All {hero.his} life, {hero.he} had wanted to see [the sea|the high mountains|the "
                "end of the road|the great city].",
                '"One day I will travel," {hero.he} always said, "and see [the sea|the snow|the '
                'world]."',
            ),
            (
                "One morning, {hero.he} packed some bread, a blanket and {thing.a_red}, and went.",
                "So {hero.he} put {thing.a_red} into a bag, locked the door and set out.",
                "{elder.name} the {elder.kind} gave {hero.him} {thing.a_red} for the journey. "
                '"Come back and tell me everything," {elder.he} said.',
            ),
            (
                "The road was long. On the first day it rained, and on the second day the wind "
                "blew.",
                "{hero.he} walked through fields and woods, and slept under the stars.",
                "First {hero.he} came to a river with no bridge. {hero.he} waited until it was low "
                "and went across.",
            ),
            MEETINGS,
            (
                '"Where are you going?" asked {friend.name}. "Far away," said {hero.name}. "Then I '
                'will come too," said {friend.name}.',
                "{friend.name} was going the same way, so they went on together.",
                '"May I walk with you?" asked {friend.name}. "Two are never lost."',
            ),
            (
                "When {friend.name} was tired, {hero.name} told stories. When {hero.name} was "
                "tired, {friend.name} sang.",
                "{hero.name} carried {thing.the}, and {friend.name} carried the bread.",
                "One night they lost the way, but {thing.the} [helped|saved] them.",
            ),
            (
                "And then, behind the last hill, they saw it. Neither of them said a word.",
                "At last they were there. It was bigger and more beautiful than {hero.he} had "
                "dreamed.",
                "After seven days, they stood there at last, with tired feet and happy hearts.",
            ),
            (
                '"What now?" asked {friend.name}. "Now we go home," said {hero.name}, "and tell '
                'everyone."',
                "They stayed until evening. Then {hero.name} began to miss {hero.his} own bed, "
                "and they turned back.",
                "{hero.name} left {thing.the} there, so that the next traveler would find it.",
            ),
        ),
        (
            "The best part of a journey is who walks beside you.",
            "Every long road has a first step.",
        ),
    ),
    Plot(
        "mending something",
        (
            (
                "In the middle of {place.the} [hung a great bell|stood a tall clock], and one day "
                "it fell silent.",
                "One winter, the old [bridge|mill|fountain] broke, and nobody could mend it.",
                "The big clock {place.in_the} had not moved for years.",
            ),
            (
                "{elder.name} the {elder.kind} tried with a hammer, but it only made things worse.",
                "The strongest pulled, and the richest paid, but nothing helped.",
                '"It cannot be mended," said {elder.name} the {elder.kind}.',
            ),
            (
                '{hero.name} looked at it for a long time. "I want to try," {hero.he} said.',
                '"May I try?" asked {hero.name}. Some people laughed.',
            ),
            (
                "{hero.he} had only {thing.a_red} and a lot of time.",
                "{hero.he} did not have tools. {hero.he} had only {thing.a_red}.",
            ),
            MEETINGS,
            (
                '"I have small hands," said {friend.name}. "Perhaps I can reach inside."',
                "{friend.name} held the light and asked many questions, and that helped.",
                '"Let me see," said {friend.name}, and {friend.he} looked where nobody had looked.',
            ),
            (
                "Deep inside they found {gift.a_red} that was stuck there.",
                "Then they saw it: one small part was missing, no bigger than a pea.",
            ),
            (
                "They worked for three days. With the help of {thing.the}, it was done at last.",
                "{hero.name} pushed with {thing.the}, {friend.name} pulled, and — click! — it "
                "moved.",
            ),
            (
                "Everyone came out of the houses to see it. There was music until late at night.",
                '{elder.name} shook {hero.his} hand. "I was wrong," {elder.he} said.',
            ),
        ),
        ("Looking closely is better than pushing hard.", "Do not say that it cannot be done."),
    ),
    Plot(
        "a new friend",
        (
            (
                "One day, somebody new came. It was {friend.name}, {friend.an_old}.",
                "One spring, {friend.an_old} called {friend.name} moved into the house {spot}.",
            ),
            (
                "{friend.name} did not know anyone and sat alone {spot2}.",
                '"We do not know {friend.him}," people said, and they walked past.',
                "{friend.name} talked in a strange way, and nobody stopped to listen.",
            ),
            (
                "But {hero.name} remembered how it feels to be alone.",
                "{hero.name} watched for three days. On the fourth day, {hero.he} took "
                "{thing.a_red} and knocked on the door.",
            ),
            (
                '"Hello," said {hero.name}. "My name is {hero.name}. Would you like some tea?"',
                '"Welcome!" said {hero.name}. "I brought you {thing.a}."',
            ),
            (
                "At first, {friend.name} said nothing. Then {friend.he} smiled.",
                '"Nobody has asked me that before," said {friend.name}.',
            ),
            (
                "{friend.name} knew stories from far countries, and {hero.name} could not hear "
                "enough of them.",
                "It turned out that {friend.name} could [sing|paint|cook] better than anyone.",
                "They sat together {spot2} and talked until the moon rose.",
            ),
            (
                "The next day, {elder.name} the {elder.kind} came too, and then many others.",
                "Soon everyone wanted to meet {friend.name}.",
                '"I was wrong about you," {elder.name} the {elder.kind} told {friend.him}.',
            ),
            (
                '"It all began with a small hello," said {friend.name}.',
                "And the empty house was not empty any more.",
            ),
        ),
        ("A kind word opens every door.", "A stranger is a friend you do not know yet."),
    ),
    Plot(
        "a race",
        (
            (
                "Every year there was a great race around {place.the}, and the prize was "
                "{thing.a_red}.",
                "One day, a race was held. Whoever won it would get {thing.a_red}.",
            ),
            (
                "{hero.name} wanted to win more than anything, and {hero.he} ran every morning.",
                '"I will win {thing.the}," said {hero.name}, and everyone laughed.',
            ),
            (
                "{friend.name}, {friend.an_old}, wanted to win too.",
                '"You cannot beat me," said {friend.name}, {friend.an_old} with fast feet.',
            ),
            (
                '"Ready, steady, go!" called {elder.name} the {elder.kind}, and they were off.',
                "{elder.name} the {elder.kind} rang a bell, and the race began.",
            ),
            (
                "{hero.name} ran past the well and over the bridge. Soon {hero.he} was in front.",
                "At first {hero.name} was the last of all, but {hero.he} did not stop.",
            ),
            (
                "Then, {spot}, {friend.name} tripped over a root and fell.",
                "Suddenly somebody cried out. {friend.name} lay {spot} and held {friend.his} leg.",
            ),
            (
                "{hero.name} could see the finish. {hero.he} looked back, and {hero.he} stopped.",
                "{hero.name} could have run on. But {hero.he} turned around.",
            ),
            (
                '"Lean on me," {hero.he} said, and they walked the rest of the way together.',
                "{hero.he} took {friend.name} by the arm, and slowly, slowly they came in last.",
            ),
            (
                "{thing.the} went to someone else, but the loudest cheers were for these two.",
                '"The {thing.name} is yours," said the winner, "for you ran the better race."',
                '"You lost because of me," said {friend.name}. "No," said {hero.name}, "I won a '
                'friend."',
            ),
        ),
        ("There are better things than winning.", "Nobody wins alone."),
    ),
    Plot(
        "a strange noise",
        (
            (
                "One night, {hero.he} heard a strange noise. Tap, tap, tap, it went.",
                "Every night, when the lamps were out, there was a sound {spot}: scratch, scratch.",
                "One evening, something was humming {spot}.",
            ),
            (
                '"It is a ghost," said {elder.name} the {elder.kind}.',
                '"It is only the wind," said {elder.name} the {elder.kind}, but {elder.he} locked '
                "the door.",
            ),
            (
                "{hero.name} wanted to know. {hero.he} took {thing.a_red} and went out.",
                '"I will find out what it is," said {hero.name}, and {hero.he} picked up '
                "{hero.his} {thing.red}.",
            ),
            (
                "It was very dark. An owl called, and the shadows looked like giants.",
                "{hero.he} walked on tiptoe and held {hero.his} breath.",
                "The noise grew louder. {hero.his} hands were shaking.",
            ),
            (
                '"Who is there?" {hero.he} called. The noise stopped.',
                '"Come out!" said {hero.name}, as loudly as {hero.he} could.',
            ),
            (
                "And out came {friend.an_old}, who was just as frightened as {hero.he} was.",
                "There, {spot}, sat {friend.an_old} with big eyes.",
            ),
            (
                '"Please do not be angry," said {friend.the}. "My name is {friend.name}, and I '
                'cannot find my way home."',
                '"I am {friend.name}," said {friend.the}. "I was only trying to keep warm."',
                '"I am building {gift.a}," said {friend.the}. "It was meant to be a surprise. I '
                'am {friend.name}."',
            ),
            (
                '{hero.name} laughed with relief. "And I thought that you were a ghost!"',
                "They looked at each other, and then both began to laugh.",
            ),
            (
                "{hero.name} took {friend.name} home, and they drank hot milk by the fire.",
                "After that, {hero.name} came every night and brought [bread|soup|a blanket].",
            ),
        ),
        ("Most ghosts are only someone you have not met.", "Look first, and be afraid later."),
    ),
    Plot(
        "patience",
        (
            (
                "One day, {elder.name} the {elder.kind} gave {hero.him} a tiny seed.",
                "{spot}, {hero.he} found a small brown seed.",
            ),
            (
                '"What will it be?" asked {hero.name}. "Wait and see," said {elder.name} the '
                "{elder.kind}.",
                "{hero.he} put it into the ground, gave it water and sat down to wait.",
            ),
            (
                "The first day, nothing happened. The second day, nothing happened.",
                "A week went by, and the ground was still bare.",
            ),
            (
                '{friend.name}, {friend.an_old}, came by. "You are only watering mud," '
                "{friend.he} said.",
                '"Nothing will grow there," laughed {friend.name}, {friend.an_old}.',
            ),
            (
                "But {hero.name} came back every morning with a little water and a song.",
                '"I can wait," said {hero.name}. {hero.he} sat beside it and sang.',
            ),
            (
                "Rain came, and sun, and rain again.",
                "The nights were cold, so {hero.he} covered the place with straw.",
            ),
            (
                "Then, one morning, there was a small green leaf.",
                "And one day, when {hero.he} had almost stopped hoping, something green looked out "
                "of the earth.",
            ),
            (
                "It grew and grew, until it was [higher than the roof|the tallest tree of all].",
                "By summer it was full of [white flowers|red apples|golden pears].",
            ),
            (
                '"May I sit in the shade?" asked {friend.name}. "Of course," said {hero.name}. '
                '"There is room for two."',
                "{hero.name} gave {friend.name} the first fruit, and nobody laughed at mud again.",
            ),
        ),
        ("Good things grow slowly.", "Those who can wait will see the flowers."),
    ),
    Plot(
        "telling the truth",
        (
            (
                "{hero.his} friend {friend.name}, {friend.an_old}, had {thing.a_red} and was very "
                "proud of it.",
                "One day, {friend.name}, {friend.an_old}, let {hero.him} hold {friend.his} "
                "{thing.red}.",
            ),
            (
                "But {hero.name} was not careful. {thing.the} slipped, fell and broke.",
                "{hero.name} only wanted to look at it. Then — crack! — {thing.the} was broken.",
            ),
            (
                "Nobody had seen it. {hero.he} hid the pieces {spot} and ran home.",
                "{hero.he} was so frightened that {hero.he} put the pieces into a bag and hid it "
                "{spot}.",
            ),
            (
                '"Have you seen my {thing.name}?" asked {friend.name} the next day. "No," said '
                "{hero.name}, and {hero.his} ears grew hot.",
                '"Perhaps a thief took it," said {hero.name}. But {hero.he} could not look up.',
            ),
            (
                "That night {hero.he} could not eat, and {hero.he} could not sleep.",
                "The lie was like a stone in {hero.his} shoe. It hurt with every step.",
            ),
            (
                '{elder.name} the {elder.kind} looked at {hero.him}. "A heavy thing gets lighter '
                'when you say it," {elder.he} said.',
                '"What is wrong?" asked {elder.name}, {elder.the_old}. So {hero.he} told '
                "{elder.him} everything.",
            ),
            (
                '"I broke your {thing.name}," {hero.name} told {friend.name}. "I am sorry that I '
                'lied."',
                "In the morning, {hero.he} brought the pieces to {friend.name} and told the truth.",
            ),
            (
                '{friend.name} was silent for a long time. Then {friend.he} said, "Thank you for '
                'telling me."',
                '{friend.name} was angry at first. "But I am glad that you told me," {friend.he} '
                "said at last.",
            ),
            (
                "Together they put the pieces back, one by one. You could see the cracks, but it "
                "held.",
                "They mended {thing.the} with glue, and it was dearer to them than before.",
            ),
        ),
        ("The truth is hard for a minute; a lie is hard for a long time.", "Truth makes us light."),
    ),
    Plot(
        "a wish",
        (
            (
                "One day, {hero.he} found {thing.a_red} {spot}. When {hero.he} rubbed it, it began "
                "to glow.",
                'An old woman gave {hero.him} {thing.a_red}. "It grants one wish," she said. '
                '"Be careful."',
            ),
            (
                '"I wish for gold!" said {hero.name} at once.',
                '"I wish that everything I touch turns to cake!" said {hero.name}.',
                '"I wish to be as big as a house!" said {hero.name}.',
                '"I wish that it were summer forever!" said {hero.name}.',
            ),
            (
                "There was a flash of light, and the wish came true.",
                "{thing.the} shook, something went [bang|whoosh], and it was so.",
            ),
            (
                "At first it was wonderful. {hero.he} [danced|laughed|sang] all day long.",
                "For three days, {hero.he} was the happiest {hero.kind} in the world.",
            ),
            (
                "But soon {hero.he} could not play with {friend.name}, {friend.the_old}, any more.",
                "But {friend.name}, {hero.his} best friend, [grew sad and stayed away|was afraid "
                "of {hero.him} now].",
            ),
            (
                "{hero.he} sat {spot2} and cried. Nothing was as it had been.",
                '"This is not what I wanted," said {hero.name}.',
            ),
            (
                '{friend.name} came back all the same. "Perhaps {thing.the} can hear you," '
                '{friend.he} said. "Ask it kindly."',
                '"Give it back," said {friend.name}. "You do not need {thing.a}. You have me."',
            ),
            (
                '"Please," whispered {hero.name}, "make everything as it was before."',
                "{hero.name} held {thing.the} tight and wished the wish away.",
            ),
            (
                "{thing.the} went dark, and the world was [quiet|itself] again.",
                "The light went out, and {thing.the} was only {thing.a} now.",
            ),
        ),
        ("Be careful what you wish for.", "What we need most is often already there."),
    ),
)
