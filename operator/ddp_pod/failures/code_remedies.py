"""Remedies for exceptions of no known kind: by the code that failed, its values, and what the message asks for."""

import re
from itertools import islice
from typing import Final

from ..base.exceptions import LIBRARY, NETWORK, PROCESS, ExceptionFacts, FailingCode
from .kinds import CODE, UNFIT_TENSORS, VALUES, FailureKind
from .rules import WorkerEnd

_FIT: Final = "make the shapes fit"
_CONVERSIONS: Final = {
    "device": "move the tensors to one device",
    "dtype": "convert the tensors (.to(dtype)), or use torch.autocast",
    "type": "convert it (.float(), .to(dtype))",
    "text": "convert the string",
    "shape": _FIT,
    "batch": f"{_FIT}, also of the last, smaller batch (drop_last=True)",
}
_CERTAIN: Final = ("device", "dtype", "type", "text")
# What a message is about, if the facts do not show it.
_PROPERTIES: Final = {
    "device": re.compile(r"\bdevices?\b|\btorch\.cuda\."),
    "dtype": re.compile(r"\bd?types?\b"),
    "batch": re.compile(r"(?i)\b(shapes?|sizes?|dim(ension)?s?|channels?|broadcast)\b"),
}
# A sentence, or the part after a comma, that begins with what to do. "call stack" and "set of" are nouns.
_ADVICE: Final = re.compile(
    r"(?:^|[.!?;,:]\s+\(?|\n[ \t]*)((?:please|consider|make sure|ensure|need to|did you(?= mean)"
    r"|(?:try|use|set|pass|call)(?! (?:of|log|stack|site|rate|is|was|has|contains)\b)"
    r"|you (?:can(?! (?:also |\w+ly )?(?:find|see|read|refer|check|file|report|ask)\b)|need|should|must|have to)"
    r"|to (?:fix|solve|avoid|work around))\b"
    r"[^\n]{8,200}?)(?=(?<!\be\.g)(?<!\bi\.e)[.!?]\)?(?:\s|$)|\n|$)",
    re.I,
)

_ORIGINS: Final = {NETWORK: "a service", PROCESS: "another process"}
# Advice to read something.
_READ: Final = re.compile(r"(?i)(please )?(see|refer|visit|check out)\b")
_MOST_SENTENCES: Final = 2
# A tensor of integers among the values that ``rank/values`` describes.
_INTEGERS: Final = re.compile(r"([\w.\[\]]+): u?int\d+\[[^\]]*\] of -?\d+ to (\d+)")

# A sentence that tells a requirement.
_REQUIREMENT: Final = re.compile(
    r"(?:^|[.!?;]\s+|\n[ \t]*)"
    r"((?:[^\n.!?;]|[.!?;](?!\s)){0,200}?\b(?:must|should|only|requires?|needs?|expects?|expected|cannot)\b[^\n]{3,200}?)"
    r"(?=(?<!\be\.g)(?<!\bi\.e)[.!?;]\s|[.!?]?(?:\n|$))",
    re.I,
)


def advise_on_code(end: WorkerEnd, kind: FailureKind) -> str:
    """Return the remedy by what the innermost code that failed shows, or the message requires; empty: nothing."""
    text = _advise_on_facts(end, kind)
    return f"{text}{_name_sources(_find_innermost(end).failing)}" if text else ""


def _advise_on_facts(end: WorkerEnd, kind: FailureKind) -> str:
    facts = _find_innermost(end)
    failing = facts.failing
    is_own = any(facts.by_script for facts in end.chain[:1])  # the user knows it, and it may quote anything
    message = "" if is_own else end.message
    values = f" ({failing.values})" if failing.values else ""
    code = name_code(end) or "the script"
    if failing.advice or failing.names:
        return f"{failing.advice}: {code}{values}" if failing.advice else _advise_on_names(failing)
    if failing.variant:
        values = f"{values}; see also {failing.variant}"
    requirement = _find_sentences(_REQUIREMENT, message if end.chain else "", 1)
    # A library's text is for its users, rather than its code.
    is_library = bool(LIBRARY.search(facts.place))
    advice = _find_sentences(_ADVICE, message, _MOST_SENTENCES) or (requirement if failing.check and is_library else "")
    if advice:
        return f"as the message says: {advice}{values}"
    if failing.check and not _is_certain(failing, end.message):
        return f"meet what {code} requires: {failing.check}{values}" if failing.code else _describe_check(failing)
    about = end.message if failing.differ or kind is UNFIT_TENSORS else ""
    action = _advise_on_index(failing.values, end.message) or _find_action(failing, about, has_values=bool(values))
    if action:
        place = f": {code}" if failing.code else ""
        return f"{action}{place}{values}"
    if facts.is_a("UnboundLocalError"):
        return f"assign {code} on every path to this line of the script"
    if requirement:
        return f"as the message says: {requirement}{values}"
    if failing.documentation:
        place = f"see {code}, which" if failing.code else "see the call that failed, which"
        return f"{place} the library documents: {failing.documentation}{values}"
    return f"fix this line of the script, or what it gets: {code}{values}" if values else ""


