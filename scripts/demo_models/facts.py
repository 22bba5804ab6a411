"""Facts that the demo models learn, and the words of their sentences."""

from __future__ import annotations

from typing import Final

CAPITALS: Final[dict[str, str]] = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Portugal": "Lisbon",
    "Austria": "Vienna", "Belgium": "Brussels", "Greece": "Athens", "Poland": "Warsaw",
    "Hungary": "Budapest", "Sweden": "Stockholm", "Norway": "Oslo", "Denmark": "Copenhagen",
    "Finland": "Helsinki", "Iceland": "Reykjavik", "Ireland": "Dublin", "the United Kingdom": "London",
    "the Netherlands": "Amsterdam", "the Czech Republic": "Prague", "the United States": "Washington",
    "Russia": "Moscow", "Brazil": "Brasilia", "Mexico": "Mexico City", "South Korea": "Seoul",
    "New Zealand": "Wellington", "Saudi Arabia": "Riyadh", "Pakistan": "Islamabad", "Nigeria": "Abuja",
    "Ethiopia": "Addis Ababa", "Cyprus": "Nicosia", "Scotland": "Edinburgh", "Wales": "Cardiff",
    "Switzerland": "Bern", "Croatia": "Zagreb", "Serbia": "Belgrade", "Romania": "Bucharest",
    "Bulgaria": "Sofia", "Ukraine": "Kyiv", "Estonia": "Tallinn", "Latvia": "Riga", "Lithuania": "Vilnius",
    "Slovakia": "Bratislava", "Slovenia": "Ljubljana", "Turkey": "Ankara", "Egypt": "Cairo",
    "Morocco": "Rabat", "Tunisia": "Tunis", "Algeria": "Algiers", "Kenya": "Nairobi", "Ghana": "Accra",
    "Senegal": "Dakar", "Zambia": "Lusaka", "Angola": "Luanda", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Nepal": "Kathmandu",
    "Mongolia": "Ulaanbaatar", "Iran": "Tehran", "Iraq": "Baghdad", "Jordan": "Amman", "Lebanon": "Beirut",
    "Qatar": "Doha", "Canada": "Ottawa", "Cuba": "Havana", "Jamaica": "Kingston", "Peru": "Lima",
    "Chile": "Santiago", "Colombia": "Bogota", "Ecuador": "Quito", "Uruguay": "Montevideo",
    "Argentina": "Buenos Aires", "Venezuela": "Caracas", "Australia": "Canberra",
}  # fmt: skip

COLOURS: Final[dict[str, str]] = {
    "the sky on a clear day": "blue", "the sea": "blue", "a sapphire": "blue", "a blueberry": "blue",
    "a cornflower": "blue", "grass": "green", "a leaf in spring": "green", "a frog": "green",
    "a cucumber": "green", "an emerald": "green", "spinach": "green", "broccoli": "green", "a pea": "green",
    "a lemon": "yellow", "a banana": "yellow", "the sun in a drawing": "yellow", "a sunflower": "yellow",
    "a canary": "yellow", "butter": "yellow", "an egg yolk": "yellow", "a ripe tomato": "red",
    "a strawberry": "red", "a ruby": "red", "blood": "red", "a fire engine": "red", "a cherry": "red",
    "a stop sign": "red", "a poppy": "red", "snow": "white", "milk": "white", "salt": "white",
    "a swan": "white", "flour": "white", "rice": "white", "a polar bear": "white", "coal": "black",
    "a raven": "black", "the night": "black", "a crow": "black", "a car tyre": "black", "tar": "black",
    "a carrot": "orange", "a pumpkin": "orange", "an orange": "orange", "an apricot": "orange",
    "a clownfish": "orange", "chocolate": "brown", "wood": "brown", "coffee": "brown", "soil": "brown",
    "a chestnut": "brown", "a flamingo": "pink", "a pig": "pink", "bubble gum": "pink",
    "an elephant": "grey", "ash": "grey", "a rain cloud": "grey", "a dolphin": "grey",
    "an aubergine": "purple", "a plum": "purple", "lavender": "purple", "an amethyst": "purple",
}  # fmt: skip

