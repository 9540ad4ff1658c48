"""A statement as an entry of a registry: valid by the committed schema, true of its run, and honest about what is missing."""

import json
from pathlib import Path

import jsonschema
import pytest

from dpformer.fit.run import start
from dpformer.privacy.registry import registry_entry
from tests.fit.conftest import small_log
from tests.recipes import small_recipe

SCHEMA = Path(__file__).parents[2] / "docs" / "registry.schema.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from dpformer.data import prepare, save

    folder = tmp_path_factory.mktemp("registered")
    save(prepare(small_log(), title="title"), folder / "data")
    opened = start(folder / "run", folder / "data", small_recipe())
    assert opened.train()
    opened.close()
    return folder / "run"


def test_an_entry_is_what_the_statement_says(run, dpformer):
    statement = json.loads(dpformer("privacy", run, "--json").out)
    done = dpformer("privacy", run, "--registry", "--organisation", "A library", "--justification", "policy 12")
    entry = json.loads(done.out)
    schema = json.loads(SCHEMA.read_text())
    jsonschema.validate(entry, schema)
    for part in (schema, *schema["$defs"].values()):  # no field that is unknown, or left out
        assert part["additionalProperties"] is False
        assert set(part["required"]) == set(part["properties"])
    assert (entry["guarantee"]["epsilon"], entry["guarantee"]["delta"]) == (statement["epsilon"], statement["delta"])
    assert entry["guarantee"]["unit"] == statement["unit"]
    assert set(statement["assumed_public"]) <= set(entry["guarantee"]["unprotected"])
    steps = next(one for one in entry["mechanisms"] if one["name"] == "gradients")
    assert (steps["times"], steps["sampling_rate"]) == (
        statement["steps"]["charged"],
        statement["steps"]["sampling_rate"],
    )
    assert entry["insecure"] == statement["insecure"]
    assert entry["to_fill_in"] == ["intended_use"]
    assert "--intended-use" in done.err


def test_what_the_owner_has_not_said_is_listed(run):
    from dpformer.artifact import read_statement

    entry = registry_entry(read_statement(run), "run")
    assert entry["to_fill_in"] == ["organisation", "intended_use", "justification"]


def test_the_statement_in_words(run, dpformer):
    from dpformer.artifact import read_statement

    assert " ".join(dpformer("privacy", run).out.split()) == " ".join(read_statement(run).text().split())
