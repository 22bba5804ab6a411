"""Words of the check of English: those that it reports, with what to write, and those that are right in their place."""

from __future__ import annotations

from collections.abc import Mapping

BANNED: Mapping[str, str] = {
    r"told": "reported, set, given",
    r"heed(s|ed|ing)?": "record, follow, observe",
    r"hear(s|d|ing)?": "receive, record",
    r"gone": "removed, ended, lost",
    r"beg[aiu]n(s|ning)? alike": "share a prefix",
    r"(make|makes|making|made) way": "be evicted, be unloaded, free memory",
    r"(give|gives|giving|gave|given) way": "yield, be shed, be preempted",
    r"(go|goes|going|went) on": "continue",
    r"(put|puts|putting) back": "preempt, restore, return",
    r"(take|takes|taking|took|taken) back": "roll back, undo",
    r"thoughts?": "reasoning",
    r"wish(es|ed|ing)?": "request",
    r"tenants?": "KV reservations",
    r"territor(y|ies)": "candidate nodes",
    r"burden(s|ed)?": "load",
    r"trouble(s|d)?": "error, problem",
    r"news": "update",
    r"(in|by|of) ([\w-]+'?s?|its|their|our|your|other|whose|these|those|own|plain) (own )?words": "API, format, terms",
    r"thrice|whence|whither|hitherto|thereof|albeit|lest": "a plain word",
    r"youngest|eldest": "newest, oldest",
    r"park(s|ed|ing)?": "retain",
    r", for (it|they|there|nobody|nothing|no one|what|who|those|these|this|that) ": ", because",
    r"nobody is (asked|told)": "no client, no process, nothing",
    r"(is|are|was|were|be) asked for (the )?longest": "least recently used",
}  # fmt: skip
"""Patterns of words and phrases, each with what to write. A space stands for any white space."""

IN_IZE = (
    *("anonym", "author", "canonical", "capital", "categor", "central", "character", "custom", "digit", "emphas", "equal"),
    *("familiar", "final", "general", "harmon", "initial", "item", "local", "material", "maxim", "memor", "minim", "modern"),
    *("neutral", "normal", "optim", "organ", "parallel", "penal", "popular", "priorit", "quant", "random", "rational", "real"),
    *("recogn", "sanit", "serial", "special", "stabil", "standard", "summar", "symbol", "synchron", "token", "util", "vector"),
    *("virtual", "visual"),
)  # fmt: skip
"""Stems of words that are spelled with -ize here, as in "normalize" and "utilization"."""

ALLOWED: Mapping[str, str] = {
    r"410 Gone": "HTTP's name of the status",
    r"settings_customise_sources": "pydantic's name",
}
"""Patterns of text in which nothing is banned, each with the reason."""

BANNED_NAMES: Mapping[str, str] = {
    "aimed": "target",
    "told": "documented, reported",
    "untold": "needs, lacks",
    "heed": "record, on",
    "hear": "on, receive",
    "heard": "received",
    "tell": "record, set, report",
    "tells": "reports",
    "telling": "messages",
    "wish": "request",
    "seat": "rank placement",
    "arrangement": "placement",
    "territory": "candidate nodes",
    "territorie": "candidate nodes",
    "tenant": "KV reservation",
    "burden": "load",
    "trouble": "error info",
    "news": "update",
    "thought": "reasoning",
    "gone": "lost, ended",
    "park": "retain",
    "parked": "retained",
    "put_back": "preempt",
    "take_back": "rollback",
    "handover": "token feedback",
}
"""Words of names in lower case, each with what to write. Their plurals are banned too."""

BANNED_FILES: Mapping[str, str] = {
    "asking": "request",
    "asked": "request",
    "fewest_tokens": "token_bounds",
    "flights": "in_flight",
    "front": "server",
    "giving_way": "load shedding",
    "handover": "token_feedback",
    "here": "single_node",
    "kept_lines": "log_buffer",
    "kv_plan": "kv_manager",
    "looks": "snapshot",
    "pace": "rates",
    "pacing": "chunk_size",
    "staying": "keep_alive",
    "wanted": "content_negotiation",
}
"""Names of files and folders, each with what to write."""

OPENERS = frozenset({"What", "Whether", "Who", "Of"})
"""Words that open no docstring."""
NO_VERBS = frozenset({
    *("A", "An", "The", "One", "Two", "Some", "Any", "All", "Every", "Each", "Both", "No", "None", "Nothing", "Nobody"),
    *("This", "That", "These", "Those", "It", "Its", "Their", "They", "Our", "We", "There", "Here", "Such", "Other"),
    *("Where", "Which", "How", "When", "Why", "Whose", "While", "If", "Unless", "Until", "Once", "Because"),
    *("As", "At", "By", "For", "From", "In", "Into", "On", "Out", "To", "With", "Within", "Without", "Up", "Under", "Over"),
    *("After", "Before", "Between", "Beside", "Behind", "Among", "Against", "During", "Since", "Than", "Then", "So"),
    *("And", "Or", "But", "Not", "Only", "Also", "Like", "Per", "About", "Enough", "Much", "Many", "More", "Most", "Less"),
    *("Is", "Are", "Has", "Does", "Can", "May", "Must", "Same", "True", "New", "Fewer", "Standard", "Special"),
})  # fmt: skip
"""Words that open no function's docstring, because they are no verbs in the imperative."""
VERBS_IN_S = frozenset({"Bias", "Canvas", "Focus"})
VERBS_IN_ED = frozenset({"Feed", "Embed", "Proceed", "Need", "Seed", "Shed", "Speed", "Spread"})
VERBS_IN_ING = frozenset({"Bring", "Ping", "Ring", "String"})
"""Verbs that end like a plural, a past tense or a participle."""
