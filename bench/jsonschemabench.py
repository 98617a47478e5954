"""How much of the schemas of jsonschemabench is enforced?  Prints the tables of docs/constrained-output.md.

    python bench/jsonschemabench.py REPOSITORY/maskbench/data [NAME.json ...] [--sample 1000] [--list] [--save]

REPOSITORY is a copy of https://github.com/guidance-ai/jsonschemabench: schemas from the field, each with instances that
fit and others that do not.  Each schema goes through the product's own preparation, strict and not, and each instance
is written out and followed by a matcher.  A valid instance that is refused is put down to what lets it pass: further
properties in every object (*unnamed*: objects are closed on purpose), another order of properties (*order*), other
forms of its numbers (*numbers*), or the schema without a keyword; or to what llguidance says.  ``--list`` names the
instances that are judged wrong for another reason.
"""

import argparse
import json
import random
from collections import Counter
from decimal import Decimal
from pathlib import Path

import jsonschema
from json_schema_suite import TOKENIZER, grammar, opened
from records import machine, save

from lucevisor.text.grammar.matcher import GrammarError

MODES = ("strict", "lenient")
COLUMNS = ("schemas", "refused", "none fits", "valid", "valid refused", "invalid", "invalid accepted")
MOST_TRIES = 200
KEYWORDS = frozenset(jsonschema.Draft202012Validator.VALIDATORS) | {"additionalItems", "dependencies", "$recursiveRef"}
VALUES = ("enum", "const", "default", "examples")


def accepts(found, instance):
    return ends(found, as_it_is(instance))


def ends(found, text):
    """Whether an answer may be this text."""
    one, ids = found.matcher(), TOKENIZER.encode(text)
    return follow(one, ids) == len(ids) and any(allows(one.masks(0, ids, []), i) for i in TOKENIZER.eos_ids)


def follow(one, ids):
    """How many tokens the grammar takes; all at once may take more work than one step may."""
    taken = one.n_valid(0, [], ids)
    while taken < len(ids) and allows(one.masks(0, ids[:taken], []), ids[taken]):
        taken += 1
    return taken


def allows(row, token):
    return row[token // 8] >> (token % 8) & 1


def fits_in_an_order(found, instance, write):
    """Whether an answer may be the instance, with the properties of each object in some order."""
    n_left = MOST_TRIES

    def texts(value, text):
        nonlocal n_left
        n_left -= 1
        ids = TOKENIZER.encode(text)  # what is certain must come in the tokens that the tokenizer makes of it
        if n_left < 0 or follow(found.matcher(), ids) < len(ids):
            return
        if isinstance(value, dict):
            yield from members(value, text + "{", "")
        elif isinstance(value, list):
            yield from items(value, text + "[", "")
        else:
            yield text + write(value)

    def members(left, text, comma):
        if not left:
            yield text + "}"
        for key, value in left.items():
            rest = {other: left[other] for other in left if other != key}
            for more in texts(value, f"{text}{comma}{json.dumps(key, ensure_ascii=False)}: "):
                yield from members(rest, more, ", ")

    def items(left, text, comma):
        if not left:
            yield text + "]"
            return
        for more in texts(left[0], text + comma):
            yield from items(left[1:], more, ", ")

    return any(ends(found, text) for text in texts(instance, ""))


def as_it_is(value):
    return json.dumps(value, ensure_ascii=False)


def plain(value):
    """A value that is no object or array, numbers as most people write them: 2 for 2.0, 0.000001 for 1e-06."""
    if not isinstance(value, float):
        return as_it_is(value)
    return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")


def parts(schema):
    """All objects in a schema."""
    if isinstance(schema, dict):
        yield schema
    for one in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from parts(one)


def without(schema, keyword):
    """The schema without a keyword, wherever it is."""
    if isinstance(schema, list):
        return [without(one, keyword) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != keyword}
    return {key: value if key in VALUES else without(value, keyword) for key, value in kept.items()}


def why_refused(schema, found, instance):
    """What lets a valid instance pass."""
    open_too = grammar(opened(schema), lenient=True)
    for name, write in (("order", as_it_is), ("numbers", plain)):
        if fits_in_an_order(found, instance, write):
            return name
        if not isinstance(open_too, str) and accepts(open_too, instance):
            return "unnamed"
        if not isinstance(open_too, str) and fits_in_an_order(open_too, instance, write):
            return f"{name}, unnamed"
    for keyword in ("format", "pattern", "type", *sorted({key for one in parts(schema) for key in one} & KEYWORDS)):
        other = grammar(without(opened(schema), keyword), lenient=True)
        if not isinstance(other, str) and (accepts(other, instance) or fits_in_an_order(other, instance, plain)):
            return keyword
    return "other"


class Tally:
    """What one mode does to the schemas so far."""

    def __init__(self):
        self.count, self.reasons, self.refusals, self.listed = Counter(), Counter(), Counter(), []

    def add(self, given, found, name):
        self.count["schemas"] += 1
        if isinstance(found, str):
            none_fits = "no value fits" in found
            self.count["none fits" if none_fits else "refused"] += 1
            self.refusals[found.split(" at #")[0].split("/")[0][:60]] += 1
            if none_fits:
                self.count["valid refused"] += sum(test["valid"] for test in given["tests"])
            return
        for index, test in enumerate(given["tests"]):
            kind, why = "valid" if test["valid"] else "invalid", "accepted"
            self.count[kind] += 1
            try:
                accepted = accepts(found, test["data"])
                if test["valid"] and not accepted:
                    why = why_refused(given["schema"], found, test["data"])
            except GrammarError as error:
                accepted, why = False, str(error)
            if accepted != test["valid"]:
                self.count[f"{kind} {'accepted' if accepted else 'refused'}"] += 1
                self.reasons[why] += 1
                if why not in ("unnamed", "order", "order, unnamed"):
                    self.listed.append(f"{name} {index}: {kind} {why}")


def measure(paths):
    tallies = {mode: Tally() for mode in MODES}
    for number, path in enumerate(paths):
        given = json.loads(path.read_text())
        for mode, tally in tallies.items():
            tally.add(given, grammar(given["schema"], lenient=mode == "lenient"), path.name)
        if number % 500 == 499:
            print(number + 1, "schemas")
            show(tallies)
    return tallies


def show(tallies):
    print("| mode |", " | ".join(COLUMNS), "|")
    print("|---|" + "---:|" * len(COLUMNS))
    for mode, tally in tallies.items():
        print(f"| {mode} |", " | ".join(str(tally.count[column]) for column in COLUMNS), "|")
    for mode, tally in tallies.items():
        for name, many in (("wrong", tally.reasons), ("refused", tally.refusals)):
            print(f"{mode}, {name}:", ", ".join(f"{reason} {n}" for reason, n in many.most_common()), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="of schemas; all without")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    paths = [options.folder / name for name in options.names] or sorted(options.folder.glob("*.json"))
    if options.sample:
        paths = random.Random(options.seed).sample(paths, options.sample)
    tallies = measure(paths)
    show(tallies)
    for mode, tally in tallies.items():
        for line in tally.listed if options.list else ():
            print(mode, line)
    if options.save:
        save("jsonschemabench", {"machine": machine(), **{mode: vars(tally) for mode, tally in tallies.items()}})


if __name__ == "__main__":
    main()
