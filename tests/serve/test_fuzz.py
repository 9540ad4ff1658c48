"""schemathesis makes requests from the OpenAPI description, valid and not, and holds the answers against it."""

import pytest
from hypothesis import HealthCheck, given, settings

from dpformer.serve.app import create_app
from dpformer.serve.ranker import load_for_serving

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

ROUTES = {"POST /recommend": 60, "GET /items": 30, "GET /similar": 30}
ROUTES |= {f"GET /{name}": 2 for name in ("privacy", "healthz", "readyz", "version", "metrics")}


@pytest.fixture(scope="module")
def operations(run):
    described = schemathesis.openapi.from_asgi("/openapi.json", create_app(load_for_serving(run)))
    return {found.ok().label: found.ok() for found in described.get_all_operations()}


def test_every_route_is_described(operations):
    assert set(operations) == set(ROUTES)


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("route", ROUTES)
def test_answers_are_as_described(route, mode, operations):
    if mode == "negative" and ROUTES[route] < 10:
        pytest.skip("takes nothing that could be wrong")
    statuses: set[int] = set()

    @settings(max_examples=ROUTES[route], deadline=None, suppress_health_check=list(HealthCheck))
    @given(operations[route].as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def check(case):
        # A text may be no condition, or no item: no schema says which are.
        skipped = [checks.positive_data_acceptance] if route in ("POST /recommend", "GET /similar") else []
        statuses.add(case.call_and_validate(excluded_checks=skipped).status_code)

    check()
    # An item that happens to be in the catalogue is not to be expected.
    assert (200 in statuses) if mode == "positive" and route != "GET /similar" else (422 in statuses)


def test_a_description_that_is_wrong_is_found(run):
    """The check above can fail: a route that answers other than described."""
    app = create_app(load_for_serving(run))
    app.openapi()["components"]["schemas"]["Health"]["properties"]["items"] = {"type": "string"}
    described = schemathesis.openapi.from_asgi("/openapi.json", app)
    operation = next(found.ok() for found in described.get_all_operations() if found.ok().label == "GET /healthz")
    with pytest.raises(BaseException, match="violates schema"):
        operation.Case().call_and_validate()
