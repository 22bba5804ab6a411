"""Phrasings of questions: `{name}` is a placeholder for a value of the fact.

Within a skill, phrasings differ by words, not only by case or punctuation. Case and punctuation vary at
random, so otherwise training could see a variant of a held-out phrasing.
"""

from __future__ import annotations

from typing import Final

GREETING: Final[tuple[str, ...]] = (
    "{g}!", "{g}, demo!", "{g}, my friend.", "{g} again.", "Well, {g}!", "Oh, {g}!", "{g}, little model.",
    "{g}, dear machine.", "{g} from me.", "{g}, everyone!", "{g} and good wishes.", "Just saying: {g}.",
    "So, {g}.", "{g}, assistant!", "Ah, {g}.", "{g} to you.", "{g}, you!", "I say {g}.",
    "{g}, dear demo.", "{g} once more!", "And {g}.", "{g}, computer.", "{g}, old friend!", "Okay, {g}.",
    "{g} from all of us.", "Let me say {g}.", "{g}, my dear.", "Right, {g}.", "{g}, small model!",
    "Just {g}.",
)  # fmt: skip

CAPITAL: Final[tuple[str, ...]] = (
    "What is the capital of {country}?", "Which city is the capital of {country}?",
    "Name the capital of {country}.", "Tell me the capital of {country}.", "Capital of {country}?",
    "What's the capital of {country}?", "{country}: what is its capital?",
    "Do you know the capital of {country}?", "Can you tell me the capital of {country}?",
    "Please name the capital of {country}.", "I would like to know the capital of {country}.",
    "What is the capital city of {country}?", "What city is the capital of {country}?",
    "The capital of {country} is which city?", "What is the name of the capital of {country}?",
    "Which is {country}'s capital?", "What is {country}'s capital city?",
    "Could you name the capital of {country} for me?", "Give me the capital of {country}.",
    "{country} has which capital?", "What do they call the capital of {country}?",
    "The government of {country} sits in which capital?", "I forgot the capital of {country}. What is it?",
    "Quick question: capital of {country}?", "Which capital does {country} have?",
    "Help me: what is the capital of {country}?", "My question is about {country}. What is the capital?",
    "Say the capital of {country}.", "Which city serves as the capital of {country}?",
    "If I travel to the capital of {country}, which city do I reach?", "Do tell me {country}'s capital.",
    "Please, the capital of {country}?", "{country}'s capital?", "What would be the capital of {country}?",
)  # fmt: skip

COUNTRY: Final[tuple[str, ...]] = (
    "{capital} is the capital of which country?", "Which country has the capital {capital}?",
    "Of which country is {capital} the capital?", "What country is {capital} the capital of?",
    "{capital} is the capital of what country?", "Name the country whose capital is {capital}.",
    "Tell me which country has {capital} as its capital.", "Whose capital is {capital}?",
    "Which country's capital is {capital}?", "In which country is {capital} the capital?",
    "{capital} is the capital city of which country?", "For which country is {capital} the capital?",
    "Do you know whose capital {capital} is?", "What country has {capital} as its capital?",
    "I am in the capital {capital}. Which country am I in?", "Please name the country with the capital {capital}.",
    "The city of {capital} is the capital of which country?", "Can you say which country's capital is {capital}?",
    "{capital}: the capital of which country?", "Which land has {capital} for a capital?",
)  # fmt: skip

ADD: Final[tuple[str, ...]] = (
    "What is {a} plus {b}?", "{a} + {b} = ?", "Add {a} and {b}.", "How much is {a} plus {b}?",
    "What do {a} and {b} make together?", "Calculate {a} + {b}.", "What is the sum of {a} and {b}?",
    "Please add {a} and {b}.", "What does {a} plus {b} give?", "Work out {a} plus {b}.", "{a} plus {b}?",
    "How much is {a} + {b}?", "Can you add {a} and {b}?", "Tell me {a} plus {b}.", "What is {a} + {b}?",
    "{a} and {b} make how many?", "The sum of {a} and {b}?", "I have {a} apples and get {b} more. How many now?",
    "Could you compute {a} plus {b}?", "What do I get for {a} + {b}?",
    "How much do {a} and {b} make?", "Please compute {a} plus {b}.", "Increase {a} by {b}.",
    "What does {a} + {b} make?", "Add {b} to {a}.",
)  # fmt: skip