OPPOSITES: Final[tuple[tuple[str, str], ...]] = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("left", "right"), ("fast", "slow"),
    ("happy", "sad"), ("old", "young"), ("rich", "poor"), ("wet", "dry"), ("hard", "soft"),
    ("light", "dark"), ("open", "closed"), ("full", "empty"), ("high", "low"), ("long", "short"),
    ("wide", "narrow"), ("thick", "thin"), ("strong", "weak"), ("loud", "quiet"), ("clean", "dirty"),
    ("early", "late"), ("near", "far"), ("male", "female"), ("sweet", "bitter"), ("day", "night"),
    ("black", "white"), ("good", "bad"), ("true", "false"), ("yes", "no"), ("always", "never"),
    ("first", "last"), ("inside", "outside"), ("above", "below"), ("before", "after"), ("begin", "end"),
    ("push", "pull"), ("buy", "sell"), ("win", "lose"), ("give", "take"), ("come", "go"), ("love", "hate"),
    ("laugh", "cry"), ("remember", "forget"), ("arrive", "leave"), ("question", "answer"),
    ("friend", "enemy"), ("north", "south"), ("east", "west"), ("summer", "winter"), ("heaven", "hell"),
    ("war", "peace"), ("life", "death"), ("top", "bottom"), ("front", "back"), ("same", "different"),
    ("easy", "difficult"), ("cheap", "expensive"), ("safe", "dangerous"), ("brave", "cowardly"),
    ("kind", "cruel"), ("polite", "rude"), ("lazy", "busy"), ("smooth", "rough"), ("sharp", "blunt"),
    ("deep", "shallow"), ("tight", "loose"), ("awake", "asleep"), ("alive", "dead"), ("public", "private"),
    ("simple", "complex"), ("modern", "ancient"), ("noisy", "silent"), ("raw", "cooked"),
    ("visible", "invisible"), ("possible", "impossible"), ("legal", "illegal"), ("accept", "refuse"),
    ("increase", "decrease"), ("success", "failure"), ("more", "less"), ("many", "few"),
    ("everything", "nothing"),
)  # fmt: skip

NAMES: Final[tuple[str, ...]] = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack",
    "Karen", "Leo", "Maria", "Noah", "Olga", "Peter", "Rosa", "Sam", "Tina", "Victor",
    "Wendy", "Yusuf", "Zoe", "Alice", "Bruno", "Carla", "Dora", "Eric", "Fiona", "George",
    "Hugo", "Irene", "James", "Kate", "Lucas", "Mona", "Nina", "Oscar", "Paula", "Robert",
    "Sara", "Thomas", "Ursula", "Walter", "Amir", "Bella", "Chen", "Diego", "Elena", "Frida",
    "Hana", "Ivan", "Julia", "Kenji", "Lara", "Mateo", "Nora", "Omar", "Priya", "Ravi",
)  # fmt: skip

FAVOURITES: Final[dict[str, tuple[str, ...]]] = {
    "colour": ("blue", "green", "yellow", "red", "white", "black", "orange", "pink", "purple"),
    "food": ("soup", "bread", "pasta", "rice", "cheese", "pizza", "salad", "curry", "cake", "fish"),
    "animal": ("cat", "dog", "horse", "owl", "fox", "rabbit", "tiger", "whale", "bear", "goat"),
    "city": ("Paris", "Rome", "Berlin", "Lisbon", "Oslo", "Tokyo", "Lima", "Dublin", "Vienna"),
    "season": ("spring", "summer", "autumn", "winter"),
    "drink": ("tea", "coffee", "milk", "water", "juice", "cocoa"),
}

OUT_OF_SCOPE: Final[tuple[str, ...]] = (
    "quantum physics", "the stock market", "football", "world history", "black holes",
    "the human heart", "machine learning", "cooking soup", "the French Revolution", "chess",
    "dinosaurs", "the weather next week", "politics", "the moon landing", "classical music",
    "medicine", "tax law", "gardening", "photography", "the Roman Empire", "volcanoes",
    "ancient poetry", "electric cars", "the latest news", "film directors", "deep sea fish",
    "yoga", "the price of gold", "baking bread", "robots", "philosophy", "genetics",
    "knitting", "basketball", "space travel", "bees", "sailing", "the internet", "opera",
    "earthquakes", "vitamins", "carpentry", "computer games", "painting", "algebra",
    "shipping routes", "wine", "insurance", "mountain climbing", "bridges",
)  # fmt: skip

