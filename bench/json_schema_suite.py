"""How much of JSON schema is enforced, by the JSON-Schema-Test-Suite?  Prints figures of docs/constrained-output.md.

    python bench/json_schema_suite.py SUITE/tests [--list] [--drafts draft2020-12 ...]

SUITE is a copy of https://github.com/json-schema-org/JSON-Schema-Test-Suite; the source distribution of the Python
package jsonschema has one in its folder json/.  Each schema goes through the product's own preparation, strict and not,
and each instance is written out and followed by a matcher.  A property may come anywhere, so small objects are tried in
all orders.  *Invalid accepted* and *valid refused* count instances; of the latter, *unnamed* have properties that the
schema does not name (objects are closed on purpose).  ``--list`` names the others.
"""

import argparse
import itertools
import json
from collections import Counter
from pathlib import Path

from lucevisor.text.grammar import forms
from lucevisor.text.grammar.matcher import GrammarCompiler, GrammarError
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.tokenizer import Tokenizer
from tests.text.vocabularies import CONTROL, byte_metadata

DRAFTS = ["draft2020-12", "draft2019-09", "draft7", "draft6", "draft4"]
TOKENIZER = Tokenizer.from_gguf(byte_metadata("qwen2", {"<|endoftext|>": CONTROL}))
COMPILER = GrammarCompiler(TOKENIZER)
COLUMNS = (
    *("schemas", "refused", "none fits", "instances"),
    *("right", "invalid accepted", "valid refused", "unnamed"),
)
SCHEMAS = {"draft4": "http://json-schema.org/draft-04/schema#"}


def grammar(schema, *, lenient):
    """The compiled grammar, or why there is none."""
    if schema is False:
        return "no value fits it"
    try:
        rules = Rules(TOKENIZER)
        part = forms.json_schema({} if schema is True else schema, lenient=lenient)
        return COMPILER.compile(rules.grammar(rules.part(part)))
    except GrammarError as error:
        return str(error)


def orders(value):
    """A value with the properties of its objects in all orders, up to a bound."""
    if isinstance(value, list):
        yield from (list(some) for some in itertools.islice(itertools.product(*map(list, map(orders, value))), 200))
    elif isinstance(value, dict):
        for keys in itertools.islice(itertools.permutations(value), 120):
            for some in itertools.islice(itertools.product(*(list(orders(value[key])) for key in keys)), 50):
                yield dict(zip(keys, some, strict=True))
    else:
        yield value


def accepts(found, instance):
    for value in itertools.islice(orders(instance), 500):
        ids = TOKENIZER.encode(json.dumps(value, ensure_ascii=False))
        one = found.matcher()
        if one.n_valid(0, [], ids) == len(ids):
            row = one.masks(0, ids, [])
            if any(row[i // 8] >> (i % 8) & 1 for i in TOKENIZER.eos_ids):
                return True
    return False


def opened(schema):
    """The schema with every object open for further properties."""
    if isinstance(schema, list):
        return [opened(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: value if key in ("enum", "const") else opened(value) for key, value in schema.items()}
    if ("properties" in schema or "required" in schema) and "additionalProperties" not in schema:
        result["additionalProperties"] = True
    return result


def measure(folder, draft, listed):
    counts = {"strict": Counter(), "lenient": Counter()}
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            schema = group["schema"]
            if draft in SCHEMAS and isinstance(schema, dict):
                schema = {"$schema": SCHEMAS[draft], **schema}
            for mode, count in counts.items():
                lenient = mode == "lenient"
                found, open_too = grammar(schema, lenient=lenient), None
                count["schemas"] += 1
                if isinstance(found, str):
                    count["none fits" if "no value fits" in found else "refused"] += 1
                    if lenient and "no value fits" not in found:
                        listed.append(f"{draft} {mode} {path.name} {group['description']}: refused, {found}")
                    if "no value fits" in found and any(test["valid"] for test in group["tests"]):
                        listed.append(f"{draft} {mode} {path.name} {group['description']}: refused, {found}")
                        count["valid refused"] += sum(test["valid"] for test in group["tests"])
                    continue
                for test in group["tests"]:
                    accepted = accepts(found, test["data"])
                    count["instances"] += 1
                    if accepted == test["valid"]:
                        count["right"] += 1
                        continue
                    kind = "invalid accepted" if accepted else "valid refused"
                    if not accepted:
                        open_too = open_too or grammar(opened(schema), lenient=lenient)
                        if not isinstance(open_too, str) and accepts(open_too, test["data"]):
                            kind = "unnamed"
                    count[kind] += 1
                    if kind == "valid refused" or (not lenient and kind == "invalid accepted"):
                        listed.append(
                            f"{draft} {mode} {path.name} {group['description']}: {test['description']}: {kind}"
                        )
    return counts


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("suite", type=Path)
    parser.add_argument("--drafts", nargs="+", default=DRAFTS)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    listed = []
    print("| draft | mode |", " | ".join(COLUMNS), "|")
    print("|---|---|" + "---:|" * len(COLUMNS))
    for draft in options.drafts:
        for mode, count in measure(options.suite / draft, draft, listed).items():
            print(f"| {draft} | {mode} |", " | ".join(str(count[column]) for column in COLUMNS), "|", flush=True)
    for line in listed if options.list else ():
        print(line)


if __name__ == "__main__":
    main()