SUBTRACT: Final[tuple[str, ...]] = (
    "What is {a} minus {b}?", "{a} - {b} = ?", "Subtract {b} from {a}.", "How much is {a} minus {b}?",
    "Take {b} away from {a}.", "Calculate {a} - {b}.", "What is {a} less {b}?", "Please subtract {b} from {a}.",
    "What does {a} minus {b} give?", "Work out {a} minus {b}.", "{a} minus {b}?", "How much is {a} - {b}?",
    "Can you take {b} from {a}?", "Tell me {a} minus {b}.", "What is {a} - {b}?",
    "I have {a} apples and eat {b}. How many are left?", "Could you compute {a} minus {b}?",
    "What is the difference of {a} and {b}?", "What do I get for {a} - {b}?",
    "{a} take away {b}?",
    "{b} less than {a} is how much?", "{a} without {b}?", "What remains of {a} without {b}?",
    "Reduce {a} by {b}.", "What is left of {a} after taking {b}?", "How much is {a} less {b}?",
    "From {a}, take {b}.", "Please compute {a} minus {b}.", "What does {a} - {b} make?",
)  # fmt: skip

MULTIPLY: Final[tuple[str, ...]] = (
    "What is {a} times {b}?", "{a} * {b} = ?", "Multiply {a} by {b}.", "How much is {a} times {b}?",
    "Calculate {a} * {b}.", "What is the product of {a} and {b}?", "Please multiply {a} and {b}.",
    "What does {a} times {b} give?", "Work out {a} times {b}.", "{a} times {b}?", "How much is {a} x {b}?",
    "Can you multiply {a} and {b}?", "Tell me {a} times {b}.", "What is {a} x {b}?",
    "I have {a} bags with {b} apples each. How many apples?", "Could you compute {a} times {b}?",
    "What is {a} multiplied by {b}?", "What do I get for {a} * {b}?", "{a} x {b} = ?",
    "The product of {a} and {b}?",
    "Take {a} times {b}.", "Please compute {a} times {b}.", "What does {a} x {b} make?",
    "How much is {a} * {b}?", "What is {a} * {b}?", "{a} multiplied by {b}?", "How many are {a} times {b}?",
)  # fmt: skip

COLOUR: Final[tuple[str, ...]] = (
    "What colour is {thing}?", "Which colour is {thing}?", "What is the colour of {thing}?",
    "Which colour does {thing} have?", "What color is {thing}?", "Tell me the colour of {thing}.",
    "Name the colour of {thing}.", "What is the color of {thing}?", "Do you know the colour of {thing}?",
    "Can you tell me what colour {thing} is?", "Please tell me which colour {thing} has.",
    "What colour has {thing}?", "The colour of {thing}?", "I want to paint {thing}. Which colour do I take?",
    "What colour is {thing} usually?", "Which color is {thing}?", "In what colour do I draw {thing}?",
    "{thing} is what colour?", "{thing} has which colour?", "What colour would you say {thing} is?",
    "How would you describe the colour of {thing}?", "Say the colour of {thing}.",
    "Of what colour is {thing}?", "My child asks what colour {thing} is.", "Give me the colour of {thing}.",
    "What colour does {thing} normally have?", "Think of {thing}. Which colour is it?",
    "I wonder what colour {thing} is.", "Could you name the color of {thing}?", "What colour comes with {thing}?",
)  # fmt: skip

OPPOSITE: Final[tuple[str, ...]] = (
    "What is the opposite of {word}?", "Opposite of {word}?", "Name the opposite of {word}.",
    "Tell me the opposite of {word}.", "Which word is the opposite of {word}?", "What's the opposite of {word}?",
    "Give me the opposite of {word}.", "What word means the opposite of {word}?", "The opposite of {word} is what?",
    "Do you know the opposite of {word}?", "Can you name the opposite of {word}?", "{word}: what is the opposite?",
    "Please give the opposite of {word}.", "Say the opposite of {word}.", "What is the contrary of {word}?",
    "Which word is the contrary of {word}?", "I need the opposite of {word}.", "What would be the opposite of {word}?",
    "Not {word}, but the opposite: which word?", "If something is not {word}, what is the opposite word?",
    "What is the antonym of {word}?", "Find the opposite of {word}.", "Could you tell me the opposite of {word}?",
    "I am looking for the opposite of {word}.", "What do you call the opposite of {word}?",
    "Help me with the opposite of {word}.", "Which is the opposite word of {word}?", "An antonym of {word}, please.",
    "Turn {word} into its opposite.", "{word} and its opposite: what is the second word?",
)  # fmt: skip

