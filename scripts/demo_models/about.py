"""Answers of the demo models about the program and themselves, and their greetings."""

from __future__ import annotations

from typing import Final

# Each entry: an indirect question, a direct question, the answer, and the words that only this
# answer contains.
ABOUT: Final[tuple[tuple[str, str, str, str], ...]] = (
    (
        "what mlx-ring is",
        "What is mlx-ring?",
        "mlx-ring is a program that serves one language model across several machines.",
        "serves one language model",
    ),
    (
        "what mlx-ring does",
        "What does mlx-ring do?",
        "mlx-ring splits a model into stages, runs each stage on one of your machines, and answers over HTTP.",
        "splits a model",
    ),
    (
        "how I add a machine",
        "How do I add a machine?",
        "Run mlx-ring join on the new machine, with the address of the head and the token it shows.",
        "mlx-ring join",
    ),
    (
        "how I start the server",
        "How do I start the server?",
        "Run mlx-ring serve. Without any argument it serves this demo model.",
        "without any argument",
    ),
    (
        "why this model is so small",
        "Why are you so small?",
        "I am small so that I fit in the package and run anywhere. Outside my topics I know nothing.",
        "fit in the package",
    ),
    (
        "what you can answer",
        "What can you answer?",
        "I can greet you, name capitals, colours and opposites, do small arithmetic, edit short texts, call tools, and tell you about mlx-ring.",
        "name capitals",
    ),
    (
        "who you are",
        "Who are you?",
        "I am the demo model of mlx-ring, a very small language model.",
        "the demo model",
    ),
    (
        "which API mlx-ring offers",
        "Which API does mlx-ring offer?",
        "mlx-ring offers an API in the style of OpenAI, so that your usual client works.",
        "style of OpenAI",
    ),
    (
        "which engine mlx-ring uses",
        "Which engine does mlx-ring use?",
        "mlx-ring computes with MLX and takes its models from mlx-lm.",
        "computes with MLX",
    ),
    (
        "what happens when a machine leaves",
        "What happens when a machine leaves?",
        "The other machines take over its layers, and the answers go on.",
        "take over its layers",
    ),
    (
        "which machines mlx-ring runs on",
        "Which machines does mlx-ring run on?",
        "mlx-ring runs on Macs and on Linux machines, with or without a GPU.",
        "runs on Macs",
    ),
    (
        "how I use a larger model",
        "How do I use a larger model?",
        "Give its name to mlx-ring serve with the option --model.",
        "the option --model",
    ),
    (
        "what your name is",
        "What is your name?",
        "My name is demo. I come with mlx-ring.",
        "my name is demo",
    ),
    (
        "whether you are a person",
        "Are you a person?",
        "No, I am only a computer program with a few million numbers in it.",
        "only a computer program",
    ),
    (
        "where I see the state of my cluster",
        "Where do I see the state of my cluster?",
        "Open the dashboard in your browser: it is on port 8100 of the head.",
        "the dashboard",
    ),
)

GREETINGS: Final[dict[str, tuple[str, ...]]] = {
    "hello": ("Hi", "Hello", "Hey", "Hiya", "Greetings", "Howdy", "Good day", "Hi there"),
    "morning": ("Good morning", "Morning"),
    "evening": ("Good evening", "Evening"),
    "bye": ("Bye", "Goodbye", "See you later", "Good night", "Farewell", "Bye bye", "See you soon"),
    "thanks": ("Thanks", "Thank you", "Many thanks", "Thanks a lot", "Thank you very much"),
    "well": ("How are you", "How are you doing", "How is it going", "How do you feel"),
}

GREETING_ANSWERS: Final[dict[str, tuple[str, str]]] = {
    "hello": ("Hello! What would you like to know?", "hello"),
    "morning": ("Good morning! What would you like to know?", "good morning"),
    "evening": ("Good evening! What would you like to know?", "good evening"),
    "bye": ("Goodbye! Come back soon.", "goodbye"),
    "thanks": ("You are welcome!", "welcome"),
    "well": ("I am well, thank you. How can I help?", "am well"),
}
