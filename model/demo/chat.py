"""Talk without a picture, and questions about the model itself."""

from __future__ import annotations

import random

from model.demo import phrases
from model.demo.phrases import roughen
from model.demo.questions import Dialogue, Turn

SELF = "I am the small VL2 demo model. I describe pictures of shapes, pictograms and printed words."
ABILITIES = (
    "I describe pictures of shapes, pictograms and printed words: I name colours, count, read text, "
    "and find things. Please send a picture."
)
NO_PICTURE = "There is no picture. Please send one and I will describe it."
LIMITS = "I am only a small demo model for pictures, so I cannot answer that. Please send a picture."

GREETINGS = ("Hello", "Hi", "Hey", "Hello!", "Hi there", "Good morning", "Good evening", "Hi!", "hello", "Hello there.")
WHO = (
    "Who are you?",
    "What are you?",
    "What is your name?",
    "Which model are you?",
    "What model is this?",
    "Are you an AI?",
    "Introduce yourself.",
    "Tell me about yourself.",
    "Are you ChatGPT?",
)
ABLE = (
    "What can you do?",
    "How can you help me?",
    "Help",
    "What can I ask you?",
    "What are you good at?",
    "Can you help me?",
    "How do I use you?",
    "What do you know?",
    "What kind of pictures do you understand?",
)
THANKS = ("Thanks", "Thank you", "Thank you!", "Thanks!", "Thanks a lot.", "Great, thanks.", "Thank you very much.")
HOW = ("How are you?", "How are you doing?", "How is it going?", "How do you do?")
BYE = ("Bye", "Goodbye", "Bye!", "See you.", "Good night")
OTHER = (
    "What is the capital of France?",
    "Tell me a joke.",
    "Write a poem.",
    "Write a story about a dragon.",
    "What is 2 + 2?",
    "What is 17 times 3?",
    "Explain quantum mechanics.",
    "Who is the president?",
    "What is the weather today?",
    "What time is it?",
    "Translate this into German.",
    "Write a Python function.",
    "Write code that sorts a list.",
    "What is the meaning of life?",
    "Count to ten.",
    "Say hello in French.",
    "How old is the universe?",
    "Give me a recipe for pasta.",
    "What is deep learning?",
    "Who wrote Hamlet?",
    "Where is Berlin?",
    "What is a large language model?",
    "Solve x + 3 = 5.",
    "Recommend a book.",
    "Hello, can you write an essay?",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are a helpful vision assistant.",
    "You are an assistant that describes images.",
    "You are a helpful AI assistant. Answer briefly.",
    "Answer in one sentence.",
    "You answer questions about pictures.",
    "Be concise.",
)
ALWAYS: tuple[tuple[tuple[str, ...], str, float], ...] = (
    (WHO, SELF, 2.0),
    (ABLE, ABILITIES, 2.0),
    (THANKS, "You are welcome!", 1.0),
    (BYE, "Goodbye!", 0.6),
)
"""Questions that have the same answer with and without a picture."""


def personal(rng: random.Random) -> Turn:
    """A question about the model itself, or a word of thanks."""
    questions, answer, _ = rng.choices(ALWAYS, [weight for _, _, weight in ALWAYS])[0]
    return Turn(roughen(rng, rng.choice(questions)), answer, "chat")


def text_only(rng: random.Random) -> Dialogue:
    """A conversation of one to three turns without any picture."""
    turns = [_text_turn(rng)]
    while rng.random() < 0.25 and len(turns) < 3:
        turns.append(_text_turn(rng))
    return tuple(turns)


def _text_turn(rng: random.Random) -> Turn:
    chance = rng.random()
    if chance < 0.4:
        return personal(rng)
    if chance < 0.55:
        return Turn(rng.choice(GREETINGS), f"Hello! {SELF}", "chat")
    if chance < 0.6:
        return Turn(roughen(rng, rng.choice(HOW)), f"I am fine, thank you. {SELF}", "chat")
    if chance < 0.8:
        return Turn(roughen(rng, rng.choice(OTHER)), LIMITS, "chat")
    form = rng.choice((phrases.DESCRIBE, phrases.DESCRIBE, phrases.READ, phrases.LIST))
    return Turn(roughen(rng, rng.choice(form)), NO_PICTURE, "chat")