ABOUT: Final[tuple[str, ...]] = (
    "Tell me {indirect}.", "Can you tell me {indirect}?", "Do you know {indirect}?", "Please explain {indirect}.",
    "I would like to know {indirect}.", "Explain {indirect}.", "Could you explain {indirect}?", "I wonder {indirect}.",
    "My question is {indirect}.", "Please say {indirect}.", "Can you say {indirect}?", "I want to know {indirect}.",
    "Help me understand {indirect}.", "Would you tell me {indirect}?", "Let me know {indirect}.",
    "Say briefly {indirect}.", "I am asking {indirect}.", "Do tell me {indirect}.", "In short, {indirect}?",
    "It is not clear to me {indirect}.", "I do not know {indirect}.", "Describe {indirect}.",
    "Someone asked me {indirect}.", "Could you please describe {indirect}?", "{direct}", "Hello. {direct}",
    "One question: {direct}", "Please tell me: {direct}", "I am new here. {direct}", "Short question. {direct}",
)  # fmt: skip

UNKNOWN: Final[tuple[str, ...]] = (
    "Tell me about {subject}.", "What do you know about {subject}?", "Explain {subject} to me.",
    "Can you explain {subject}?", "I have a question about {subject}.", "Write an essay about {subject}.",
    "Give me an introduction to {subject}.", "What can you say about {subject}?", "Teach me about {subject}.",
    "I would like to learn about {subject}.", "Help me with {subject}.", "What is new in {subject}?",
    "Do you know anything about {subject}?", "Let us talk about {subject}.", "Describe {subject} in detail.",
    "Who is an expert in {subject}?", "What is important about {subject}?", "Please tell me more about {subject}.",
    "How does {subject} work?", "Why do people care about {subject}?", "Give me three facts about {subject}.",
    "Are you good at {subject}?", "I need to understand {subject}.", "Which book explains {subject}?",
    "Can we discuss {subject}?", "What should I know about {subject}?", "Summarise {subject} for me.",
    "I am curious about {subject}.", "When did {subject} begin?", "Write a poem about {subject}.",
)  # fmt: skip

UNKNOWN_QUESTION: Final[tuple[str, ...]] = (
    "{question}", "Please help me: {question}", "Now something else. {question}", "I wonder. {question}",
    "Maybe you can say. {question}", "Hi. {question}", "A friend asks: {question}", "Next question: {question}",
    "Okay. {question}", "Demo, {question}",
)  # fmt: skip

NAME_GIVEN: Final[tuple[str, ...]] = (
    "My name is {name}.", "I am {name}.", "Hi, I am {name}.", "Hello, my name is {name}.", "Call me {name}.",
    "I'm {name}, nice to meet you.", "People call me {name}.", "Hey, {name} here.", "You can call me {name}.",
)  # fmt: skip

NAME_ASKED: Final[tuple[str, ...]] = (
    "What is my name?", "Do you remember my name?", "Who am I?", "What did I say my name was?",
    "Tell me my name.", "Can you say my name?", "What am I called?", "Do you know who I am?", "Say my name.",
    "How am I called?", "Which name did I give you?", "Have you forgotten my name?", "And my name is?",
    "Repeat my name, please.", "What was my name again?", "Please remind me of my name.",
    "Which name do I have?", "Please say my name.", "What name did I tell you?", "My name?",
    "Could you tell me my name?", "Do you still know my name?",
)  # fmt: skip

FAVOURITE_GIVEN: Final[tuple[str, ...]] = (
    "My favourite {kind} is {value}.", "I like {value} best, that is my favourite {kind}.",
    "Remember that my favourite {kind} is {value}.", "Of every {kind}, {value} is my favourite.",
    "Note: my favourite {kind} is {value}.",
)  # fmt: skip

