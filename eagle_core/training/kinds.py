"""What people ask, as openings that a target is made to continue.

Left alone, a small chat model asks short questions about everyday life. A drafter meets more than that: long texts
to summarise, passages to answer from, code, sums, other languages. A kind is a handful of first words of such
turns; the target finishes the turn as the user and then answers it. A `quoting` kind takes two conversations: the
first makes the target write a text, the second hands it back with a request.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "Kind"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of conversation.

    Attributes:
        openings: first words of the first user turn; "" leaves all to the target.
        free: tokens that the target may add to an opening.
        answer: most tokens of an answer.
        weight: its share, relative to the others'.
        more_turns: probability of a second turn.
        later: openings of that one (the same ones if empty).
        quoting: (before, after) around the first conversation's answer, which then opens a second conversation.
        quoting_free: tokens the target may add after that.
    """

    name: str
    openings: tuple[str, ...]
    free: int = 80
    answer: int = 300
    weight: float = 1.0
    more_turns: float = 0.3
    later: tuple[str, ...] = ()
    quoting: tuple[tuple[str, str], ...] = ()
    quoting_free: int = 0


_LATER = (
    "", "Can you explain", "Now rewrite", "Give me an example of", "Why", "What about", "Could you make",
    "Rewrite your answer", "Summarize", "How would", "Continue", "Please list",
)  # fmt: skip

KINDS: tuple[Kind, ...] = (
    Kind("open", ("",), weight=2.0, more_turns=0.4, later=_LATER),
    Kind(
        "question",
        ("Who", "When did", "When was", "Where is", "Where was", "What is the name of", "How many", "Which",
         "Who wrote",
         "What year", "Who played", "What does", "Who is the", "What was the", "How long", "Who sings",
         "Where do", "Who won"),
        free=24, answer=200, weight=2.5, more_turns=0.15, later=_LATER,
    ),
    Kind(
        "write",
        ("Write a short story about", "Write a poem about", "Write an email to", "Compose a letter", "Draft a speech",
         "Write a blog post about", "Imagine you are", "Describe", "Write a persuasive essay on", "Help me write",
         "Pretend you are", "Act as", "You are a", "Create a dialogue between"),
        weight=2.0, later=_LATER,
    ),
    Kind(
        "explain",
        ("Explain", "What is the difference between", "How does", "Why do", "What are the main causes of", "Compare",
         "Describe the process of", "What are the advantages and disadvantages of", "Give an overview of", "Discuss",
         "Provide insights into", "How can I", "What is"),
        weight=2.5, later=_LATER,
    ),
    Kind(
        "mathematics",
        ("If", "A store sells", "A train travels", "Solve the equation", "There are", "Calculate", "What is the sum of",
         "John has", "Maria bought", "Each", "Tom had", "The area of a", "Find the value of", "A farmer has",
         "In a class of",
         "Sarah earns $", "How many", "It takes", "Every day,"),
        free=90, answer=260, weight=2.5, more_turns=0.1, later=_LATER,
    ),
    Kind(
        "code",
        ("Write a Python function", "Write a program", "How do I implement", "Implement a function",
         "Write a SQL query",
         "Fix this code:\n```python\n", "Explain this code:\n```python\n", "Write a C++ program",
         "Write a JavaScript function",
         "Write a regular expression", "Write unit tests for", "What does this function do?\n```python\ndef"),
        free=110, weight=1.6, more_turns=0.25, later=_LATER,
    ),
    Kind(
        "extract",
        ("Extract the names", "Classify the following", "Given the following data", "Convert the following to JSON:",
         "Identify", "Read the following paragraph and", "Evaluate the following", "Given these categories",
         "List all"),
        free=150, weight=1.2, more_turns=0.2, later=_LATER,
    ),
    Kind(
        "translation",
        ("Translate the following sentence from German to English: ", "Translate from German to English: Der",
         "Translate German to English: Die", "Translate this into English: Das", "Translate to French: ",
         "Translate German to English: Ich", "Translate German to English: In", "Translate to German: ",
         "Übersetze ins Englische: ", "Translate from French to English: Le", "Translate from Spanish to English: El",
         "Translate German to English: Wir", "Translate German to English: Es", "Translate German to English: Ein"),
        free=60, answer=140, weight=2.2, more_turns=0.1,
    ),
    Kind(
        "language",
        ("Schreibe einen kurzen Text über", "Écris une histoire sur", "Escribe un texto sobre", "Was ist",
         "Qu'est-ce que",
         "¿Qué es", "Warum", "Wie"),
        answer=160, weight=0.5, more_turns=0.0,
    ),
    Kind(
        "summary",
        ("Write a long news article about", "Write a news report: ", "Write a detailed article about",
         "Write an article for a newspaper about", "Write a report on", "Write a long essay about the history of"),
        free=40, weight=1.8, more_turns=0.0,
        quoting=(
            ("Summarize the following article:\n\n", ""), ("Summarize: ", ""), ("",
            "\n\nSummarize this text in a few sentences."),
            ("Summarize the text below in three sentences.\n\n", ""), ("", "\n\nTL;DR"),
        ),
    ),
    Kind(
        "retrieval",
        ("Write an encyclopedia article about", "Write several paragraphs about", "Describe in detail the life of",
         "Write a detailed text about the city of", "Explain in detail how", "Tell me everything about"),
        free=30, weight=1.8, more_turns=0.0,
        quoting=(
            ("Answer the question with the help of these passages.\n\n", "\n\nQuestion:"),
            ("", "\n\nBased on the text above, answer this question:"),
            ("Context: ", "\n\nQuestion: What"), ("Passage: ", "\n\nQuestion: Who"), ("Read this:\n",
            "\n\nNow tell me"),
        ),
        quoting_free=40,
    ),
)  # fmt: skip