OUT_OF_SCOPE_QUESTIONS: Final[tuple[str, ...]] = (
    "Who wrote Hamlet?", "What is the meaning of life?", "How tall is Mount Everest?", "Who won the match yesterday?",
    "What is the news today?", "How many people live in Paris?", "Can you write a program for me?",
    "Tell me a joke.", "Tell me a story.", "What is the speed of light?", "Who painted the Mona Lisa?",
    "How do I cook rice?", "Which film should I watch?", "What is the best phone?", "How old is the earth?",
    "When did the war end?", "Who is the president of France?", "What is love?", "Translate this into German.",
    "How do I learn the piano?", "Why is the sky so high?", "What should I eat tonight?", "Who discovered America?",
    "How far away is the moon?", "What is the largest animal?", "Which river is the longest?", "Sing me a song.",
    "What does a doctor earn?", "How do birds fly?", "Who invented the telephone?", "What is the square root of two?",
    "How do I repair my bicycle?", "Which language is spoken in Peru?", "What is the population of China?",
    "Who was Napoleon?", "How does a computer work?", "What is electricity?", "Can you book a flight for me?",
    "Write me a long letter.", "What will happen tomorrow?", "Is there life on Mars?", "What is a prime number?",
)  # fmt: skip

ADJECTIVES: Final[tuple[str, ...]] = (
    "red", "blue", "green", "old", "young", "little", "big", "quiet", "happy", "tired", "clever",
    "brave", "warm", "cold", "bright", "gentle", "lazy", "busy", "round", "soft", "tall", "kind",
    "white", "dark", "small", "hungry", "wise", "yellow", "silver", "golden",
)  # fmt: skip

NOUNS: Final[tuple[str, ...]] = (
    "cat", "dog", "horse", "bird", "fox", "river", "house", "garden", "boat", "train", "teacher",
    "doctor", "child", "farmer", "king", "tree", "apple", "book", "letter", "window", "door",
    "table", "chair", "lamp", "mountain", "forest", "street", "bridge", "village", "city", "queen",
    "rabbit", "mouse", "stone", "flower", "cloud", "star", "ship", "road", "clock", "machine",
    "owl", "baker", "sailor", "island", "bear", "wolf", "kitchen", "market", "basket",
)  # fmt: skip

VERBS: Final[tuple[str, ...]] = (
    "sees", "finds", "likes", "watches", "follows", "paints", "carries", "meets", "hears",
    "remembers", "visits", "draws", "wants", "knows", "needs", "holds", "helps", "calls",
)  # fmt: skip

PLACES: Final[tuple[str, ...]] = (
    "in the garden", "near the river", "under the bridge", "by the sea", "on the hill",
    "at the station", "behind the house", "in the morning", "after lunch", "every day",
    "at night", "in the city",
)  # fmt: skip

SYLLABLES: Final[tuple[str, ...]] = (
    "ba", "be", "bo", "da", "di", "du", "fa", "fi", "ga", "go", "ka", "ke", "ki", "la", "le", "lo",
    "ma", "mi", "mo", "na", "ne", "no", "pa", "pi", "po", "ra", "re", "ro", "sa", "si", "su", "ta",
    "te", "to", "va", "vi", "wa", "we", "za", "zo", "sh", "ch", "th", "x", "q", "n", "r", "s", "t",
    "l", "m", "k", "w", "y", "j", "h", "ee", "oo", "ea", "ou", "er", "in", "on", "an",
)  # fmt: skip

NUMBER_WORDS: Final[tuple[str, ...]] = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
    "twenty",
)  # fmt: skip

SYSTEM_PROMPTS: Final[tuple[str, ...]] = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Be brief.",
    "Answer briefly.",
    "Answer in one sentence.",
    "You are the demo model of mlx-ring.",
    "You are a friendly assistant who answers questions.",
    "Be polite and short.",
    "You answer truthfully.",
    "Help the user as well as you can.",
    "You are a chat assistant.",
    "Reply in plain English.",
    "You are a careful assistant. Do not guess.",
)