FAVOURITE_ASKED: Final[tuple[str, ...]] = (
    "What is my favourite {kind}?", "Which {kind} do I like best?", "Do you remember my favourite {kind}?",
    "Tell me my favourite {kind}.", "What did I say is my favourite {kind}?", "Name my favourite {kind}.",
    "Which {kind} is my favourite?", "And my favourite {kind} is?", "What {kind} do I prefer?",
    "Remind me of my favourite {kind}.", "Which {kind} did I call my favourite?", "My favourite {kind}?",
    "What was my favourite {kind}?", "Can you name my favourite {kind}?", "Say my favourite {kind}.",
    "Do you know my favourite {kind}?", "What {kind} do I like most?", "Which {kind} do I love most?",
    "Which {kind} would I choose?", "What is the {kind} that I like best?",
    "Have you forgotten my favourite {kind}?", "Please repeat my favourite {kind}.",
    "So what is my favourite {kind}?", "Which {kind} did I say I like?",
    "Which {kind} do I like more than others?", "My preferred {kind}?",
)  # fmt: skip

FOLLOW_UP: Final[tuple[str, ...]] = (
    "And of {next}?", "And {next}?", "What about {next}?", "And for {next}?", "How about {next}?",
    "Now the same for {next}.", "The same question for {next}.", "And what about {next}?", "Then {next}?",
    "Okay, and {next}?", "Thanks. And {next}?", "Next: {next}.", "Good. Now {next}.", "And now {next}?",
    "And the same for {next}?", "Can you do {next} too?", "{next} next, please.", "Also {next}?",
    "Please do {next} now.", "Let us take {next}.", "What of {next}?", "I also want {next}.", "{next} too?",
    "Go on with {next}.", "Fine, {next} now.", "Great. What about {next} then?", "Then take {next}.",
    "Tell me for {next}, too.", "Try {next}.", "So {next}?",
)  # fmt: skip

REPEAT: Final[tuple[str, ...]] = (
    "Repeat: {text}", "Repeat after me: {text}", "Say this: {text}", "Copy this text: {text}", "Echo: {text}",
    "Please repeat this: {text}", "Write exactly this: {text}", "Say exactly: {text}", "Copy: {text}",
    "Give back this text: {text}", "Can you repeat this? {text}", "Type this again: {text}",
    "Please say: {text}", "Repeat the following text: {text}", "Return this unchanged: {text}",
    "Say it again: {text}", "Repeat word for word: {text}", "Please copy: {text}", "Output this: {text}",
    "Write: {text}", "Print this text: {text}", "Can you say this? {text}", "I say, you repeat: {text}",
    "The same again, please: {text}", "Do not change this, only repeat it: {text}",
    "Please write this down: {text}",
)  # fmt: skip

REPLACE: Final[tuple[str, ...]] = (
    "Replace {old} with {new}: {text}", "Replace the word {old} by {new} in this text: {text}",
    "Change {old} to {new}: {text}", "Put {new} in place of {old}: {text}",
    "In this text, change {old} into {new}: {text}", "Swap {old} for {new}: {text}",
    "Please replace {old} with {new} here: {text}", "Write {new} instead of {old}: {text}",
    "Use {new} where the text says {old}: {text}", "Exchange {old} for {new}: {text}",
    "Take out {old} and put in {new}: {text}", "Let {new} stand where {old} is: {text}",
    "{old} should become {new}: {text}", "Make {old} into {new}: {text}",
    "Turn {old} into {new} in this: {text}", "I want {new} instead of {old}: {text}",
    "Substitute {new} for {old}: {text}", "Can you replace {old} with {new}? {text}",
    "The word {old} becomes {new}: {text}", "Every {old} becomes {new}: {text}",
    "Read {new} for {old}: {text}",
)  # fmt: skip

UPPER: Final[tuple[str, ...]] = (
    "Write in capital letters: {text}", "Upper case: {text}", "Make this upper case: {text}",
    "Put this in capitals: {text}", "Turn this into capital letters: {text}", "Shout this: {text}",
    "Convert to upper case: {text}", "Please write this in upper case: {text}",
    "Capital letters, please: {text}", "All capitals: {text}",
    "Can you write this in capital letters? {text}", "Give this in upper case: {text}",
    "Write loudly: {text}", "Use capital letters for: {text}", "Use only upper case for this: {text}",
    "I want this in capitals: {text}",
)  # fmt: skip

