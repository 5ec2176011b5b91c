# ruff: noqa: E501 (word lists)
"""What the demo model's text is about: families of system prompts and questions, filled from word lists.

`{word}` in a template draws from WORDS. A family has openings ("You are ...", the part that the teacher and the student
both read), questions, and `hint`, which only the teacher reads.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

STYLES = (
    "Answer in short, simple sentences.", "Keep your answers short.", "Use simple words.", "Answer in a few sentences.", "Be kind and clear.",
    "Keep it short and friendly.", "Give short answers in plain English.", "Explain things simply.", "Be brief.", "Be polite and helpful.",
    "Always answer in a friendly way.", "You like short answers.", "", "", "",
)  # fmt: skip


def _words(text: str) -> list[str]:
    return [w.strip() for w in text.split(",")]


WORDS = {
    "name": _words(
        "Mia, Tom, Lily, Sam, Anna, Ben, Rosa, Max, Ella, Jack, Nora, Leo, Clara, Oscar, Ruth, Henry, Zoe, Peter, Maya, Felix, Grace, Hugo, Ivy, Daniel, "
        "Alice, George, Emma, Paul, Lucy, Martin, Sofia, Adam, Jane, Oliver, Kate, David, Molly, Simon, Laura, Frank"
    ),
    "trait": _words("friendly, kind, patient, cheerful, helpful, calm, wise, gentle, funny, careful, warm, clever, polite, quiet, old, young, curious, honest"),
    "place": _words(
        "Green Hill, Oak Street, River Lane, Sunny Bay, Maple Square, Stone Bridge, North Gate, Blue Lake, Cherry Road, Old Mill, Silver Beach, Pine Valley, "
        "Rose Garden, Market Street, Lighthouse Point, Willow Park, Apple Court, Star Harbor"
    ),
    "animal": _words(
        "fox, rabbit, bear, mouse, owl, cat, dog, hedgehog, turtle, squirrel, duck, frog, elephant, lion, penguin, horse, goat, sheep, pig, crow, whale, dolphin, "
        "monkey, giraffe, kangaroo, wolf, deer, badger, snail, bee, butterfly, ant, spider, parrot, eagle, swan, beaver, otter, seal, camel, zebra, tiger, "
        "panda, koala, donkey, rooster, hen, goose, bat, mole, crab, octopus, shark, salmon, lizard, snake, crocodile, hippo, rhino, gorilla"
    ),
    "adj": _words(
        "little, brave, lonely, clever, lazy, hungry, shy, proud, tiny, happy, sleepy, curious, grumpy, kind, old, young, silly, quiet, noisy, lost, gentle, "
        "greedy, honest, careful, clumsy, friendly, jealous, patient, playful, wise"
    ),
    "person": _words(
        "girl, boy, farmer, baker, king, queen, princess, prince, sailor, fisherman, teacher, doctor, miller, tailor, shepherd, painter, clockmaker, gardener, "
        "grandmother, grandfather, pirate, knight, wizard, shoemaker, carpenter, musician, postman, lighthouse keeper, librarian, dragon, robot, giant, fairy, "
        "ghost, snowman, mermaid, inventor, astronaut, firefighter, nurse"
    ),
    "event": _words(
        "finds a map, gets lost in the forest, makes a new friend, learns to swim, builds a boat, plants a magic seed, finds a golden key, is afraid of the dark, "
        "wants to fly, loses a hat, helps a stranger, bakes a cake, finds an old letter, climbs a mountain, saves the village, wins a race, tells a lie, "
        "finds a lost puppy, goes to the moon, hears a strange song, meets a dragon, shares the last piece of bread, forgets a birthday, learns to say sorry, "
        "opens a small shop, cannot sleep, finds a door in a tree, misses the train, looks after a baby bird, wants to be a king, follows a star, gets a "
        "surprise, sails across the sea, breaks a window, paints the sky, finds a treasure, learns to dance, waits for the snow, hides a secret, fixes an old clock"
    ),
    "setting": _words(
        "in a small village, by the sea, in a deep forest, on a farm, in a big city, in a castle, on an island, in the mountains, at school, in winter, in spring, "
        "on a rainy day, at night, in a garden, by a river, in the desert, on a ship, under the sea, in a library, at a market, on a train, in a cave"
    ),
    "dish": _words(
        "tomato soup, pancakes, apple pie, fried rice, roast chicken, pasta with tomato sauce, a cheese omelet, banana bread, vegetable curry, potato salad, pizza, "
        "mashed potatoes, a fruit salad, chocolate cake, lentil soup, scrambled eggs, chicken soup, a grilled cheese sandwich, rice pudding, meatballs, fish tacos, "
        "garlic bread, baked beans, carrot cake, a green salad, french toast, mushroom risotto, oatmeal, chili, lemonade, hot chocolate, cookies, muffins, "
        "a smoothie, stuffed peppers, vegetable stew, noodles, baked salmon, waffles, strawberry jam"
    ),
    "food": _words(
        "tomatoes, potatoes, carrots, onions, garlic, rice, pasta, eggs, cheese, chicken, fish, beans, lentils, mushrooms, spinach, cabbage, apples, bananas, lemons, "
        "butter, milk, honey, flour, bread, yogurt, corn, peas, peppers, pumpkin, oats, nuts, beef, salmon, zucchini, strawberries, oranges, cucumber, broccoli, "
        "chocolate, cinnamon"
    ),
    "plant": _words(
        "tomatoes, roses, carrots, lettuce, sunflowers, potatoes, strawberries, basil, mint, beans, peas, onions, garlic, tulips, lavender, pumpkins, cucumbers, "
        "peppers, apple trees, lemon trees, daisies, orchids, ferns, cactuses, spinach, radishes, blueberries, raspberries, parsley, rosemary, lilies, corn, "
        "cabbages, grapes, violets, daffodils, geraniums, thyme, zucchini, melons"
    ),
    "pest": _words("slugs, ants, aphids, birds, weeds, rabbits, snails, beetles, caterpillars, mice, moss, mold, frost, too much sun, strong wind, dry soil"),
    "science": _words(
        "gravity, the water cycle, photosynthesis, electricity, magnetism, sound, light, energy, heat, friction, an atom, a molecule, a cell, DNA, evolution, "
        "an ecosystem, the food chain, a fossil, a volcano, an earthquake, a rainbow, lightning, thunder, wind, the weather, the climate, a cloud, snow, ice, "
        "the Moon, the Sun, a planet, a star, a galaxy, a comet, the solar system, oxygen, carbon, water, air pressure, a battery, a lens, a lever, a wheel, a pulley, "
        "a magnet, a circuit, the heart, the brain, the lungs, the skin, a bone, a muscle, blood, digestion, a virus, bacteria, a vaccine, a vitamin, a seed, "
        "pollination, a desert, an ocean, a river, a glacier, a tide, a wave, a season, a shadow, a mirror, evaporation, freezing, boiling, rust, salt, a crystal, "
        "a mixture, an acid, speed, time, mass, density, recycling, pollution"
    ),
    "why": _words(
        "is the sky blue, do leaves fall in autumn, does ice float, do we sleep, is the sea salty, do birds fly south, do we have seasons, does the Moon change shape, "
        "do cats purr, do we dream, is fire hot, do stars shine, does metal feel cold, do we yawn, do plants need light, do onions make us cry, does bread rise, "
        "do we get hungry, do boats float, does it rain, do magnets stick, do dogs wag their tails, is snow white, do we sweat, do volcanoes erupt, do bees make honey, "
        "do we need water, does hair turn gray, do fish live in water, do we blink, does an echo happen, do apples fall down, is blood red, do we have two eyes, "
        "do we have bones, does the wind blow, do flowers smell sweet, do we feel pain, are bubbles round, do days get longer in summer"
    ),
    "product": _words(
        "lamp, kettle, phone, backpack, jacket, bicycle, blender, watch, radio, camera, chair, desk, tent, toaster, printer, keyboard, headphones case, umbrella, "
        "coffee machine, vacuum cleaner, fan, heater, mattress, toy train, board game, guitar, pair of shoes, sweater, clock, mirror, bookshelf, suitcase, water "
        "bottle, flashlight, drill, lawn mower, teapot, frying pan, scarf, pair of boots"
    ),
    "problem": _words(
        "does not turn on, is broken, is too small, is too big, came in the wrong color, makes a strange noise, is missing a part, stopped working, arrived late, "
        "has not arrived, is too heavy, is scratched, smells bad, gets too hot, came without instructions, leaks, has a hole, is the wrong model, does not fit, "
        "was damaged in the mail"
    ),
    "city": _words(
        "Paris, London, Rome, Berlin, Madrid, Tokyo, New York, Sydney, Cairo, Athens, Vienna, Prague, Lisbon, Dublin, Amsterdam, Istanbul, Moscow, Beijing, Delhi, "
        "Bangkok, Singapore, Toronto, Mexico City, Rio de Janeiro, Buenos Aires, Lima, Cape Town, Nairobi, Marrakesh, Venice, Florence, Barcelona, Edinburgh, "
        "Copenhagen, Stockholm, Oslo, Helsinki, Budapest, Kyoto, San Francisco, Chicago, Boston, Hong Kong, Seoul, Taipei"
    ),
    "country": _words(
        "France, Italy, Spain, Japan, China, India, Egypt, Greece, Norway, Sweden, Brazil, Peru, Mexico, Canada, Kenya, Morocco, Australia, New Zealand, Turkey, "
        "Germany, Portugal, Ireland, Scotland, Iceland, Finland, Thailand, Vietnam, Korea, Argentina, Chile, Poland, Austria, Switzerland, the Netherlands, Denmark"
    ),
    "thing": _words(
        "the moon, the rain, a cat, a dog, the sea, a tree, the wind, winter, spring, summer, autumn, a star, my mother, a friend, a rose, a bee, bread, tea, sleep, "
        "a train, a boat, snow, the sun, a river, a mountain, a bird, home, a book, a song, a clock, night, morning, a garden, a mouse, a frog, a kite, a hat, "
        "shoes, a cake, love, a cloud, the color blue, a candle, a bear, music, a dream, a smile, an owl, a bridge, the stars"
    ),
    "history": _words(
        "the Roman Empire, ancient Egypt, the pyramids, ancient Greece, the Middle Ages, the Renaissance, the printing press, the French Revolution, the American "
        "Revolution, the Industrial Revolution, the First World War, the Second World War, the Great Wall of China, the Silk Road, the Vikings, the Black Death, the "
        "Age of Exploration, the steam engine, the first railways, the Moon landing, the Cold War, the fall of the Berlin Wall, the Olympic Games, the invention of "
        "paper, the discovery of America, the Aztecs, the Incas, the Maya, the Ottoman Empire, the British Empire, knights, castles, samurai, the Bronze Age, the "
        "Stone Age, the Ice Age, the first cities, the first airplane, the telephone, the light bulb"
    ),
    "figure": _words(
        "Julius Caesar, Cleopatra, Alexander the Great, Napoleon, Abraham Lincoln, George Washington, Queen Victoria, Leonardo da Vinci, Isaac Newton, Albert Einstein, "
        "Marie Curie, Charles Darwin, Galileo, Christopher Columbus, Marco Polo, Joan of Arc, Martin Luther King, Nelson Mandela, Mahatma Gandhi, Shakespeare, "
        "Mozart, Beethoven, Aristotle, Socrates, Plato, Florence Nightingale, Thomas Edison, the Wright brothers, Amelia Earhart, Neil Armstrong, Rosa Parks, "
        "Anne Frank, Genghis Khan, Confucius, Johannes Gutenberg, James Watt, Magellan, Vincent van Gogh, Michelangelo, Louis Pasteur"
    ),
    "goal": _words(
        "sleep better, eat more vegetables, drink more water, get fit, feel less stressed, wake up earlier, save money, read more books, learn a language, make new "
        "friends, be more patient, stop worrying, stay calm, be on time, clean my room, remember names, feel less tired, walk more, spend less time on my phone, "
        "write a diary, be a better listener, learn to cook, get over a cold, relax in the evening, be more confident, study for a test, speak in public, "
        "keep a promise, start running, stretch my back, take a break, plan my week"
    ),
    "feeling": _words("sad, happy, tired, nervous, lonely, proud, angry, bored, excited, worried, confused, jealous, calm, scared, hopeful, grateful, shy, stressed"),
    "reason": _words(
        "I have a test tomorrow, my friend moved away, I lost my keys, it is raining, I won a game, I got a new job, my cat is sick, I cannot sleep, I am moving to a "
        "new city, I made a mistake, it is my birthday, I had a fight with my brother, I finished a long book, I am starting a new school, I missed the bus, my "
        "garden is growing, nobody called me, I have too much work, I am going on a trip, I learned something new, my team lost, I have to give a talk, "
        "my grandmother is visiting, I forgot a birthday"
    ),
    "gift": _words(
        "a book, a scarf, flowers, a cake, a watch, a toy, a plant, a letter, a bicycle, tickets, a painting, a cup, chocolates, a puzzle, a sweater, a camera, "
        "help with the move, a lovely dinner, a ride home, good advice"
    ),
    "who": _words("my friend, my mother, my father, my teacher, my neighbor, my boss, my sister, my brother, my grandmother, my aunt, my uncle, a customer, the doctor, my team, my cousin"),
    "occasion": _words("a birthday, a wedding, a new baby, a new job, a graduation, the new year, a holiday, an illness, a farewell, a house move, a dinner, a meeting, a party, a lost parcel"),
    "word": _words(
        "brave, ancient, fragile, generous, curious, enormous, gentle, honest, journey, knowledge, liberty, memory, neighbor, opinion, patience, quarrel, rare, "
        "sincere, tradition, urgent, vanish, wander, yearn, adventure, balance, comfort, delight, effort, famous, grateful, harvest, imagine, jealous, kindness, "
        "lonely, mystery, noble, obey, promise, quiet, respect, silence, treasure, unique, valuable, wisdom, humble, gloomy, cautious, reluctant, abundant, scarce"
    ),
    "sport": _words(
        "chess, swimming, running, football, tennis, basketball, drawing, painting, the piano, the guitar, singing, dancing, photography, knitting, fishing, cycling, "
        "yoga, skating, skiing, climbing, writing, juggling, gardening, sailing, baking, archery, badminton, table tennis, hiking, pottery, the violin, the drums, "
        "origami, sewing, bird watching, camping"
    ),
    "repair": _words(
        "a dripping tap, a squeaky door, a flat tire, a loose screw, a blocked sink, a broken chair, a hole in the wall, a cracked tile, a noisy fridge, a stuck "
        "window, a torn curtain, a wobbly table, a burned pan, a rusty gate, a dead lamp, a slow drain, peeling paint, a stained carpet, a leaking roof, a lost button, "
        "a jammed lock, a dirty oven, a foggy mirror, a broken zipper, a scratched floor"
    ),
    "tool": _words("hammer, saw, drill, screwdriver, wrench, ladder, paint brush, tape measure, level, pair of pliers, nail, screw, glue, sandpaper, bucket, rope"),
    "topic": _words(
        "dragons, the sea, space, cooking, animals, friendship, history, robots, detectives, gardens, dinosaurs, pirates, music, school, magic, the weather, horses, "
        "trains, painting, mountains, love, war and peace, inventions, dreams, ghosts, forests, travel, sports, kings and queens, insects, money, birds"
    ),
    "sky": _words(
        "Mercury, Venus, Mars, Jupiter, Saturn, Uranus, Neptune, Pluto, the Moon, the Sun, the Milky Way, a black hole, a comet, an asteroid, a shooting star, a "
        "satellite, a rocket, a telescope, a space station, an eclipse, the North Star, the Big Dipper, a nebula, a supernova, the Earth, an astronaut, a meteor, "
        "a light year, zero gravity, a moon rover"
    ),
    "job": _words(
        "a firefighter, a nurse, a doctor, a teacher, a farmer, a baker, a pilot, a sailor, a carpenter, a plumber, a police officer, a judge, a writer, a painter, "
        "an actor, a singer, a scientist, an engineer, a programmer, a librarian, a bus driver, a chef, a gardener, a vet, a dentist, a builder, a photographer, "
        "a journalist, a mechanic, a tailor, a waiter, a postman"
    ),
    "time": _words("yesterday, last week, two weeks ago, a month ago, on Monday, on Friday, three days ago, in the sale, last summer, online, for a friend, as a gift"),
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    openings: tuple[str, ...]
    questions: tuple[str, ...]
    hint: str = "Answer in two to four short, simple sentences of plain text."
    weight: float = 1.0  # share of the requests


STORY_HINT = "You write very short stories for children in plain English."
STORY_REQUEST_HINT = "Write only one short paragraph."


def _roles(*roles: str, also: tuple[str, ...] = ()) -> tuple[str, ...]:
    """System prompts for "cook who ..." roles: with and without a name, a trait, a place."""
    shapes = (
        "You are a {trait} %s.",
        "You are {name}, a {trait} %s.",
        "You are {name}, the %s.",
        "You are the %s of {place}.",
        "You are {name}, the {trait} %s at {place}.",
        "You are a %s.",
    )
    return (*(shape % role for shape in shapes for role in roles), *also)


FAMILIES = {
    "storyteller": Family(
        _roles("storyteller for children", "storyteller", "grandparent who tells bedtime stories", also=("You tell short stories to children.", "You write short bedtime stories.")),
        ("Tell me a story about a {adj} {animal}.", "Tell me a story about a {adj} {person} who {event}.", "Tell me about a {animal} who {event}.", "Can you tell a story {setting}?",
         "I want a story about a {animal} and a {person}.", "Tell me a bedtime story about a {adj} {animal} {setting}.", "Write a short story about a {person} {setting}."),
        STORY_HINT,
    ),
    "cook": Family(
        _roles("cook", "home cook", "chef", "baker", "cooking teacher", also=("You help people cook at home.",)),
        ("How do I make {dish}?", "What goes well with {food}?", "What can I cook with {food} and {food}?", "How do I store {food}?", "How long does it take to make {dish}?",
         "What can I use instead of {food}?", "Can you help me with {dish}?", "What should I make for dinner with {food}?", "Is {dish} hard to make?"),
    ),
    "gardener": Family(
        _roles("gardener", "gardener who helps beginners", "plant shop owner", "farmer", also=("You answer questions about plants and gardens.",)),
        ("How do I grow {plant}?", "When should I plant {plant}?", "How often should I water {plant}?", "Why are the leaves of my {plant} turning yellow?", "How do I protect {plant} from {pest}?",
         "Can I grow {plant} in a pot?", "Do {plant} need a lot of sun?", "What grows well next to {plant}?"),
    ),
    "science": Family(
        _roles("science teacher", "teacher for young children", "scientist who explains things to children", also=("You explain science to children.",)),
        ("What is {science}?", "Why {why}?", "Can you explain {science} to a child?", "How does {science} work?", "Tell me something about {science}.", "Why is {science} important?",
         "Give me an example of {science}."),
        weight=1.5,
    ),
    "shop": Family(
        _roles("shop assistant", "help desk agent for an online shop", "customer service agent", "store manager", also=("You answer customers of the {place} Store.", "You work at the help desk of {place} Shop.")),
        ("My {product} {problem}. What should I do?", "I bought a {product} {time} and it {problem}.", "Can I return a {product} that I bought {time}?", "Do you have a {product} in blue?",
         "Where is my order? I ordered a {product} {time}.", "How do I clean my {product}?", "Which {product} is good for a beginner?", "How long does delivery of a {product} take?",
         "Can I change my order from a {product} to a {product}?"),
    ),
    "travel": Family(
        _roles("travel guide", "tour guide", "travel agent", "hotel receptionist", also=("You help people plan trips.",)),
        ("What should I see in {city}?", "When is the best time to visit {country}?", "What food should I try in {country}?", "How do I get around in {city}?", "What should I pack for a trip to {country}?",
         "Is {city} good for children?", "I have one day in {city}. What should I do?", "Tell me about {city}.", "What is {country} famous for?"),
    ),
    "poet": Family(
        _roles("poet", "poet who writes short rhymes", "writer of songs for children", also=("You write short poems.",)),
        ("Write a short poem about {thing}.", "Write four lines about {thing}.", "Can you write a rhyme about {thing}?", "I need a poem about {thing} and {thing}."),
        "Write a poem of four short lines that rhyme.",
    ),
    "history": Family(
        _roles("history teacher", "museum guide", "historian", also=("You answer questions about history.",)),
        ("What was {history}?", "Tell me about {history}.", "Why was {history} important?", "Who was {figure}?", "What did {figure} do?", "Why do we remember {figure}?", "When was {history}?",
         "How did people live in the time of {history}?"),
    ),
    "coach": Family(
        _roles("life coach", "health coach", "school counselor", "good listener", also=("You give people simple advice.",)),
        ("How can I {goal}?", "I want to {goal}. Where do I start?", "Why is it hard to {goal}?", "Give me one tip to {goal}.", "I feel {feeling} because {reason}.", "What can I do when I feel {feeling}?"),
        weight=1.3,
    ),
    "friend": Family(
        _roles("friend", "neighbor who likes to chat", "pen friend", "grandmother", "companion", also=("You are a good friend who likes to talk.",)),
        ("I feel {feeling} today.", "I am {feeling} because {reason}.", "Guess what: {reason}.", "What do you think about {thing}?", "Do you like {thing}?", "What is your favorite {animal} story?",
         "Tell me a joke about a {animal}.", "What should I do today? I feel {feeling}."),
        "Answer like a friend, in two or three short, simple sentences.", 1.3,
    ),
    "zoo": Family(
        _roles("zoo keeper", "vet", "animal expert", "park ranger", also=("You answer questions about animals.",)),
        ("What does a {animal} eat?", "Where does a {animal} live?", "How long does a {animal} live?", "How does a {animal} sleep?", "Is a {animal} dangerous?", "What is special about a {animal}?",
         "What is the difference between a {animal} and a {animal}?", "How does a {animal} protect itself?", "Tell me a fun fact about the {animal}.", "How do I help a hurt {animal}?"),
        weight=1.3,
    ),
    "letters": Family(
        _roles("secretary", "writing helper", "assistant who writes letters", also=("You write short notes and letters.",)),
        ("Write a thank-you note to {who} for {gift}.", "Write a short message to {who} about {occasion}.", "Help me invite {who} to dinner.", "Write a short note to say sorry to {who} because {reason}.",
         "What should I write to {who} for {occasion}?"),
        "Write a short note of three or four simple sentences.",
    ),
    "words": Family(
        _roles("English teacher", "language teacher", "dictionary helper", also=("You explain English words.",)),
        ("What does the word {word} mean?", "Use the word {word} in a sentence.", "What is the opposite of {word}?", "Give me a word that means the same as {word}.", "When do I use the word {word}?",
         "What is the difference between {word} and {word}?"),
    ),
    "hobby": Family(
        _roles("sports coach", "music teacher", "hobby teacher", "trainer", also=("You help people with their hobbies.",)),
        ("How do I get better at {sport}?", "How do I start with {sport}?", "What do I need for {sport}?", "Is {sport} hard to learn?", "Why do people like {sport}?", "How often should I practice {sport}?",
         "I like {sport} and {sport}. Which one should I choose?"),
    ),
    "handyman": Family(
        _roles("handyman", "builder", "repair shop owner", "neighbor who fixes things", also=("You help people fix things at home.",)),
        ("How do I fix {repair}?", "I have {repair}. What should I do?", "What is a {tool} for?", "Which tools do I need to fix {repair}?", "How do I use a {tool} safely?", "Is it hard to fix {repair}?"),
    ),
    "library": Family(
        _roles("librarian", "bookshop owner", "book lover", also=("You help people find books.",)),
        ("Can you suggest a book about {topic}?", "I like stories about {topic}. What should I read?", "What makes a good story about {topic}?", "My child likes {topic}. Which book is good?",
         "Tell me about a book with a {animal} in it.", "Why do people read about {topic}?"),
        weight=0.7,
    ),
    "space": Family(
        _roles("astronomer", "space guide", "astronaut", "planetarium guide", also=("You tell people about space.",)),
        ("What is {sky}?", "Tell me about {sky}.", "How far away is {sky}?", "Can I see {sky} at night?", "What would happen if I went to {sky}?", "How do we know about {sky}?"),
        weight=0.7,
    ),
    "jobs": Family(
        _roles("career adviser", "school teacher", "radio host", also=("You explain jobs to children.",)),
        ("What does {job} do?", "How do I become {job}?", "Is it hard to be {job}?", "What is a day like for {job}?", "Why do we need {job}?", "What tools does {job} use?"),
        weight=0.7,
    ),
}  # fmt: skip

EXAMPLES = {  # what the teacher sees before the question, so that its answers are short and plain; not in the text
    "cook": (
        ("How do I boil an egg?", "Put the egg in a small pot and cover it with cold water. Bring the water to a boil and wait eight minutes. Then cool the egg in cold water and peel it."),
        ("What goes well with plums?", "Plums taste good with yogurt, nuts and a little honey. You can also bake them in a cake. Try them with cinnamon."),
    ),
    "gardener": (
        ("How do I grow beets?", "Plant the seeds in loose soil in a sunny place. Water them twice a week. You can pull the beets out after about two months."),
        ("Why is my ivy so dry?", "Your ivy needs more water. Check the soil with your finger every few days. If it feels dry, water it slowly."),
    ),
    "science": (
        ("What is a spring?", "A spring is a piece of metal that is bent in circles. When you push it or pull it, it goes back to its first shape. You can find springs in beds and pens."),
        ("Why do balls bounce?", "When a ball hits the floor, it gets a little flat. Then it quickly goes back to its round shape. That push sends the ball up again."),
    ),
    "shop": (
        ("My stapler is broken. What should I do?", "I am sorry to hear that. Please send the stapler back to us in its box. We will mail you a new one this week."),
        ("Do you have a pillow in green?", "Yes, we have green pillows in two sizes. The small one costs ten dollars and the big one costs fifteen. Would you like me to order one for you?"),
    ),
    "travel": (
        ("What should I see in Naples?", "Start with the old town and its narrow streets. Then walk along the sea and eat a pizza. If you have time, take a train to the ruins of Pompeii."),
        ("When is the best time to visit Cuba?", "The best time to visit Cuba is from December to April. It is warm and dry then. Bring a hat and light clothes."),
    ),
    "poet": (
        ("Write a short poem about the rain.", "The rain is tapping on the glass,\nIt washes every blade of grass.\nIt fills the river and the well,\nAnd leaves behind a lovely smell."),
        ("Write four lines about a cat.", "My cat is sleeping on my bed,\nA velvet paw beside his head.\nHe hunts for mice in every dream,\nAnd wakes to ask me for some cream."),
    ),
    "history": (
        ("What was the Gold Rush?", "In 1848, people found gold in California. Thousands of people traveled there to get rich. Most of them found little gold, but new towns grew fast."),
        ("Who was Louis Braille?", "Louis Braille was a French teacher who lived in the 1800s. He could not see. He made a way of writing with small dots that blind people can read with their fingers."),
    ),
    "coach": (
        ("How can I eat less sugar?", "Start with one small change. Drink water instead of soda, and keep fruit on the table. After a few weeks you will miss the sugar less."),
        ("I feel upset because my plan failed.", "That is hard, and it is fine to feel upset. Take a walk and a deep breath. Then write down one thing that you can try tomorrow."),
    ),
    "friend": (
        ("I feel cold today.", "Oh no, put on a warm sweater! I like to drink hot tea when I am cold. Shall we make some together?"),
        ("Do you like rabbits?", "Yes, I love rabbits! They have soft ears and they jump so high. Did you ever have one?"),
    ),
    "zoo": (
        ("What does a moose eat?", "A moose eats leaves, twigs and water plants. In winter it eats bark from trees. A big moose can eat more than twenty kilos of food a day."),
        ("How does a seahorse swim?", "A seahorse swims standing up. It moves a small fin on its back very fast. It is a slow swimmer, so it often holds on to plants with its tail."),
    ),
    "letters": (
        ("Write a thank-you note to my coach for a ball.", "Dear Coach, thank you so much for the ball. I play with it every day after school. It was very kind of you to think of me. See you on Saturday!"),
        ("Write a short message to my roommate about a visit.", "Hi Joe, my parents are coming to visit on Sunday. We will have lunch at noon, and you are welcome to join us. Let me know if you can come."),
    ),
    "words": (
        ("What does the word rapid mean?", 'Rapid means very fast. For example, a rapid river moves quickly. You can say, "She made rapid progress in math."'),
        ("What is the opposite of tidy?", "The opposite of tidy is messy. A tidy room is clean and in order. A messy room has things all over the floor."),
    ),
    "hobby": (
        ("How do I get better at darts?", "Practice a little every day and always stand in the same place. Keep your arm steady and look at the target. Count your points so that you can see how you improve."),
        ("Is bowling hard to learn?", "Bowling is easy to start. Pick a ball that is not too heavy and roll it slowly. After a few games you will hit more pins."),
    ),
    "handyman": (
        ("How do I fix a loose handle?", "First, find the screw that holds the handle. Turn it to the right with a screwdriver until it is tight. If the screw is too old, buy a new one."),
        ("What is a clamp for?", "A clamp holds two things together. You use it when you glue wood. Keep it closed until the glue is dry."),
    ),
    "library": (
        ("Can you suggest a book about sailors?", 'You could read "Treasure Island" by Robert Louis Stevenson. It is about a boy, a ship and a map. It is exciting and not too long.'),
        ("Why do people read about castles?", "People like castles because they are old and full of secrets. In a book you can walk through the halls and meet a king. It feels like an adventure."),
    ),
    "space": (
        ("What is Titan?", "Titan is the largest moon of Saturn. It has thick air and lakes of liquid gas. It is very cold there."),
        ("How far away is Halley's Comet?", "Halley's Comet moves all the time, so the distance changes. Now it is far beyond Neptune. It will come back close to us in 2061."),
    ),
    "jobs": (
        ("What does a barber do?", "A barber cuts hair and trims beards. He uses scissors, a comb and a razor. He also talks with the people in his chair."),
        ("How do I become a florist?", "Start by learning the names of flowers. Ask a flower shop if you can help there. With practice you will learn to make beautiful bouquets."),
    ),
}  # fmt: skip

STORY_REQUESTS = (
    "Write a short story about a {adj} {animal} who {event}.", "Write a short story about a {adj} {person} who {event}.", "Write a short story about a {animal} and a {animal} {setting}.",
    "Write a short story about a {person} and a {animal} {setting}.", "Write a short story about {name}, who {event}.", "Write a short story about {name} and {name} {setting}.",
    "Write a short story {setting} about a {adj} {person}.", "Write a short story about a {person} who {event} {setting}.", "Write a short story about {name}, a {adj} {animal}.",
)  # fmt: skip


def fill(template: str, rng: random.Random) -> str:
    """Draw the words of a template and mend the articles ("a owl")."""
    text = re.sub(r"\{(\w+)\}", lambda m: rng.choice(WORDS[m[1]]), template)
    return re.sub(r"\b([Aa]) (?=hon|[aeiouAEIOU](?!ni|ne))", r"\1n ", text)


def system_prompt(family: str, rng: random.Random) -> str:
    return f"{fill(rng.choice(FAMILIES[family].openings), rng)} {rng.choice(STYLES)}".strip()


def question(family: str, rng: random.Random) -> str:
    return fill(rng.choice(FAMILIES[family].questions), rng)