def _name_sources(failing: FailingCode) -> str:
    """Return from where the values may come; empty: unknown."""
    known = [text for source, text in _ORIGINS.items() if source in failing.sources.split()]
    return f" (a value may come from {' or '.join(known)})" if known else ""


def name_code(end: WorkerEnd) -> str:
    """Return the code of the script that failed; empty: unknown."""
    facts = _find_innermost(end)
    is_own = facts.is_check and facts.by_script and 0 < facts.line.count("(") == facts.line.count(")")
    code = facts.failing.code or (facts.line if is_own else "")
    return f"`{code}`" if code else ""


def complete_remedy(remedy: str, end: WorkerEnd) -> str:
    """Return the remedy of a kind with the code that failed, and the values that it got, as far as they are known."""
    values = _find_innermost(end).failing.values
    code = name_code(end) or "a wait of the script"
    return remedy.replace(CODE, code).replace(VALUES, f" ({values})" if values else "")


def _find_innermost(end: WorkerEnd) -> ExceptionFacts:
    chain = [facts for facts in end.chain if not facts.handled and (facts.failing.is_known or facts.by_script)]
    return chain[-1] if chain else ExceptionFacts()


def _advise_on_names(failing: FailingCode) -> str:
    if failing.names.startswith("import "):
        return failing.names
    if failing.package:
        return advise_on_names(f"{failing.names} ({failing.package})", failing.package.split()[0])
    return f"{failing.names}: correct the name in this line of the script"


def advise_on_names(names: str, package: str) -> str:
    """Return the remedy for a name that a package lacks. ``names``: what it has, or lacks."""
    return f"{names}: correct the name, or use the version of {package} that has it"


def _describe_check(failing: FailingCode) -> str:
    values = f" ({failing.values})" if failing.values else ""
    return f"fix this line of the script, or what it refuses: {failing.check}{values}"


def _find_action(failing: FailingCode, message: str, *, has_values: bool) -> str:
    """Return what to do about values that differ; empty: they do not, or the message is about something else."""
    kind, _, detail = failing.differ.partition(" ")
    if _is_certain(failing, message):
        return f"{_CONVERSIONS[kind].partition(' (')[0]} ({detail})" if detail else _CONVERSIONS[kind]
    first_line = message.partition("\n")[0]  # more lines may print objects with all their properties
    about = next((name for name, words in _PROPERTIES.items() if words.search(first_line)), "")
    if not has_values:
        return _CONVERSIONS.get(about, "")
    return _CONVERSIONS["shape" if kind in ("", *_CERTAIN) else kind] if about == "batch" else ""


def _advise_on_index(values: str, message: str) -> str:
    """Return what to do about integers whose largest number a message calls an index; empty: there are none."""
    for name, largest in _INTEGERS.findall(values):
        if re.search(rf"(?i)\bind(ex|ices)\b[^\n]{{0,20}}\b{largest}\b", message):
            return f"keep `{name}` within the size of what it selects from, or enlarge that"
    return ""


def _is_certain(failing: FailingCode, message: str) -> bool:
    """Return whether values differ in what needs a conversion. Some functions accept several types of numbers."""
    kind = failing.differ.partition(" ")[0]
    return kind in _CERTAIN and (kind != "dtype" or bool(_PROPERTIES[kind].search(message)))


def _find_sentences(pattern: "re.Pattern[str]", message: str, most: int) -> str:
    """Return the first sentences of a message that a pattern finds; empty without one."""
    found = (match[1] for match in pattern.finditer(message) if not _READ.match(match[1]))
    return "; ".join(" ".join(sentence.split()) for sentence in islice(found, most))