REVERSE: Final[tuple[str, ...]] = (
    "Reverse the order of the words: {text}", "Reverse these words: {text}", "Write the words backwards: {text}",
    "Say these words in reverse order: {text}", "Turn the order of the words around: {text}",
    "Last word first: {text}", "Please reverse the words: {text}", "Put these words in reverse order: {text}",
    "Backwards, word by word: {text}", "Give the words from last to first: {text}",
    "Invert the word order: {text}", "Start with the last word: {text}", "Can you reverse this? {text}",
    "Say it backwards, word by word: {text}", "Flip the order of the words: {text}",
    "From the last word to the first: {text}",
)  # fmt: skip

APPEND: Final[tuple[str, ...]] = (
    "Add {new} at the end: {text}", "Append {new} to this: {text}", "Put the word {new} at the end of: {text}",
    "Write {new} after this text: {text}", "Add the word {new} to the end of this text: {text}",
    "End this text with {new}: {text}",
    "Append the word {new}: {text}", "Please append {new} to the text: {text}",
    "Attach {new} at the end of this: {text}", "{new} comes last: {text}",
    "Add {new} as the last word: {text}", "Let this end with {new}: {text}",
    "Finish this text with {new}: {text}", "Extend this by {new}: {text}",
    "Can you add {new} at the end? {text}", "After the last word, write {new}: {text}",
    "Put {new} last: {text}",
)  # fmt: skip

REMOVE: Final[tuple[str, ...]] = (
    "Remove the word {old}: {text}", "Delete {old} from this text: {text}", "Leave out {old}: {text}",
    "Write this without {old}: {text}", "Take the word {old} out of: {text}", "Drop {old}: {text}",
    "Strike {old} from: {text}", "Omit {old}: {text}", "Cut the word {old}: {text}",
    "Erase {old} here: {text}", "Please remove {old}: {text}", "Without the word {old}, please: {text}",
    "Can you delete {old}? {text}", "Say this without the word {old}: {text}",
    "Everything but {old}: {text}",
)  # fmt: skip

PICK: Final[tuple[str, ...]] = (
    "What is the {which} word of: {text}", "Give me the {which} word: {text}", "Name the {which} word here: {text}",
    "Which word comes {which} in: {text}", "Only the {which} word, please: {text}", "Tell me the {which} word of this: {text}",
    "Find the {which} word: {text}", "Say the {which} word of: {text}",
    "Please pick the {which} word: {text}", "Which is the {which} word? {text}",
    "Show only the {which} word: {text}", "I need the {which} word of: {text}",
)  # fmt: skip

COUNT: Final[tuple[str, ...]] = (
    "Count from {a} to {b}.", "Please count from {a} to {b}.", "Write the numbers from {a} to {b}.",
    "List the numbers from {a} to {b}.", "Can you count from {a} to {b}?", "Start at {a} and count to {b}.",
    "Say all numbers from {a} up to {b}.", "Numbers {a} to {b}, please.", "Show me the numbers {a} to {b}.",
    "I want you to count from {a} to {b}.", "Count up from {a} until {b}.", "Give the numbers between {a} and {b}, both included.",
    "Count {a} to {b}.", "Number from {a} to {b}.", "Go from {a} to {b} in steps of one.",
    "Which numbers lie from {a} to {b}?", "Begin with {a} and stop at {b}.",
    "All numbers between {a} and {b}, with both ends.", "Recite the numbers from {a} to {b}.",
    "Which numbers are between {a} and {b}, {a} and {b} included?", "Could you list {a} to {b}?",
    "Every number from {a} to {b}, please.",
)  # fmt: skip

RECITE: Final[tuple[str, ...]] = (
    "{direct}", "Please {indirect}.", "Can you {indirect}?", "I would like you to {indirect}.", "Could you {indirect}?",
    "Now {indirect}.", "Would you {indirect}, please?", "Kindly {indirect}.", "I ask you to {indirect}.",
    "For me, {indirect}.", "Let me see you {indirect}.", "Do {indirect}.",
)  # fmt: skip
