"""Many ways to ask for the same thing. ``{}`` fields are filled by the question writers."""

from __future__ import annotations

import random

DESCRIBE = (
    "Describe this image.",
    "Describe this picture.",
    "Describe the image.",
    "Describe the picture.",
    "Describe the picture in detail.",
    "Describe this image in one sentence.",
    "Please describe this image.",
    "Can you describe this picture?",
    "Could you describe the image?",
    "Give a description of this picture.",
    "Give me a caption.",
    "Write a caption for this image.",
    "Write a short description.",
    "Caption this.",
    "Caption this image.",
    "Caption the picture.",
    "What is in this picture?",
    "What is in this image?",
    "What is in the picture?",
    "What's in the image?",
    "What's in this picture?",
    "What is this?",
    "What's this?",
    "What is that?",
    "What is it?",
    "What is this a picture of?",
    "What do you see?",
    "What do you see in this image?",
    "What do you see here?",
    "What can you see?",
    "What can you see in this picture?",
    "What does this picture show?",
    "What does the image show?",
    "What is shown?",
    "What is shown here?",
    "What is depicted in this image?",
    "Tell me what you see.",
    "Tell me about this picture.",
    "Tell me about the image.",
    "Explain this image.",
    "Show me what you see.",
    "Look at this picture. What is in it?",
    "Describe it.",
    "Describe what you see.",
    "Describe everything in the picture.",
    "Summarize this image.",
    "Image description?",
    "What is going on in this image?",
)
LIST = (
    "What objects are in the picture?",
    "Which objects do you see?",
    "List the objects.",
    "List the objects in the image.",
    "What things are shown?",
    "Name the objects.",
    "Name everything you see.",
    "What objects can you see?",
)
COUNT = (
    "How many {} are there?",
    "How many {} are in the picture?",
    "How many {} are in this image?",
    "How many {} do you see?",
    "How many {} can you see?",
    "How many {} are shown?",
    "Count the {}.",
    "How many {}?",
    "Number of {}?",
    "What is the number of {}?",
    "Tell me how many {} there are.",
)
READ = (
    "What does the text say?",
    "What does it say?",
    "What does the text read?",
    "Read the text.",
    "Read the text in the image.",
    "Read this.",
    "What is written?",
    "What is written here?",
    "What is written in the picture?",
    "What word is in the picture?",
    "What text is in the image?",
    "What text do you see?",
    "What is the text?",
    "Which word is shown?",
    "Transcribe the text.",
    "Can you read the text?",
    "OCR",
    "Extract the text.",
    "What does the sign say?",
    "What letters are shown?",
    "What is printed?",
)
COLOUR = (
    "What colour is the {}?",
    "What color is the {}?",
    "Which colour is the {}?",
    "Which color is the {}?",
    "What is the colour of the {}?",
    "What is the color of the {}?",
    "Tell me the colour of the {}.",
    "Colour of the {}?",
    "What colour does the {} have?",
)
COLOUR_PLURAL = (
    "What colour are the {}?",
    "What color are the {}?",
    "Which colour are the {}?",
    "What is the colour of the {}?",
    "What is the color of the {}?",
)
COLOUR_IT = ("What colour is it?", "What color is it?", "Which colour is it?", "And what colour is it?")
IS_THERE = (
    "Is there {}?",
    "Is there {} in the picture?",
    "Is there {} in this image?",
    "Do you see {}?",
    "Can you see {}?",
    "Does the picture show {}?",
    "Does the image contain {}?",
    "Is {} in the picture?",
)
ARE_THERE = ("Are there {}?", "Are there {} in the picture?", "Do you see {}?", "Does the image show {}?")
WHERE = (
    "Where is the {}?",
    "Where is the {} in the picture?",
    "Where can I see the {}?",
    "In which part of the picture is the {}?",
    "What is the position of the {}?",
    "Where's the {}?",
)
WHERE_IT = ("Where is it?", "Where is it in the picture?", "And where is it?")
WHICH_COLOUR = (
    "What is the {} thing?",
    "What is the {} object?",
    "Which object is {}?",
    "What is {}?",
    "What {} object is there?",
    "What shape is {}?",
)
LOCATE = (
    "<|ref|>{}<|/ref|>",
    "<|ref|>{}<|/ref|>.",
    "Locate <|ref|>{}<|/ref|>.",
    "Locate <|ref|>{}<|/ref|> in the image.",
    "Find <|ref|>{}<|/ref|>.",
    "Where is <|ref|>{}<|/ref|>?",
    "Give the box of <|ref|>{}<|/ref|>.",
    "Locate <|ref|>{}<|/ref|> in the given image.",
    "<|grounding|>Locate {}.",
    "<|grounding|>Where is {}?",
    "<|grounding|>Can you find {}?",
    "Give the bounding box of {}.",
    "What are the coordinates of {}?",
    "Locate {}.",
    "Detect {}.",
)
GROUNDED = (
    "<|grounding|>Describe this image.",
    "<|grounding|>Describe the picture.",
    "<|grounding|>What is in this picture?",
    "<|grounding|>Describe this image in detail.",
    "<|grounding|>List the objects.",
    "<|grounding|>What do you see?",
)


def roughen(rng: random.Random, question: str) -> str:
    """As people type it: now and then in lower case, without its last mark, with a word of greeting or please."""
    chance = rng.random()
    if chance < 0.12:
        question = question.rstrip("?.")
    elif chance < 0.18:
        question = question.lower() if "<|" not in question and '"' not in question else question
    elif chance < 0.26:
        question = question[:1].lower() + question[1:].rstrip("?.")
    elif chance < 0.28:
        question = f"Please {question[:1].lower()}{question[1:]}" if question[-1] == "." else f"Hi, {question}"
    elif chance < 0.30:
        question = question.rstrip("?.") + rng.choice((", please", " please", "!", "??"))
    elif chance < 0.31:
        question = rng.choice(("Ok. ", "So, ", "Now: ", "Hey, ", "And ", "Tell me: ")) + question
    return question
